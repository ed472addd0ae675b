"""Counting who trains what, entry by entry, and measuring what is cut away."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.policies.magnitude import magnitude, rank_by_magnitude
from fedcover.submodels import coverage as cov
from fedcover.submodels.reductions import Masks, Slices, windows
from fedcover.types import Client, Coverage, View
from tests.helpers.cutting import kept_units, layouts

SETTINGS = settings(max_examples=60)


def some_reductions(data, layout):
    unit_choices = [
        data.draw(kept_units(layout.groups)) for _ in range(data.draw(st.integers(1, 4)))
    ]
    return [
        Slices(layout.groups, {n: torch.tensor(u) for n, u in units.items()})
        for units in unit_choices
    ], unit_choices


@SETTINGS
@given(layouts(), st.data())
def test_coverage_counts_are_sums_of_masks(layout, data):
    reductions, unit_choices = some_reductions(data, layout)
    counts = cov.count(layout.params, reductions)
    masks = [layout.mask(units) for units in unit_choices]
    expected = {name: sum(mask[name].long() for mask in masks) for name in layout.params}
    assert all(torch.equal(counts[n].long(), expected[n]) for n in expected)
    flat = torch.cat([t.flatten() for t in expected.values()])
    assert cov.minimum(counts) == int(flat.min())
    histogram = cov.histogram(counts)
    assert histogram == {value: int((flat == value).sum()) for value in sorted(set(flat.tolist()))}
    assert sum(histogram.values()) == sum(t.numel() for t in layout.params.values())


@pytest.mark.parametrize("clients", [1, 255, 256, 300, 1000])
def test_coverage_counts_more_than_255_clients(clients):
    params = {"w": torch.zeros(4), "b": torch.zeros(2)}
    half = Masks({"w": torch.tensor([True, True, False, False])})
    counts = cov.count(params, [half] * clients)
    assert counts["w"].tolist() == [clients, clients, 0, 0]
    assert cov.histogram(counts) == {0: 2, clients: 4}
    assert cov.minimum(counts) == 0


def test_coverage_of_no_clients_is_zero():
    counts = cov.count({"w": torch.zeros(3)}, [])
    assert cov.minimum(counts) == 0
    assert cov.histogram(counts) == {0: 3}


def test_coverage_window_forgets_and_ever_does_not():
    params = {"w": torch.zeros(4)}
    coverage_so_far = Coverage((), {})
    for round, trained in enumerate([1, 2, 0, 1, 0]):
        unit = torch.zeros(4, dtype=torch.bool)
        unit[trained] = True
        coverage_so_far = cov.record(
            coverage_so_far, cov.count(params, [Masks({"w": unit}), Masks({"w": unit})]), window=2
        )
        assert len(coverage_so_far.window) == min(round + 1, 2)
    assert cov.over_window(coverage_so_far)["w"].tolist() == [2, 2, 0, 0]  # the last two rounds
    assert coverage_so_far.window[-1]["w"].tolist() == [2, 0, 0, 0]  # newest last
    assert coverage_so_far.ever["w"].tolist() == [True, True, True, False]
    assert cov.covered_only({"w": torch.tensor([1.0, -2, 3, torch.nan])}, coverage_so_far)[
        "w"
    ].tolist() == [
        1,
        -2,
        3,
        0,
    ]


def test_coverage_record_leaves_earlier_ones_unchanged():
    params = {"w": torch.zeros(2)}
    first = cov.record(
        Coverage((), {}), cov.count(params, [Masks({"w": torch.tensor([True, False])})]), 3
    )
    cov.record(first, cov.count(params, [Masks({})]), 3)
    assert first.ever["w"].tolist() == [True, False]
    assert len(first.window) == 1


def test_coverage_window_sums_beyond_255():
    counts = cov.count({"w": torch.zeros(1)}, [Masks({})] * 200)
    coverage_so_far = Coverage((), {})
    for _ in range(3):
        coverage_so_far = cov.record(coverage_so_far, counts, 3)
    assert cov.over_window(coverage_so_far)["w"].tolist() == [600]


@SETTINGS
@given(layouts(), st.data())
def test_delta2_is_the_share_of_energy_cut_away(layout, data):
    reductions, units = some_reductions(data, layout)
    total = cov.energy(layout.params)
    lost_energy = sum(
        float(t[~layout.mask(units[0])[n]].square().sum()) for n, t in layout.params.items()
    )
    assert total == pytest.approx(sum(float(t.square().sum()) for t in layout.params.values()))
    nothing = Masks(
        {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in layout.params.items()}
    )
    noise = cov.delta2(layout.params, [reductions[0], windows(layout.groups, 1.0), nothing])
    assert noise == [pytest.approx(lost_energy / total, abs=1e-12), 0.0, 1.0]


def test_delta2_of_the_whole_model_is_exactly_zero():
    params = {"w": torch.randn(1000), "v": torch.randn(30, 7) * 1e-6}
    assert cov.delta2(params, [Masks({})]) == [0.0]
    assert cov.delta2({"w": torch.zeros(3)}, [Masks({})]) == [0.0]


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=7), st.data()
)
def test_largest_weights_have_the_least_delta2(weights, data):
    params = {"w": torch.tensor(weights)}
    size = data.draw(st.integers(1, len(weights)))
    view = View(0, params, (), ("w",), (Client(0, size / len(weights), 0, 1, ()),), (1.0,), "width",
                Coverage((), {}), 0)  # fmt: skip
    (noise,) = magnitude(view)
    assert noise.sizes(params)["w"] == size
    masks = []
    for places in itertools.combinations(range(len(weights)), size):
        bits = torch.zeros(len(weights), dtype=torch.bool)
        bits[list(places)] = True
        masks.append(Masks({"w": bits}))
    assert cov.delta2(params, [noise]) == [min(cov.delta2(params, masks))]
    assert sorted(rank_by_magnitude(params["w"]).tolist()) == list(range(len(weights)))
