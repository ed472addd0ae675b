"""Rules, weights, what becomes of uncovered entries, server optimisers and the baselines, against
loops.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.fleet import drops_out
from fedcover.policies import as_policy
from fedcover.server.aggregation import coverage_mean, median, trimmed_mean
from fedcover.server.cohort import cohort_of
from fedcover.server.optimizers import SERVERS, AggregatedTensor, server_none
from fedcover.server.round import run_round
from fedcover.submodels.reductions import Masks, windows
from fedcover.training.local_sgd import train_client
from fedcover.types import Cut, UnitGroup
from tests.helpers import twins
from tests.helpers.worlds import same, world

GROUP = (UnitGroup("hidden", 5, (Cut("w", 0), Cut("b", 0), Cut("v", 1))),)
SHAPES = {"w": (5, 2), "b": (5,), "v": (2, 5)}
RULES_AND_TWINS = {
    "mean": (coverage_mean, twins.weighted_mean),
    "over clients": (
        lambda old, parts: coverage_mean(old, parts, over="clients"),
        twins.mean_of_changes,
    ),
    "over moved": (lambda old, parts: coverage_mean(old, parts, over="moved"), twins.mean_of_moved),
    "median": (median, twins.middle_value),
    "trimmed 0": (lambda old, parts: trimmed_mean(old, parts, share=0), twins.trimmed(0)),
    "trimmed 0.1": (trimmed_mean, twins.trimmed(0.1)),
    "trimmed 0.34": (lambda old, parts: trimmed_mean(old, parts, share=0.34), twins.trimmed(0.34)),
    "trimmed 0.49": (lambda old, parts: trimmed_mean(old, parts, share=0.49), twins.trimmed(0.49)),
}


def random_parts(seed, clients, unstructured):
    """Old tensors and clients with units or bits of their own, some values unchanged; NaN where
    nothing may be read.
    """
    draw = torch.Generator().manual_seed(seed)
    old = {
        n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in SHAPES.items()
    }
    parts = []
    for _ in range(clients):
        if unstructured:
            masks = Masks(
                {
                    "w": torch.rand(5, 2, generator=draw) < 0.5,
                    "v": torch.rand(2, 5, generator=draw) < 0.5,
                }
            )
        else:
            start = {"hidden": int(torch.randint(5, (1,), generator=draw))}
            masks = windows(GROUP, float(torch.rand(1, generator=draw)), start)
        params = masks.extract(old)
        moved = {n: torch.rand(t.shape, generator=draw) < 0.7 for n, t in params.items()}
        values = {
            n: t + torch.randint(-2, 3, t.shape, generator=draw) * moved[n]
            for n, t in params.items()
        }
        if unstructured:
            values = {n: torch.where(masks.mask(old)[n], t, torch.nan) for n, t in values.items()}
        parts.append((masks, values, float(torch.randint(1, 9, (1,), generator=draw))))
    return old, parts


def in_full(old, part):
    """A part in the full shapes, for the twins."""
    part_masks, values, weight = part
    masks, full = part_masks.mask(old), {}
    for name, tensor in old.items():
        full[name] = torch.zeros_like(tensor)
        full[name][masks[name]] = (
            values[name].flatten()
            if values[name].shape != tensor.shape
            else values[name][masks[name]]
        )
    return full, masks, weight


@pytest.mark.parametrize("name", RULES_AND_TWINS)
@given(seed=st.integers(0, 10**6), clients=st.integers(0, 7), unstructured=st.booleans())
@settings(max_examples=40)
def test_rules_equal_a_loop(name, seed, clients, unstructured):
    fast, slow = RULES_AND_TWINS[name]
    old, parts = random_parts(seed, clients, unstructured)
    expected = twins.combined(old, [in_full(old, part) for part in parts], slow)
    same(fast(old, iter(parts)), expected, 1e-12)


@given(seed=st.integers(0, 10**6), clients=st.integers(1, 6))
@settings(max_examples=30)
def test_mean_of_values_equals_mean_of_changes(seed, clients):
    old, parts = random_parts(seed, clients, False)
    zero = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
    changes = [
        (held, {n: v - held.extract(old)[n] for n, v in values.items()}, w)
        for held, values, w in parts
    ]
    moved = coverage_mean(zero, changes)
    same(coverage_mean(old, parts), {name: old[name] + moved[name] for name in old}, 1e-12)


def test_rules_differ_from_each_other():
    """Else the comparisons above would prove nothing.

    A tenth of seven is nobody; without 49 % there is the median.
    """
    old, parts = random_parts(5, 7, False)
    results = {name: fast(old, parts)["v"] for name, (fast, _) in RULES_AND_TWINS.items()}
    torch.testing.assert_close(results.pop("trimmed 0.1"), results["trimmed 0"])
    torch.testing.assert_close(results.pop("trimmed 0.49"), results["median"])
    for name, result in results.items():
        assert not any(result.allclose(other) for key, other in results.items() if key != name), (
            name
        )


def test_trimmed_mean_always_keeps_a_value():
    values = [{"w": torch.tensor([float(v)])} for v in (1, 3)]
    for share in (0.49, 0.4999999999):
        new = trimmed_mean(
            {"w": torch.zeros(1)}, [(Masks({}), v, 1.0) for v in values], share=share
        )
        assert new["w"].tolist() == [2.0]
    with pytest.raises(InvalidValue, match="share must be in"):
        trimmed_mean({}, [], share=0.5)
    with pytest.raises(InvalidValue, match="over"):
        coverage_mean({}, [], over="everybody")


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(
    ("rule", "slow"),
    [
        ("coverage_mean", twins.weighted_mean),
        ("coverage_mean(over='clients')", twins.mean_of_changes),
        ("coverage_mean(over='moved')", twins.mean_of_moved),
        ("trimmed_mean(share=0.25)", twins.trimmed(0.25)),
        ("median", twins.middle_value),
    ],
)
def test_rounds_by_every_rule_equal_a_loop(rule, slow, weights):
    fields = {"dataset": "digits", "partition": "dirichlet(alpha=0.5)", "batch_size": 50}
    setup, state = world("mlp", policy="rolling", rule=rule, weights=weights, epochs=1, **fields)
    for _ in range(2):
        updates = [
            (c, r, train_client(setup.task, state, c, r, setup.lr(0)))
            for c, r in twins.working(setup, state)
        ]
        assert len({client.samples for client, _, _ in updates}) > 1
        parts = [
            (
                *in_full(state.params, (part, update.params, 1.0))[:2],
                client.samples if weights == "samples" else 1,
            )
            for client, part, update in updates
        ]
        expected = twins.combined(state.params, parts, slow)
        state, _ = run_round(setup, state)
        same(state.params, expected, 1e-12)


# ── what nobody trained ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("server", ["none", "momentum", "adam"])
def test_uncovered_entries_are_kept_or_zeroed(server):
    setup, state = world("mlp", policy="prefix", fleet="1x0.5", server=server)
    zeroed = world("mlp", policy="prefix", fleet="1x0.5", server=server, uncovered="zero")[0]
    left, right = run_round(setup, state)[0], run_round(zeroed, state)[0]
    assert any(bool((counts == 0).any()) for counts in left.coverage.window[-1].values())
    for name, counts in left.coverage.window[-1].items():
        uncovered_entries = counts == 0
        assert torch.equal(
            left.params[name][uncovered_entries], state.params[name][uncovered_entries]
        )
        assert not right.params[name][uncovered_entries].any()
        assert torch.equal(
            left.params[name][~uncovered_entries], right.params[name][~uncovered_entries]
        )


@pytest.mark.parametrize("server", ["none", "momentum", "adam"])
@pytest.mark.parametrize("uncovered", ["keep", "zero"])
def test_round_without_answers_keeps_everything(server, uncovered):
    setup, state = world("mlp", policy="prefix", server=server, uncovered=uncovered)
    state, _ = run_round(setup, state)
    nobody = replace(setup, policy=as_policy(lambda view: [None] * len(view.cohort)))
    after, report = run_round(nobody, state)
    same(after.params, state.params)
    assert after.round == state.round + 1
    assert after.server.keys() == state.server.keys()
    for slot in state.server:
        same(after.server[slot], state.server[slot])
    assert report.metrics["gamma_round"] == 0
    assert report.metrics["train_loss"] is None
    assert report.metrics["bytes_up"] == 0


# ── server optimisers ─────────────────────────────────────────────────────────────────────────────


def momentum_by_hand(memory, old, new, lr=0.7, beta=0.6):
    velocity = beta * memory.get("velocity", 0.0) + (new - old)
    return old + lr * velocity, {"velocity": velocity}


def adam_by_hand(memory, old, new, lr=0.05, beta1=0.8, beta2=0.95, tau=0.01):
    change = new - old
    first = beta1 * memory.get("first", 0.0) + (1 - beta1) * change
    second = beta2 * memory.get("second", tau**2) + (1 - beta2) * change**2
    return old + lr * first / (second**0.5 + tau), {"first": first, "second": second}


@pytest.mark.parametrize(
    ("server", "by_hand"),
    [
        ("momentum(lr=0.7, beta=0.6)", momentum_by_hand),
        ("adam(lr=0.05, beta1=0.8, beta2=0.95, tau=0.01)", adam_by_hand),
    ],
)
def test_server_optimisers_equal_loops_on_covered_entries(server, by_hand):
    """Four rounds of rolling windows: entries are covered in some of them and rest in others."""
    setup, state = world("mlp", policy="rolling", fleet="1x0.25", active=2, rounds=4, server=server)
    memory: dict[tuple[str, int], dict[str, float]] = {}
    rested = 0
    for _ in range(4):
        averaged = run_round(replace(setup, server=server_none()), state)[0]
        before, (state, _) = state, run_round(setup, state)
        for name, counts in averaged.coverage.window[-1].items():
            for i, covered in enumerate(counts.flatten().tolist()):
                old, now = (
                    float(before.params[name].flatten()[i]),
                    float(state.params[name].flatten()[i]),
                )
                if covered:
                    new = float(averaged.params[name].flatten()[i])
                    expected, memory[name, i] = by_hand(memory.get((name, i), {}), old, new)
                    assert now == pytest.approx(expected, rel=1e-10, abs=1e-13)
                else:
                    assert now == old
                    rested += (name, i) in memory
                for slot, value in memory.get((name, i), {}).items():
                    slot_value = float(state.server[slot][name].flatten()[i])
                    assert slot_value == pytest.approx(value, rel=1e-10, abs=1e-13)
    assert rested > 0  # some entry was covered and later rested with a memory


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("momentum", {"beta": 1.0}),
        ("momentum", {"beta": -0.1}),
        ("momentum", {"lr": 0}),
        ("adam", {"lr": 0}),
        ("adam", {"tau": 0}),
        ("adam", {"beta1": 1}),
        ("adam", {"beta1": -0.1}),
        ("adam", {"beta2": 1}),
        ("adam", {"beta2": -0.1}),
    ],
)
def test_wrong_server_options_are_refused(name, wrong):
    with pytest.raises(InvalidValue, match=f"server {name}: .*{next(iter(wrong))}"):
        SERVERS[name](**wrong)


@pytest.mark.parametrize(
    ("name", "right"), [("momentum", {"beta": 0}), ("adam", {"beta1": 0}), ("adam", {"beta2": 0})]
)
def test_server_optimisers_accept_options_at_their_limits(name, right):
    old, new = torch.zeros(3), torch.ones(3)
    moved, _ = SERVERS[name](**right)(
        AggregatedTensor(old, new, torch.tensor([True, True, False])), {}
    )
    assert (moved[:2] > 0).all()
    assert moved[2] == new[2]


# ── baselines ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("policy", "least", "share"), [("exclude", 1.0, 1.0), ("exclude(below=0.5)", 0.5, 0.5)]
)
def test_exclude_leaves_weak_clients_out(policy, least, share):
    setup, state = world("mlp", policy=policy)
    cohort = cohort_of(setup, 0)
    strong = [c.id for c in cohort if c.capacity >= least]
    assert 0 < len(strong) < len(cohort)
    after, report = run_round(setup, state)
    assert sorted(int(id) for id in report.metrics["clients"]) == sorted(strong)
    assert sorted(report.metrics["dropped"]) == sorted(c.id for c in cohort if c.capacity < least)
    masks = windows(setup.task.model.groups, share).mask(state.params)
    for name, counts in after.coverage.window[-1].items():
        assert torch.equal(counts.long(), masks[name] * len(strong))
    assert report.metrics["gamma_round"] == (len(strong) if share == 1 else 0)


def test_exclude_equals_fedavg_among_the_strong():
    setup, state = world("mlp", policy="exclude")
    expected, updates = twins.slow_round(setup, state, twins.plain)
    assert all(client.capacity == 1.0 for client, _ in updates)
    same(run_round(setup, state)[0].params, expected, 1e-9)


def test_exclude_round_of_weak_clients_keeps_everything():
    setup, state = world("mlp", policy="exclude", fleet="1x1.0 + 11x0.5", active=2, rounds=30)
    weak = next(q for q in range(30) if all(c.capacity < 1 for c in cohort_of(setup, q)))
    after, report = run_round(setup, replace(state, round=weak))
    same(after.params, state.params)
    assert report.metrics["clients"] == {}
    with pytest.raises(InvalidValue, match=r"below must be in \(0, 0.5\]"):
        run_round(world("mlp", policy="exclude(below=0.9)", fleet="1x0.5")[0], state)


def test_homogeneous_and_full_equal_a_loop():
    for policy, share in (("homogeneous", 0.25), ("full", 1.0), ("homogeneous(share=0.5)", 0.5)):
        setup, state = world("mlp", policy=policy, drop_out=0.3)
        expected, updates = twins.slow_round(setup, state, twins.plain)
        answering = [c for c in cohort_of(setup, 0) if not drops_out(c.id, 0.3, setup.task.seed, 0)]
        assert len(updates) == len(answering) < 6
        masks = windows(setup.task.model.groups, share).mask(state.params)
        for _, slow in updates:
            same(slow.counts, masks)
        same(run_round(setup, state)[0].params, expected, 1e-9)
