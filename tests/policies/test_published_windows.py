"""Policies against the publications' definitions: windows written out by hand, never by the code
under test.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedcover.errors import InvalidValue
from fedcover.policies import POLICIES
from fedcover.policies.base import check_reductions
from fedcover.submodels.reductions import Slices
from fedcover.types import Client, Coverage, Cut, Params, UnitGroup, View

HIDDEN = UnitGroup("hidden", 5, (Cut("first.weight", 0), Cut("second.weight", 1)))
NEXT = UnitGroup("next", 4, (Cut("second.weight", 0),))
PARAMS = {"first.weight": torch.zeros(5, 3), "second.weight": torch.zeros(4, 5)}


def view_at(round_number: int, *capacities: float, seed: int = 0, params: Params = PARAMS) -> View:
    """A view of one round: two groups of five and four units, one client for each capacity."""
    clients = tuple(
        Client(i, capacity, slot=i, samples=10, labels=(0,))
        for i, capacity in enumerate(capacities)
    )
    return View(
        round=round_number,
        params=params,
        groups=(HIDDEN, NEXT),
        prunable=("first.weight", "second.weight"),
        cohort=clients,
        levels=capacities,
        measure="width",
        coverage=Coverage(window=(), ever={}),
        seed=seed,
    )


def windows_of(
    policy: str, view: View, **options: object
) -> list[tuple[list[int], list[int]] | None]:
    """The units of both groups that a policy gives to each client."""
    parts = POLICIES[policy](view, **options)
    return [part and (part.kept["hidden"].tolist(), part.kept["next"].tolist()) for part in parts]


def test_prefix_keeps_the_first_units_in_every_round():
    """HeteroFL: units 0 .. beta U - 1; 0.5 of five units are two."""
    for round_number in (0, 1, 7):
        assert windows_of("prefix", view_at(round_number, 1.0, 0.5, 0.25)) == [
            ([0, 1, 2, 3, 4], [0, 1, 2, 3]),
            ([0, 1], [0, 1]),
            ([0], [0]),
        ]


@pytest.mark.parametrize(
    ("round_number", "hidden", "following"),
    [
        (0, [0, 1], [0, 1]),
        (1, [1, 2], [1, 2]),
        (2, [2, 3], [2, 3]),
        (3, [3, 4], [0, 3]),
        (4, [0, 4], [0, 1]),
        (5, [0, 1], [1, 2]),
        (20, [0, 1], [0, 1]),
    ],
)
def test_rolling_begins_at_unit_0_and_moves_by_one_unit_a_round(round_number, hidden, following):
    """FedRolex: units (q + j) mod U, in every group modulo its own size, the same for all of one
    capacity.
    """
    view = view_at(round_number, 0.5, 0.5)
    assert windows_of("rolling", view) == [(hidden, following), (hidden, following)]


def test_rolling_windows_of_all_capacities_begin_at_the_same_unit():
    assert windows_of("rolling", view_at(3, 0.25, 0.5, 1.0)) == [
        ([3], [3]),
        ([3, 4], [0, 3]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3]),
    ]


def test_spread_windows_begin_at_evenly_spaced_units():
    """Client k of n begins k U / n units after the first, rounded down."""
    assert windows_of("rolling", view_at(1, 0.25, 0.25, 0.25, 0.25), spread=True) == [
        ([1], [1]),
        ([2], [2]),
        ([3], [3]),
        ([4], [0]),
    ]


def test_random_draws_anew_for_every_round_client_and_seed():
    """Federated Dropout: with five units taken two at a time, draws that forget their address would
    agree.
    """
    rounds = [windows_of("random", view_at(q, 0.5))[0] for q in range(30)]
    clients = windows_of("random", view_at(0, *[0.5] * 30))
    seeds = [windows_of("random", view_at(0, 0.5, seed=seed))[0] for seed in range(30)]
    for draws in (rounds, clients, seeds):
        assert len({str(draw) for draw in draws}) > 10  # of 10 x 6 pairs of sets
        assert all(len(hidden) == 2 and len(following) == 2 for hidden, following in draws)


def test_random_takes_every_set_of_units_equally_often():
    """Each of the ten pairs of five units is a tenth of 2,000 draws: 200, with a standard deviation
    of 13.
    """
    draws = Counter(tuple(windows_of("random", view_at(q, 0.5))[0][0]) for q in range(2000))
    assert len(draws) == 10
    assert all(120 < times < 280 for times in draws.values())


def test_random_draws_the_groups_independently_of_each_other():
    """Were both groups cut by one draw, a pair of the first would always meet the same pair of the
    second.
    """
    draws = [windows_of("random", view_at(q, 0.5))[0] for q in range(300)]
    partners = {tuple(following) for hidden, following in draws if hidden == [0, 1]}
    assert len(partners) == 6


def test_windows_of_full_homogeneous_and_exclude():
    view = view_at(2, 1.0, 0.5, 0.25)
    whole, half, quarter = ([0, 1, 2, 3, 4], [0, 1, 2, 3]), ([0, 1], [0, 1]), ([0], [0])
    assert windows_of("full", view) == [whole, whole, whole]
    assert windows_of("homogeneous", view) == [quarter, quarter, quarter]
    assert windows_of("homogeneous", view, share=0.5) == [half, half, half]
    assert windows_of("exclude", view) == [whole, None, None]
    assert windows_of("exclude", view, below=0.5) == [half, half, None]


WEIGHTS = {
    "first.weight": torch.tensor([[-8.0, 1.0, 2.0], [3.0, -4.0, 5.0]]),
    "second.weight": torch.tensor([[6.0, -7.0], [0.5, -0.25]]),
}


def masks_of(policy: str, capacity: float, **options: object) -> dict[str, list[list[bool]]]:
    """The mask that a policy gives to one client of some capacity."""
    (mask,) = POLICIES[policy](view_at(0, capacity, params=WEIGHTS), **options)
    return {name: bits.int().tolist() for name, bits in mask.bits.items()}


def test_magnitude_keeps_the_largest_absolute_values():
    """Half of each layer: 8, 5, 4 of the first, 7 and 6 of the second; or the five largest of all
    ten.
    """
    half = {"first.weight": [[1, 0, 0], [0, 1, 1]], "second.weight": [[1, 1], [0, 0]]}
    assert masks_of("magnitude", 0.5) == half
    assert masks_of("magnitude", 0.5, scope="model") == half
    assert masks_of("magnitude", 0.3, scope="model") == {
        "first.weight": [[1, 0, 0], [0, 0, 0]],
        "second.weight": [[1, 1], [0, 0]],
    }
    assert masks_of("magnitude", 0.3) == {
        "first.weight": [[1, 0, 0], [0, 0, 0]],
        "second.weight": [[0, 1], [0, 0]],
    }


@pytest.mark.parametrize(
    ("digits", "p5", "kept"),
    [
        ("1", "code", [8, 7, 6, 5, 4, 3, 2, 1]),
        ("2", "code", [8, 7, 4, 3, 2, 1]),
        ("3", "code", [8, 7, 6, 5, 2, 1]),
        ("4", "code", [8, 7, 6, 5, 4, 3]),
        ("5", "code", [8, 7, 2, 1]),
        ("5", "printed", [6, 5, 4, 3]),
        ("6", "code", [8, 7, 4, 3]),
        ("7", "code", [8, 7, 6, 5]),
    ],
)
def test_regions_are_quarters_by_magnitude_largest_first(digits, p5, kept):
    """The paper's P1 to P7 over S1 to S4; P5 keeps S1 and S4 in its code, S2 and S3 in print."""
    weights = {"first.weight": torch.tensor([1.0, -8.0, 3.0, -6.0, 5.0, -4.0, 7.0, 2.0])}
    view = replace(view_at(0, 1.0, params=weights), prunable=("first.weight",), groups=())
    (mask,) = POLICIES["regions"](view, codename=digits, p5=p5)
    assert sorted(weights["first.weight"][mask.bits["first.weight"]].abs().tolist()) == sorted(kept)


