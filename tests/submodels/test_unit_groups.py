"""Groups of units: how many a share keeps, where they lie, and what is refused."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.models import MODELS, params_and_buffers
from fedcover.submodels.unit_groups import (
    check_groups,
    cuts_by_tensor,
    num_units_kept,
    unit_positions,
)
from fedcover.types import Cut, UnitGroup
from tests.helpers.cutting import layouts

TENSORS = {"w": torch.zeros(6, 4), "b": torch.zeros(6)}


@settings(max_examples=300)
@given(st.integers(1, 5000), st.floats(0, 1))
def test_units_kept_never_exceed_the_share(size, share):
    count = num_units_kept(size, share)
    assert 1 <= count <= size
    assert count == 1 or count <= Fraction(share) * size + Fraction(1, 10**8)
    assert count + 1 > Fraction(share) * size


@settings(max_examples=200)
@given(st.integers(1, 2000), st.data())
def test_share_of_whole_units_keeps_exactly_them(size, data):
    units = data.draw(st.integers(1, size))
    assert num_units_kept(size, units / size) == units


@pytest.mark.parametrize("share", [-0.1, 1.01, 2, float("nan"), float("inf"), -float("inf")])
def test_share_outside_zero_to_one_is_refused(share):
    with pytest.raises(InvalidValue, match=r"^share must be in 0..1; got"):
        num_units_kept(10, share)


@settings(max_examples=100)
@given(st.integers(0, 5), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=6))
def test_unit_positions_equal_their_definition(start, per_unit, units):
    positions = unit_positions(
        Cut("w", 0, start, per_unit), torch.tensor(units, dtype=torch.int64)
    ).tolist()
    assert positions == [start + u * per_unit + i for u in units for i in range(per_unit)]


def test_cuts_are_gathered_by_tensor():
    a = UnitGroup("a", 2, (Cut("w", 0), Cut("b", 0)))
    b = UnitGroup("b", 2, (Cut("w", 1),))
    assert cuts_by_tensor([a, b]) == {"w": [(a, a.cuts[0]), (b, b.cuts[0])], "b": [(a, a.cuts[1])]}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [UnitGroup("g", 6, (Cut("v", 0),))],
            "^group 'g', cut of 'v': the model has no such tensor$",
        ),
        (
            [UnitGroup("g", 4, (Cut("w", 2),))],
            r"^group 'g', cut of 'w': axis must be in 0..1; got 2$",
        ),
        ([UnitGroup("g", 4, (Cut("w", -1),))], r"axis must be in 0..1; got -1$"),
        ([UnitGroup("g", 7, (Cut("w", 0),))], "units end at 7 but axis 0 has length 6$"),
        ([UnitGroup("g", 6, (Cut("w", 0, start=1),))], "units end at 7 but axis 0 has length 6$"),
        (
            [UnitGroup("g", 3, (Cut("w", 1, per_unit=2),))],
            "units end at 6 but axis 1 has length 4$",
        ),
        ([UnitGroup("g", 2, (Cut("w", 0, start=-1),))], "^group 'g', cut of 'w'"),
        ([UnitGroup("g", 2, (Cut("w", 0, per_unit=0),))], "^group 'g', cut of 'w'"),
        ([UnitGroup("g", 0, ())], "^group 'g': size must be at least 1; got 0$"),
        ([UnitGroup("g", -2, (Cut("w", 0),))], "^group 'g': size must be at least 1; got -2$"),
        ([UnitGroup("g", 4, (Cut("w", 0), Cut("w", 0, start=3, per_unit=1)))], "units end at 7"),
        (
            [UnitGroup("g", 3, (Cut("w", 0), Cut("w", 0, start=2)))],
            "part of axis 0 belongs to another group already$",
        ),
        (
            [UnitGroup("g", 3, (Cut("w", 0),)), UnitGroup("h", 4, (Cut("w", 0, 2),))],
            "^group 'h'.*part of axis 0",
        ),
        (
            [UnitGroup("g", 3, ()), UnitGroup("g", 2, ())],
            "^group 'g': another group has the same name$",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(InvalidValue, match=message):
        check_groups(groups, TENSORS)


def test_adjacent_and_crossing_cuts_are_accepted():
    left, right = (
        UnitGroup("l", 3, (Cut("w", 0), Cut("b", 0))),
        UnitGroup("r", 3, (Cut("w", 0, 3), Cut("b", 0, 3))),
    )
    across = UnitGroup("a", 2, (Cut("w", 1, per_unit=2),))
    check_groups([left, right, across], TENSORS)


@settings(max_examples=60)
@given(layouts())
def test_random_layouts_are_accepted(layout):
    check_groups(layout.groups, layout.params)


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, norm) for name in ("wide_resnet", "preact_resnet18") for norm in ("batch", "group")]
    + [("mlp", "batch"), ("cnn", "batch")],
)
def test_groups_of_table_models_fit(name, norm):
    model = MODELS[name]((3, 8, 8), 10, norm)
    check_groups(model.groups, params_and_buffers(model.module))
    assert set(model.prunable) <= {n for n, _ in model.module.named_parameters()}
