"""Cutting tensors down and adding them back, against a twin that goes through the entries one by
one.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.models import MODELS
from fedcover.submodels.reductions import (
    Masks,
    Slices,
    drawn,
    parameters_at_width,
    width_for_budget,
    windows,
)
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.types import Cut, UnitGroup
from tests.helpers.cutting import kept_units, layouts

SETTINGS = settings(max_examples=100)


def slices(layout, kept):
    return Slices(layout.groups, {name: torch.tensor(units) for name, units in kept.items()})


def equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@SETTINGS
@given(layouts(), st.data())
def test_extract_is_indexing_by_the_mask(layout, data):
    units = data.draw(kept_units(layout.groups))
    reduction, masks = slices(layout, units), layout.mask(units)
    equal(reduction.mask(layout.params), masks)
    part = reduction.extract(layout.params)
    for name, tensor in layout.params.items():
        assert torch.equal(part[name].flatten(), tensor[masks[name]]), name
        assert part[name].numel() == reduction.sizes(layout.params)[name] == int(masks[name].sum())
        assert part[name].ndim == tensor.ndim
        assert part[name].is_contiguous()
        other_axes = [
            tuple(a for a in range(tensor.ndim) if a != axis) for axis in range(tensor.ndim)
        ]
        assert part[name].shape == tuple(
            int(masks[name].any(axes).sum()) if axes else int(masks[name].sum())
            for axes in other_axes
        )
    assert reduction.gradient_mask() == {}


@SETTINGS
@given(layouts(), st.data(), st.sampled_from([1.0, 0.5, -3.0]))
def test_add_into_equals_the_dense_formula(layout, data, scale):
    units = data.draw(kept_units(layout.groups))
    reduction, masks = slices(layout, units), layout.mask(units)
    values = {name: torch.randn_like(t) for name, t in reduction.extract(layout.params).items()}
    target = {name: tensor.clone() for name, tensor in layout.params.items()}
    expected = {name: tensor.clone() for name, tensor in layout.params.items()}
    for name in expected:
        expected[name][masks[name]] += scale * values[name].flatten()
    reduction.add_into(target, values, scale)
    for name in target:
        torch.testing.assert_close(target[name], expected[name], rtol=0, atol=1e-12)
    counts = {name: torch.full_like(tensor, 2.0) for name, tensor in layout.params.items()}
    reduction.add_into(counts, None, scale)
    equal(counts, {name: 2.0 + scale * mask for name, mask in masks.items()})


@SETTINGS
@given(layouts(), st.data())
def test_add_into_puts_extracted_values_back(layout, data):
    reduction = slices(layout, data.draw(kept_units(layout.groups)))
    back = {name: torch.zeros_like(tensor) for name, tensor in layout.params.items()}
    reduction.add_into(back, reduction.extract(layout.params), 1.0)
    masks = reduction.mask(layout.params)
    equal(
        back, {name: torch.where(masks[name], tensor, 0) for name, tensor in layout.params.items()}
    )


@SETTINGS
@given(layouts(), st.data())
def test_cut_entries_are_neither_read_nor_written(layout, data):
    reduction = slices(layout, data.draw(kept_units(layout.groups)))
    masks = reduction.mask(layout.params)
    poisoned = {name: torch.where(masks[name], t, torch.nan) for name, t in layout.params.items()}
    part = reduction.extract(poisoned)
    assert all(bool(t.isfinite().all()) for t in part.values())
    reduction.add_into(poisoned, part, 1.0)
    equal({n: t.isnan() for n, t in poisoned.items()}, {n: ~m for n, m in masks.items()})


def test_extracted_parts_are_copies_or_are_never_written_through():
    group = UnitGroup("g", 4, (Cut("w", 0),))
    params = {"w": torch.arange(8.0).view(4, 2)}
    part = Slices((group,), {"g": torch.tensor([1, 3])}).extract(params)
    part["w"].zero_()
    assert torch.equal(params["w"], torch.arange(8.0).view(4, 2))


def test_fused_projections_are_cut_head_by_head():
    """Queries, keys and values of four heads of width 2 in one matrix, and the output
    projection.
    """
    group = UnitGroup(
        "heads", 4, (*(Cut("qkv", 0, start, 2) for start in (0, 8, 16)), Cut("out", 1, per_unit=2))
    )
    params = {"qkv": torch.arange(24 * 3).view(24, 3), "out": torch.arange(5 * 8).view(5, 8)}
    part = Slices((group,), {"heads": torch.tensor([1, 3])}).extract(params)
    rows = [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]
    assert torch.equal(part["qkv"], params["qkv"][rows])
    assert torch.equal(part["out"], params["out"][:, [2, 3, 6, 7]])


def test_cut_axes_apart_keep_their_order():
    groups = (UnitGroup("a", 4, (Cut("w", 0),)), UnitGroup("b", 5, (Cut("w", 2),)))
    reduction = Slices(groups, {"a": torch.tensor([0, 2]), "b": torch.tensor([0, 3, 4])})
    full = {"w": torch.arange(4 * 3 * 5.0).view(4, 3, 5)}
    part = reduction.extract(full)
    assert torch.equal(part["w"], full["w"][[0, 2]][:, :, [0, 3, 4]])
    target = {"w": torch.zeros(4, 3, 5)}
    reduction.add_into(target, part, 2.0)
    assert torch.equal(target["w"][0, 1], 2 * torch.tensor([5.0, 0, 0, 8, 9]))
    assert float(target["w"][1].abs().sum()) == 0


@SETTINGS
@given(layouts(), st.data())
def test_add_into_of_masks_equals_the_dense_formula(layout, data):
    bits = {
        name: torch.tensor(
            data.draw(st.lists(st.booleans(), min_size=t.numel(), max_size=t.numel()))
        ).view_as(t)
        for name, t in layout.params.items()
        if data.draw(st.booleans())
    }
    reduction = Masks(bits)
    whole = {
        name: bits.get(name, torch.ones(t.shape, dtype=torch.bool))
        for name, t in layout.params.items()
    }
    equal(reduction.mask(layout.params), whole)
    assert reduction.sizes(layout.params) == {name: int(mask.sum()) for name, mask in whole.items()}
    poisoned = {name: torch.where(whole[name], t, torch.nan) for name, t in layout.params.items()}
    cut = {name: torch.where(whole[name], t, 0) for name, t in layout.params.items()}
    equal(reduction.extract(poisoned), cut)
    target = {name: torch.ones_like(t) for name, t in layout.params.items()}
    reduction.add_into(target, poisoned, -0.5)
    equal(target, {name: 1 - 0.5 * t for name, t in cut.items()})
    reduction.add_into(target, None, 0.25)
    equal(target, {name: 1 - 0.5 * cut[name] + 0.25 * whole[name] for name in cut})
    assert dict(reduction.gradient_mask()) == bits


@settings(max_examples=150)
@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 40))
def test_windows_wrap_around(size, share, start):
    group = UnitGroup("g", size, ())
    units = windows((group,), share, {"g": start}).kept["g"].tolist()
    assert units == sorted({(start + i) % size for i in range(num_units_kept(size, share))})
    assert windows((group,), share).kept["g"].tolist() == list(range(num_units_kept(size, share)))


def test_windows_start_per_group():
    groups = (UnitGroup("a", 4, ()), UnitGroup("b", 6, ()))
    slices = windows(groups, 0.5, {"a": 3}).kept
    assert {name: units.tolist() for name, units in slices.items()} == {"a": [0, 3], "b": [0, 1, 2]}


def test_draws_are_sorted_and_depend_on_their_key():
    groups = (UnitGroup("a", 40, ()), UnitGroup("b", 40, ()))
    first, again, other = (drawn(groups, 0.25, key) for key in (7, 7, 8))
    for name in ("a", "b"):
        assert first.kept[name].tolist() == sorted(set(first.kept[name].tolist()))
        assert len(first.kept[name]) == 10
        assert torch.equal(first.kept[name], again.kept[name])
        assert not torch.equal(first.kept[name], other.kept[name])
    assert not torch.equal(first.kept["a"], first.kept["b"])  # groups are drawn apart
    assert first.draw == (0.25, 7)


def test_draws_are_uniform():
    group = (UnitGroup("g", 10, ()),)
    times = torch.zeros(10)
    for key in range(1000):
        times[drawn(group, 0.3, key).kept["g"]] += 1
    assert bool(((times > 235) & (times < 365)).all())  # 300 expected, standard deviation below 15


@pytest.mark.parametrize("key", [-1, 2**64])
def test_key_that_cannot_travel_is_refused(key):
    with pytest.raises(InvalidValue, match=f"^key must be in .*; got {key}$"):
        drawn((UnitGroup("g", 4, ()),), 0.5, key)


@SETTINGS
@given(layouts(), st.floats(0, 1))
def test_parameters_at_width_equal_the_extracted_ones(layout, share):
    part = windows(layout.groups, share).extract(layout.params)
    assert parameters_at_width(layout.groups, layout.params, share) == sum(
        t.numel() for t in part.values()
    )


@SETTINGS
@given(layouts(), st.floats(0.0, 1.0))
def test_width_for_budget_is_the_largest_that_fits(layout, budget):
    full = sum(t.numel() for t in layout.params.values())

    def fits(share):
        return parameters_at_width(layout.groups, layout.params, share) <= budget * full + 1e-6

    shares = {units / group.size for group in layout.groups for units in range(1, group.size + 1)}
    fitting = [share for share in sorted(shares) if fits(share)]
    if not fitting:
        with pytest.raises(
            InvalidValue, match=r"^capacity must be at least [01]\.\d{4} for this model"
        ):
            width_for_budget(layout.groups, layout.params, budget)
        return
    assert width_for_budget(layout.groups, layout.params, budget) == fitting[-1]


@pytest.mark.parametrize("name", ["mlp", "cnn", "wide_resnet", "preact_resnet18"])
def test_width_for_budget_on_real_models(name):
    model = MODELS[name]((3, 32, 32), 10, "batch")
    params = {n: p.detach() for n, p in model.module.named_parameters()}
    full = sum(p.numel() for p in params.values())
    for budget in (0.1, 0.25, 0.37, 0.5, 0.75, 1.0):
        share = width_for_budget(model.groups, params, budget)
        assert parameters_at_width(model.groups, params, share) <= budget * full
        larger = [
            u / g.size for g in model.groups for u in range(1, g.size + 1) if u / g.size > share
        ]
        assert not larger or parameters_at_width(model.groups, params, min(larger)) > budget * full
    assert share == 1.0


def test_width_for_budget_without_groups_is_one():
    params = {"w": torch.zeros(3)}
    assert width_for_budget((), params, 1.0) == 1.0
    with pytest.raises(InvalidValue, match=r"at least 1.0000"):
        width_for_budget((), params, 0.9)