def test_regions_of_units_are_quarters_in_order():
    four = UnitGroup("next", 4, (Cut("second.weight", 0),))
    view = replace(view_at(0, 1.0, 0.5), groups=(four,))
    parts = POLICIES["regions"](view, codename="26", kind="subnet")
    assert [part.kept["next"].tolist() for part in parts] == [[0, 2, 3], [0, 2]]


def test_regions_need_a_cohort_of_as_many_clients_as_digits():
    with pytest.raises(
        InvalidValue, match="codename 123 needs a cohort of 3 clients; this one has 2"
    ):
        POLICIES["regions"](view_at(0, 1.0, 1.0), codename="123")


# ── what a policy must not give ───────────────────────────────────────────────────────────────────


def kept_units(view: View, hidden: object, following: object = (0,)) -> Slices:
    """Slices of these units of both groups."""
    units = {"hidden": hidden, "next": following}
    return Slices(view.groups, {name: torch.as_tensor(indices) for name, indices in units.items()})


@pytest.mark.parametrize(
    "units",
    [
        [0, 0],
        [1, 0],
        [0, 5],
        [-1, 0],
        [0.0, 1.0],
        [[0, 1]],
        torch.zeros(0, dtype=torch.int64),
        torch.tensor(0),
    ],
    ids=str,
)
def test_units_must_be_numbers_in_order_each_once(units):
    view = view_at(0, 1.0)
    with pytest.raises(InvalidValue, match=r"invalid units in group 'hidden': .* values in 0\.\.4"):
        check_reductions(view, [kept_units(view, units)])
    check_reductions(view, [kept_units(view, [0, 1, 4])])


