"""The planned policy: coverage after drop-outs, windows that cover, and never more noise than a
design by hand.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch

from fedcover.analysis.plan_report import fleet_view
from fedcover.analysis.policy_coverage import rounds_to_cover
from fedcover.errors import InvalidValue
from fedcover.policies import POLICIES
from fedcover.policies.base import fits
from fedcover.policies.paper_regions import codename_capacities, region_coverage
from fedcover.policies.planned import plan_problem, planned
from fedcover.policies.planner.multi_group import (
    conflict_colouring,
    is_exact,
    phase_shifts,
    unit_energies,
)
from fedcover.policies.planner.plan_metrics import count_and_energy, energy_on_cut_axes
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import initial_state, run_round
from fedcover.submodels import coverage
from fedcover.submodels.reductions import Slices
from fedcover.types import Cut, UnitGroup
from tests.helpers.worlds import world

CODENAMES = [
    "1111111111",
    "1111114444",
    "1111144447",
    "1111223344",
    "1111234444",
    "1111113477",
    "1111234567",
    "1111444444",
    "1111444477",
    "1111556677",
    "1114556677",
    "1234556677",
    "1455666777",
    "2233445677",
    "1444777777",
]


def view_of_fleet(fleet, model="mlp(hidden=[8])", **fields):
    """Every device of a fleet, with weights that differ in size."""
    view = fleet_view(Experiment(dataset="digits", model=model, fleet=fleet, **fields))
    random = torch.Generator().manual_seed(3)
    return replace(
        view,
        params={
            n: torch.randn(t.shape, generator=random, dtype=torch.float64)
            for n, t in view.params.items()
        },
    )


def fleet_of(shares):
    return " + ".join(f"1x{share:g}" for share in shares)


def noise(view, parts):
    return sum(coverage.delta2(view.params, parts))


def gamma(view, parts):
    return coverage.minimum(coverage.count(view.params, parts))


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize("codename", CODENAMES)
def test_planned_is_never_noisier_than_a_codename_of_equal_coverage(codename, kind):
    view = view_of_fleet(fleet_of(codename_capacities(codename)))
    least = min(region_coverage(codename).values())
    by_hand = POLICIES["regions"](view, codename=codename, kind=kind)
    own_plan = planned(view, kind=kind, gamma=least)
    assert gamma(view, own_plan) >= gamma(view, by_hand) == least
    assert noise(view, own_plan) <= noise(view, by_hand) + 1e-12


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize(
    ("fleet", "largest"),
    [("6x1 + 4x0.75", 9), ("4x1 + 6x0.75", 8), ("1x1 + 3x0.75 + 6x0.5", 6)],
)
def test_planned_reaches_the_largest_coverage_of_the_papers_fleets(fleet, largest, kind):
    view = view_of_fleet(fleet)
    assert gamma(view, planned(view, kind=kind, gamma=largest)) == largest
    with pytest.raises(
        InvalidValue, match=f"gamma must be at most {largest} .*; got {largest + 1}"
    ):
        planned(view, kind=kind, gamma=largest + 1)


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize(
    "fleet", ["2x1 + 3x0.5", "5x0.5", "1x0.75 + 2x0.5 + 3x0.25", "6x0.4", "3x1"]
)
def test_planned_tolerates_any_drop_outs(fleet, kind):
    view = view_of_fleet(fleet)
    groups, _, _ = plan_problem(view, kind)
    largest = min(group.gamma_max for group in groups.values())
    for tolerate in range(1, len(view.cohort)):
        if tolerate >= largest:
            with pytest.raises(InvalidValue, match=f"largest feasible is {largest}"):
                planned(view, kind=kind, tolerate=tolerate)
            continue
        parts = planned(replace(view, round=tolerate), kind=kind, tolerate=tolerate)
        for dropouts in combinations(range(len(parts)), tolerate):
            assert gamma(view, [part for n, part in enumerate(parts) if n not in dropouts]) >= 1


def test_planned_tolerates_sampled_drop_outs_of_a_large_fleet():
    view = view_of_fleet("20x1 + 40x0.5 + 40x0.25", model="mlp(hidden=[40])")
    parts = planned(view, tolerate=30)
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        stay = torch.randperm(len(parts), generator=random)[30:].tolist()
        assert gamma(view, [parts[n] for n in stay]) >= 1


@pytest.mark.parametrize(
    ("model", "fleet", "tolerate"),
    [
        ("mlp(hidden=[8, 6])", "4x0.5", 0),
        ("mlp(hidden=[8, 6])", "4x0.5", 1),
        ("mlp(hidden=[8, 6])", "2x0.75 + 4x0.5", 2),
        ("mlp(hidden=[8, 8, 8])", "2x0.5 + 1x0.25", 0),
        ("mlp(hidden=[8, 8, 8])", "1x0.5 + 1x0.25", 0),
        ("cnn(channels=[4, 6], hidden=8)", "6x0.5", 2),
        ("wide_resnet(depth=10, widen=1)", "5x0.5", 1),
    ],
)
def test_planned_window_tolerates_any_drop_outs_where_groups_meet(model, fleet, tolerate):
    view = view_of_fleet(fleet, model=model)
    choice = partial(planned, tolerate=tolerate)
    window = rounds_to_cover(choice, view, 60, tolerate + 1)
    assert window is not None
    rounds = [choice(replace(view, round=round)) for round in range(window)]
    for dropouts in combinations(range(len(view.cohort)), tolerate):
        left = [part for parts in rounds for n, part in enumerate(parts) if n not in dropouts]
        assert gamma(view, left) >= 1
    for parts in (
        rounds
    ):  # biases and norms lie on one axis: they are covered in every round, unless few can hold all
        counts = coverage.count(view.params, parts)
        flat = [int(count.min()) for name, count in counts.items() if count.ndim == 1]
        assert min(flat) >= tolerate + 1 or fleet == "1x0.5 + 1x0.25"


def test_planned_windows_cover_sooner_than_rolling_ones():
    view = view_of_fleet("4x0.5 + 6x0.25", model="mlp(hidden=[64, 64])")
    assert rounds_to_cover(planned, view, 10, 1) is not None
    assert rounds_to_cover(partial(POLICIES["rolling"], spread=True), view, 30, 1) is None


@pytest.mark.parametrize(("cycle", "palette"), [(1, 2), (4, 2), (4, 3), (6, 3), (5, 4), (6, 4)])
def test_phase_shifts_give_colours_all_relative_positions(cycle, palette):
    made = phase_shifts(cycle, palette)
    assert len(made) < 2 * cycle + 2
    for a, b in combinations(range(palette), 2):
        assert {(shifts[b] - shifts[a]) % cycle for shifts in made} == set(range(cycle))


def test_groups_that_meet_differ_in_colour():
    setup, _ = world("wide_resnet")
    groups = setup.task.model.groups
    result = conflict_colouring(groups)
    assert len(set(result.values())) == 3
    meeting = {}
    for group in groups:
        for cut in group.cuts:
            meeting.setdefault(cut.tensor, []).append(group.name)
    assert all(
        result[names[0]] != result[names[1]] for names in meeting.values() if len(names) == 2
    )


@pytest.mark.parametrize(
    ("model", "exact"), [("mlp(hidden=[8])", True), ("mlp(hidden=[8, 6])", False), ("cnn", False)]
)
def test_plan_of_one_hidden_layer_is_exact(model, exact):
    assert is_exact(view_of_fleet("1x1", model=model).groups) == exact


def test_unit_energy_is_the_energy_cut_with_it():
    view = view_of_fleet("1x1")
    (group,) = view.groups
    expected = [
        coverage.energy(view.params)
        - coverage.energy(Slices(view.groups, {group.name: others}).extract(view.params))
        for u in range(group.size)
        for others in [torch.tensor([v for v in range(group.size) if v != u])]
    ]
    torch.testing.assert_close(
        unit_energies(view.groups, view.params)[group.name], torch.tensor(expected).double()
    )


@pytest.mark.parametrize("model", ["mlp", "cnn", "wide_resnet", "preact_resnet18", "depth_resnet"])
@pytest.mark.parametrize("policy", ["planned", "random"])
def test_count_and_energy_equals_counting_part_by_part(model, policy):
    setup, state = world(model)
    view = view_of(setup, state, cohort_of(setup, 0))
    parts = POLICIES[policy](view)
    counts, energy = count_and_energy(
        view.groups, energy_on_cut_axes(view.groups, view.params), parts
    )
    for name, count in coverage.count(view.params, parts).items():
        assert torch.equal(counts[name].expand(count.shape), count.int()), name
    expected = [coverage.energy(part.extract(view.params)) for part in parts]
    assert energy.tolist() == pytest.approx(expected)


def test_planned_keeps_nested_units_from_the_first():
    setup, state = world("depth_resnet")
    view = view_of(setup, state, cohort_of(setup, 0))
    stacked = [group for group in view.groups if group.nested]
    assert stacked
    for client, part in zip(view.cohort, planned(view), strict=True):
        assert fits(view, client.capacity, part)
        for group in stacked:
            assert part.kept[group.name].tolist() == list(range(len(part.kept[group.name])))
    with pytest.raises(InvalidValue, match="which is nested"):
        planned(view, tolerate=3)


def test_planned_does_not_depend_on_cohort_order():
    view = view_of_fleet("2x0.75 + 3x0.5", model="mlp(hidden=[8, 6])")
    turned = tuple(replace(client, slot=4 - client.slot) for client in reversed(view.cohort))
    straight, back = planned(view), planned(replace(view, cohort=turned))
    for one, other in zip(straight, reversed(back), strict=True):
        assert all(torch.equal(one.kept[g.name], other.kept[g.name]) for g in view.groups)


def test_planned_covers_a_large_group_over_several_rounds():
    view = view_of_fleet("2x0.25", model="mlp(hidden=[16])")
    window = [planned(replace(view, round=round)) for round in range(4)]
    assert gamma(view, [part for parts in window for part in parts]) >= 1


def test_planned_rotates_shared_units():
    view = view_of_fleet("6x0.5")
    windows_seen = {
        tuple(planned(replace(view, round=round), gamma=3)[0].kept["hidden1"].tolist())
        for round in range(5)
    }
    assert len(windows_seen) > 2


@pytest.mark.parametrize("tolerate", [0, 1])
def test_planned_run_plans_every_round_for_its_cohort(tolerate):
    experiment = Experiment(
        dataset="digits",
        model="mlp(hidden=[12])",
        fleet="1x1.0 + 1x0.5",
        policy=f"planned(tolerate={tolerate})",
        clients=20,
        active=8,
        rounds=3,
        epochs=1,
    )
    setup = prepare(experiment, Machine(device="cpu").resolved())
    state = initial_state(setup)
    for _ in range(3):
        state, report = run_round(setup, state)
        assert report.metrics["gamma_round"] >= tolerate + 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"kind": "weights"}, "policy planned: kind must be one of subnet, pruning; got 'weights'"),
        ({"share": 0}, r"share must be in \(0, 1\]; got 0"),
        ({"drift": -1.0}, "drift must be a number from 0 on; got -1.0"),
        (
            {"tolerate": 5},
            (
                r"policy planned, round 0: tolerate must be at most 2: 5 "
                r"drop-outs need coverage 6.*'hidden1'"
            ),
        ),
    ],
)
def test_planned_refuses_impossible_options(wrong, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        planned(view_of_fleet("2x1 + 2x0.5"), **wrong)


def test_planned_pruning_needs_prunable_weights():
    view = replace(view_of_fleet("2x1"), prunable=())
    with pytest.raises(InvalidValue, match="names none"):
        planned(view, kind="pruning")


def test_unit_energy_includes_tensors_that_belong_to_a_unit():
    groups = (UnitGroup("stages", 2, (Cut("a", None, unit=0), Cut("b", None, unit=1))),)
    result = unit_energies(groups, {"a": torch.tensor([3.0]), "b": torch.tensor([1.0, 2.0])})
    assert result["stages"].tolist() == [9.0, 5.0]
