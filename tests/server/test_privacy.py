"""Noise on the mean of clipped updates: its scale, its sensitivity, its whole numbers."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.server.aggregation import coverage_mean
from fedcover.server.grid_noise import keyed_stream
from fedcover.server.privacy import NoiseGrid, private_mean
from fedcover.server.round import aggregate, run_round
from fedcover.submodels.coverage import count
from fedcover.submodels.reductions import Masks
from fedcover.tensors import norm
from tests.helpers.private import round_of, vectors
from tests.helpers.worlds import same


def test_noise_scales_with_the_coverage_count():
    """Entry i is held by n clients: its mean carries noise of z * C / n, and none where nobody
    holds it.
    """
    size, clients, clip, noise = 200_000, 4, 0.3, 1.7
    old = {"w": torch.ones(size, dtype=torch.float64)}
    masks = [Masks({"w": torch.arange(size) % 5 > client}) for client in range(clients)]
    parts = [
        (mask, mask.extract(old)) for mask in masks
    ]  # nobody moves anything: what is left is the noise
    new = private_mean(old, parts, clip=clip, noise=noise, stream=keyed_stream(bytes(32)))
    counts = count(old, masks)["w"]
    assert sorted(set(counts.tolist())) == [0, 1, 2, 3, 4]
    for n in range(1, 5):
        noise_values = (new["w"] - 1)[counts == n]
        expected = noise * clip / n
        error = 5 / math.sqrt(2 * len(noise_values))  # five standard errors of a standard deviation
        assert float(noise_values.std()) == pytest.approx(expected, rel=error)
        assert abs(float(noise_values.mean())) < 5 * expected / math.sqrt(len(noise_values))
        tail = float((noise_values.abs() > 2 * expected).double().mean())  # of a normal: 4.55 %
        assert tail == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / len(noise_values)))
    assert torch.equal(new["w"][counts == 0], old["w"][counts == 0])


@settings(max_examples=100)
@given(vectors, st.floats(0.01, 10), st.data())
def test_sensitivity_is_at_most_twice_the_limit(entries, clip, data):
    """The sensitivity: whatever a client answers, the same noise gives a sum within 2 C."""
    old, new, bits = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*entries, strict=True)
    )
    other = torch.tensor(
        data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(old), max_size=len(old)))
    )
    reduction, whole = Masks({"w": bits.bool()}), Masks({})
    means = [
        private_mean(
            {"w": old},
            [(whole, {"w": old + 1}), (reduction, {"w": answer})],
            clip=clip,
            noise=1.0,
            stream=keyed_stream(bytes(32)),
        )["w"]
        for answer in (new, other.double())
    ]
    counts = count({"w": old}, [reduction, whole])["w"]
    assert float(((means[0] - means[1]) * counts).norm()) <= 2 * clip * (1 + 1e-6) + 1e-9


def difference(left, right):
    return {name: left[name].double() - right[name].double() for name in left}


def test_private_mean_without_noise_is_the_coverage_mean():
    _, state, updates = round_of(policy="rolling")
    old = {name: tensor.double() for name, tensor in state.params.items()}
    parts = [(u.trained, {n: t.double() for n, t in u.params.items()}) for u in updates]
    still = [(u.trained, u.trained.extract(old)) for u in updates]
    answer, quiet = (
        private_mean(old, mechanism, clip=1e3, noise=0.01, stream=keyed_stream(bytes(32)))
        for mechanism in (parts, still)
    )
    expected = coverage_mean(old, [(u.trained, u.params, 1.0) for u in updates])
    same(
        difference(answer, quiet),
        difference(expected, old),
        tolerance=len(updates) * NoiseGrid(1e3, 0.01).step,
    )


def test_private_sums_are_whole_numbers_for_any_dtype():
    """Counted in float16, steps of a grid of 2^30 would be infinite, and counts above 2,048 would
    stand still.
    """
    old = {"w": torch.zeros(3, dtype=torch.float16)}
    mask = Masks({"w": torch.tensor([True, True, False])})
    moved = {"w": torch.tensor([0.5, -0.25, 0.0], dtype=torch.float16)}
    new = private_mean(
        old, [(mask, moved)] * 3000, clip=1.0, noise=0.01, stream=keyed_stream(bytes(32))
    )
    torch.testing.assert_close(
        new["w"].double(), torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("noise", [0.01, 1.0, 3.7, 1e6])
def test_private_clip_is_over_the_whole_update(noise):
    """Four tensors, each of length 3 of which 2 are allowed together: what counts is the length of
    all, 6.
    """
    old = {name: torch.zeros(9, 1000, dtype=torch.float64) for name in "abcd"}
    loud = {name: tensor + 3 / math.sqrt(tensor.numel()) for name, tensor in old.items()}
    means = [
        private_mean(
            old, [(Masks({}), mechanism)], clip=2.0, noise=noise, stream=keyed_stream(bytes(32))
        )
        for mechanism in (loud, old)
    ]
    assert norm(difference(*means).values()) == pytest.approx(2.0, rel=1e-3)
    steps = NoiseGrid(2.0, noise).steps(loud)
    assert (
        sum(int(tensor.square().sum()) for tensor in steps.values())
        <= NoiseGrid(2.0, noise).max_square_sum
    )


@settings(max_examples=100)
@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6),
    st.floats(1e-30, 1e30),
    st.floats(0.01, 1e6),
)
def test_rounding_never_exceeds_the_clip_limit(entries, clip, noise):
    """In whole numbers: the sum of squares is at most (C in steps)^2, and no step is lost on the
    way to the model.
    """
    grid = NoiseGrid(clip, noise)
    steps = grid.steps({"w": torch.tensor(entries, dtype=torch.float64)})["w"].tolist()
    assert (
        sum(step**2 for step in steps)
        <= grid.max_square_sum
        <= (Fraction(2) ** grid.bits / Fraction(noise)) ** 2
    )
    assert 2**60 <= grid.max_square_sum <= 2**62
    assert grid.step * 2.0**grid.bits == noise * clip
    if grid.step * 2**30 > math.hypot(*entries):
        there = torch.tensor(steps, dtype=torch.float64) * grid.step
        torch.testing.assert_close(
            there, torch.tensor(entries, dtype=torch.float64), rtol=1e-9, atol=grid.step
        )


def test_clip_of_a_single_number_is_exact():
    grid = NoiseGrid(1.0, 1.0)
    assert grid.steps({"w": torch.tensor([-4.0])})["w"].tolist() == [-(2**31)]
    assert grid.max_square_sum == 2**62


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e200])
def test_update_of_infinite_length_counts_as_zero(odd):
    assert NoiseGrid(1.0, 1.0).steps({"w": torch.tensor([odd, 1.0], dtype=torch.float64)})[
        "w"
    ].tolist() == [0, 0]
    old, loud = {"w": torch.zeros(2)}, {"w": torch.tensor([odd, 1.0], dtype=torch.float64)}
    means = [
        private_mean(old, [(Masks({}), part)], clip=1.0, noise=1.0, stream=keyed_stream(bytes(32)))
        for part in (loud, old)
    ]
    same(*means)


def test_noise_key_is_fresh_in_every_round():
    """Neither the experiment's seed nor another one: with a seed one could subtract the noise."""
    setup, state, updates = round_of(
        policy="rolling", privacy="gaussian(noise=1.0)", clip_updates=1.0
    )
    left, right = aggregate(setup, state, updates), aggregate(setup, state, updates)
    assert all(not torch.equal(left.params[name], right.params[name]) for name in left.params)
    fixed = replace(setup, noise=lambda: keyed_stream(bytes(32)))
    same(aggregate(fixed, state, updates).params, aggregate(fixed, state, updates).params)


def test_undeclared_measurement_is_refused():
    setup, state, _ = round_of(policy="prunefl", recipe="prunefl")
    careless = replace(setup.task, recipe=replace(setup.task.recipe, measures={}))
    with pytest.raises(
        InvalidValue,
        match=r"^recipe measures 'squared_gradient', which its `measures` do not name$",
    ):
        run_round(replace(setup, task=careless), state)
