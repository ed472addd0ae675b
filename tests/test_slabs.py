"""What is done to a slab in one go equals what is done tensor by tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.aggregation import OVER, Sums, mean_of
from fedcover.reduction import Masks, Slices, Within
from fedcover.slabs import Slab, joined, shapes_of
from fedcover.types import Cut, UnitGroup
from tests.cutting import kept_units, layouts


def slab_of(params):
    return Slab(joined(params.values()), shapes_of(params))


def agree(slab, plain):
    assert slab.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(slab[name], plain[name], rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.data(), st.sampled_from(["slices", "whole", "masks", "within"]), st.sampled_from([1.0, 0.5, -3.0]))
def test_adding_into_a_slab(layout, data, kind, scale):
    slices = Slices(layout.groups, {n: torch.tensor(u) for n, u in data.draw(kept_units(layout.groups)).items()})
    bits = {name: torch.rand_like(t) > 0.5 for name, t in list(layout.params.items())[:1]}
    some = {name: torch.rand_like(t) > 0.5 for name, t in list(slices.extract(layout.params).items())[:1]}
    reduction = {"slices": slices, "whole": Masks({}), "masks": Masks(bits), "within": Within(slices, some)}[kind]
    values = {name: torch.randn_like(t) for name, t in reduction.extract(layout.params).items()}
    plain, slab = {name: t.clone() for name, t in layout.params.items()}, slab_of(layout.params)
    for names in (list(values), list(values)[:1], None):  # all of them, a few, only counting
        for target in (plain, slab):
            reduction.add_into(target, None if names is None else {n: values[n] for n in names}, scale)
        agree(slab, plain)
    assert torch.equal(slab.flat, joined(slab.values()))


def test_counting_in_a_slab_of_bytes_and_what_is_absent():
    layout = {"w": torch.zeros(4, 2), "head": torch.zeros(3)}
    groups = (UnitGroup("g", 4, (Cut("w", 0), Cut("head", None, unit=3))),)
    part = Slices(groups, {"g": torch.tensor([0, 2])})
    counts = slab_of({name: t.to(torch.uint8) for name, t in layout.items()})
    part.add_into(counts, None, 3)
    part.add_into(counts, None, 2)
    assert counts["w"].tolist() == [[5, 5], [0, 0], [5, 5], [0, 0]]
    assert counts["head"].tolist() == [0, 0, 0]
    for values in (None, {}):  # nothing but what is absent
        alone = slab_of({"head": layout["head"]})
        part.add_into(alone, values, 1.0)
        assert alone["head"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("over", OVER)
def test_the_mean_of_slabs(over):
    draw = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(3, 4, generator=draw), "b": torch.randn(5, generator=draw)}
    total = {name: torch.randn(t.shape, generator=draw).double() for name, t in old.items()}
    weight = {name: torch.randint(0, 3, t.shape, generator=draw).double() for name, t in old.items()}
    everybody = torch.tensor(4.0, dtype=torch.float64)
    plain = mean_of(old, Sums(total, weight, everybody), over)
    slab = mean_of(old, Sums(slab_of(total), slab_of(weight), everybody), over)
    assert isinstance(slab, Slab)
    agree(slab, plain)