def test_parts_after_a_client_without_part_are_checked():
    view = view_at(0, 1.0, 0.5)
    with pytest.raises(
        InvalidValue, match=r"policy gives client 1 more than its capacity of 0\.5 holds"
    ):
        check_reductions(view, [None, kept_units(view, [0, 1, 2])])


def test_nested_units_must_be_the_first():
    nested = replace(HIDDEN, nested=True)
    view = replace(view_at(0, 1.0), groups=(nested, NEXT))
    check_reductions(view, [kept_units(view, [0, 1, 2])])
    with pytest.raises(InvalidValue, match="units of 'hidden' that are not its first ones"):
        check_reductions(view, [kept_units(view, [0, 1, 3])])


def test_quarters_of_a_small_group_are_at_least_one_unit():
    """Of three units the first quarter has none: what would be an empty layer keeps its
    first unit.
    """
    three = UnitGroup("next", 3, (Cut("second.weight", 0),))
    quarters = [torch.arange((r - 1) * 3 // 4, r * 3 // 4).tolist() for r in (1, 2, 3, 4)]
    assert quarters == [[], [0], [1], [2]]
    one = UnitGroup("next", 1, (Cut("second.weight", 0),))
    (part,) = POLICIES["regions"](
        replace(view_at(0, 1.0), groups=(one,)), codename="7", kind="subnet"
    )
    assert part.kept["next"].tolist() == [0]
    (part,) = POLICIES["regions"](
        replace(view_at(0, 1.0), groups=(three,)), codename="5", kind="subnet"
    )
    assert part.kept["next"].tolist() == [2]
    stages = replace(three, nested=True)
    (part,) = POLICIES["regions"](
        replace(view_at(0, 1.0), groups=(stages,)), codename="6", kind="subnet"
    )
    assert part.kept["next"].tolist() == [0]


def test_share_of_parameters_counts_unprunable_tensors_first():
    """Ten prunable weights and five others: 40 % of 15 are 6, one of them for a weight; less than
    that is refused.
    """
    params = {**WEIGHTS, "bias": torch.ones(5)}
    view = replace(view_at(0, 0.4, params=params), groups=(), measure="parameters")
    (mask,) = POLICIES["magnitude"](view, scope="model")
    assert sum(int(bits.sum()) for bits in mask.bits.values()) == 1
    with pytest.raises(
        InvalidValue, match=r"capacity must be at least 0\.4000 to prune this model .* got 0\.39"
    ):
        POLICIES["magnitude"](
            replace(view_at(0, 0.39, params=params), groups=(), measure="parameters")
        )


def test_magnitude_refuses_an_unknown_scope():
    with pytest.raises(
        InvalidValue, match=r"^policy magnitude: scope must be one of layer, model; got 'stage'$"
    ):
        masks_of("magnitude", 0.5, scope="stage")


def test_magnitude_refuses_a_model_without_prunable_weights():
    message = (
        r"names none: fc.Model\(module, groups, prunable=\('hidden.weight', "
        r"...\)\), or a model given as a bare"
    )
    with pytest.raises(InvalidValue, match=message):
        POLICIES["magnitude"](replace(view_at(0, 0.5), prunable=()))
