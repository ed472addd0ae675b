"""Updates longer than the limit are scaled down to it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.server.clipping import change, clip_update
from fedcover.server.round import aggregate, run_round
from fedcover.submodels.coverage import count
from fedcover.submodels.reductions import Masks, TrainedSubset
from fedcover.tensors import norm
from tests.helpers.private import round_of, vectors
from tests.helpers.worlds import same, world


@settings(max_examples=200)
@given(vectors, st.floats(0.01, 100), st.booleans())
def test_clip_scales_an_update_on_its_own_entries(entries, limit, own):
    old, new, covered_bits = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*entries, strict=True)
    )
    bits = {"w": covered_bits.bool()}
    trained = TrainedSubset(Masks({}), bits) if own else Masks(bits)
    before, after = {"w": old}, clip_update({"w": old}, trained, {"w": new}, limit)
    moved = change(before, trained, after)["w"]
    expected_change = torch.where(covered_bits.bool(), new - old, 0.0)
    far = float(expected_change.norm())
    assert float(moved.norm()) <= limit * (1 + 1e-9) + 1e-12
    torch.testing.assert_close(
        moved, expected_change * min(1.0, limit / far) if far else expected_change
    )
    if far <= limit:
        assert after["w"] is new  # bit for bit


@pytest.mark.parametrize("policy", ["rolling", "random", "magnitude"])
@pytest.mark.parametrize("rule", ["coverage_mean", "trimmed_mean", "median"])
def test_clipped_client_moves_the_model_by_at_most_the_limit(policy, rule):
    setup, state, updates = round_of(policy=policy, clip_updates=0.01, rule=rule)
    loud = [replace(updates[0], params={n: t + 100 for n, t in updates[0].params.items()})]
    after = aggregate(setup, state, loud)
    moved = {name: after.params[name] - state.params[name] for name in state.params}
    assert norm(moved.values()) == pytest.approx(0.01)
    outside = count(state.params, [updates[0].trained])
    assert all(bool((moved[n][outside[n] == 0] == 0).all()) for n in moved)


def test_clip_beyond_every_update_changes_nothing():
    plain, state = world(policy="rolling")
    limited, _ = world(policy="rolling", clip_updates=1e6)
    (left, _), (right, report) = run_round(plain, state), run_round(limited, state)
    same(left.params, right.params)
    assert report.metrics["clipped"] == 0


def test_clipped_clients_are_counted():
    setup, state = world(policy="rolling", clip_updates=1e-9)
    assert run_round(setup, state)[1].metrics["clipped"] == 6
