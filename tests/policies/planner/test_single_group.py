"""The exact planner: equal to brute force, on the frontier, and the same in every form."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.policies.planner import single_group
from fedcover.policies.planner.allocation import RunLengthPlan
from fedcover.policies.planner.single_group import (
    BudgetedGroup,
    PlanObjective,
    best_gamma,
    frontier,
    plan,
)

BASE = 6
"""Column sums of up to five clients are digits below six, so that a vector of them is one number.
"""


def with_client(sums, units, budget):
    """All column sums after one more client, each written as one number."""
    places = [sum(BASE**unit for unit in chosen) for chosen in combinations(range(units), budget)]
    return np.unique(sums[:, None] + np.array(places))


def fleets(units, clients, budgets=(), sums=np.zeros(1, dtype=np.int64)):  # noqa: B008
    """Every fleet (budgets, largest first) of up to so many clients, and all the column sums that
    it can reach.
    """
    for budget in range(min((units, *budgets)) + 1) if clients else ():
        more = with_client(sums, units, budget)
        yield (*budgets, budget), more
        yield from fleets(units, clients - 1, (*budgets, budget), more)


def brute_force(energies, clients, sums):
    """The least noise for Gamma = 0, 1, ... over all arrangements."""
    columns = sums[:, None] // BASE ** np.arange(len(energies)) % BASE
    noise = (clients - columns) @ np.asarray(energies, dtype=float) / (sum(energies) or 1)
    least = columns.min(1)
    return [noise[least >= gamma].min() for gamma in range(least.max() + 1)]


def check(energies, budgets, sums):
    expected = brute_force(energies, len(budgets), sums)
    points = frontier(energies, budgets)
    np.testing.assert_allclose(points, expected, atol=1e-12)
    for gamma in range(len(expected)):
        plan_at_gamma = plan(energies, budgets, gamma=gamma)
        assert plan_at_gamma.sum(1).tolist() == list(budgets)
        assert plan_at_gamma.sum(0).min() >= gamma
        noise = (~plan_at_gamma @ np.asarray(energies, dtype=float)).sum() / (sum(energies) or 1)
        assert noise == pytest.approx(expected[gamma], abs=1e-12)


@pytest.mark.parametrize("units", range(1, 7))
def test_plan_equals_brute_force_for_every_small_fleet(units):
    random = np.random.default_rng(units)
    num_points = 0
    for budgets, sums in fleets(units, 5):
        check(
            (random.choice([0.0, 1.0, random.random()], units) * random.integers(1, 3)).tolist(),
            budgets,
            sums,
        )
        num_points += 1
    assert num_points == comb(units + 6, 5) - 1, "all of them, up to the order of clients"


small = st.integers(1, 6).flatmap(
    lambda units: st.tuples(
        st.lists(
            st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 10)),
            min_size=units,
            max_size=units,
        ),
        st.lists(st.integers(0, units), min_size=1, max_size=5),
    )
)


@settings(max_examples=100)
@given(small)
def test_plan_equals_brute_force_for_random_energies(case):
    energies, budgets = case
    sums = np.zeros(1, dtype=np.int64)
    for budget in budgets:
        sums = with_client(sums, len(energies), budget)
    check(energies, budgets, sums)


large = st.integers(1, 60).flatmap(
    lambda units: st.tuples(
        st.lists(st.floats(0, 10), min_size=units, max_size=units),
        st.lists(st.integers(0, units), min_size=1, max_size=12),
    )
)


@settings(max_examples=100)
@given(large, st.floats(0, 1))
def test_frontier_points_have_plans(case, turn):
    energies, budgets = case
    group = BudgetedGroup.of(energies, budgets)
    points = frontier(energies, budgets)
    assert len(points) == sum(budgets) // len(energies) + 1
    assert (np.diff(points) >= -1e-12).all()
    assert (np.diff(points, 2) >= -1e-9).all(), "convex"
    for gamma, noise in enumerate(points):
        allocation = group.allocation(gamma)
        runs = allocation.assign_units(group.order, turn)
        matrix = runs.matrix()
        assert runs.gamma >= gamma
        assert torch.equal(matrix.sum(0), runs.column_sums())
        assert matrix.sum(1).tolist() == runs.row_sums().tolist() == budgets
        assert int(runs.lengths_R.sum()) == len(energies)
        assert sorted(runs.order_U.tolist()) == list(range(len(energies)))
        lost_energy = (~matrix).double() @ group.energies_U
        assert float(lost_energy.sum()) / (sum(energies) or 1) == pytest.approx(noise, abs=1e-9)
        sums = matrix.sum(0)
        own = [int(sums[row].min()) if row.any() else 0 for row in matrix]
        inverse = allocation.inverse_coverage()
        np.testing.assert_allclose(inverse, [1 / least if least else 0 for least in own])


def test_pruned_energy_is_the_mean_over_all_rotations():
    group = BudgetedGroup.of([5.0, 4, 3, 3, 2, 1, 1, 0.5], [3, 4, 6])
    allocation = group.allocation(1)
    turns = [
        allocation.assign_units(group.order, i / allocation.num_shared + 1e-9)
        for i in range(allocation.num_shared)
    ]
    lost_energy = torch.stack(
        [(~runs.matrix()).double() @ group.energies_U for runs in turns]
    ).mean(0)
    np.testing.assert_allclose(allocation.pruned_energy(group.tail_energy), lost_energy.numpy())


@pytest.mark.parametrize(
    ("fleet", "largest"),
    [([4] * 6 + [3] * 4, 9), ([4] * 4 + [3] * 6, 8), ([4] + [3] * 3 + [2] * 6, 6)],
)
def test_gamma_max_of_the_papers_fleets_exceeds_its_designs(fleet, largest):
    energies = torch.linspace(1, 2, 200).square()
    budgets = [50 * quarters for quarters in fleet]
    assert BudgetedGroup.of(energies, budgets).gamma_max == largest
    assert plan(energies, budgets, gamma=largest).sum(0).min() == largest


class TestTheObjective:
    """Without a wish the bound of Theorem 1' decides."""

    ENERGIES = torch.randn(400, generator=torch.Generator().manual_seed(0)).square()
    BUDGETS = (400,) * 4 + (300,) * 6

    @pytest.mark.parametrize(
        "bound", [PlanObjective(), PlanObjective(0, 0), PlanObjective(1, 1), PlanObjective(0.1, 10)]
    )
    def test_best_gamma_has_the_least_bound(self, bound):
        group = BudgetedGroup.of(self.ENERGIES, self.BUDGETS)
        values = []
        for gamma in range(1, group.gamma_max + 1):
            matrix = group.allocation(gamma).assign_units(group.order).matrix()
            lost_share = ((~matrix).double() @ group.energies_U / group.energies_U.sum()).numpy()
            own = np.array([int(matrix.sum(0)[row].min()) for row in matrix])
            values.append((bound.variance / own**2 + (bound.drift + lost_share) / own).sum())
        chosen = best_gamma([group], float(group.energies_U.sum()), bound)
        assert values[chosen - 1] == pytest.approx(min(values))

    def test_objective_of_gap_is_greedy_and_of_drift_is_full_coverage(self):
        greedy = plan(self.ENERGIES, self.BUDGETS, bound=PlanObjective(0, 0))
        assert greedy.sum(0).min() == 4
        assert plan(self.ENERGIES, self.BUDGETS, bound=PlanObjective(0, 1e6)).sum(0).min() == 8

    def test_objective_has_the_constants_of_the_theorem(self):
        bound = PlanObjective.of(lr=0.01, steps=5, smoothness=2, gradient=3, variance=4)
        assert bound.variance == pytest.approx(2 * 0.01 * 2 * 4)
        assert bound.drift == pytest.approx(0.01**2 * 2**2 * 3 * 4 * 9 / 6)
        with pytest.raises(InvalidValue, match="drift must be"):
            PlanObjective(drift=-1)

    def test_plan_covers_every_unit_where_possible(self):
        assert plan([9.0, 1, 1, 1], [2, 2]).sum(0).min() == 1
        assert plan([9.0, 1, 1, 1], [2, 1]).sum(0).min() == 0


def test_large_plan_is_run_length_encoded(monkeypatch):
    energies, budgets = np.arange(30.0), [30, 20, 10, 7]
    matrix = plan(energies, budgets, gamma=2)
    monkeypatch.setattr(single_group, "MAX_MATRIX_ENTRIES", 10)
    runs = plan(energies, budgets, gamma=2)
    assert isinstance(runs, RunLengthPlan)
    assert (runs.matrix().numpy() == matrix).all()


def test_run_length_plan_of_a_million_units_is_short():
    random = np.random.default_rng(0)
    budgets = random.integers(1, 10**6, 1000)
    runs = plan(random.random(10**6), budgets, tolerate=20)
    assert isinstance(runs, RunLengthPlan)
    assert len(runs.lengths_R) < 2100
    assert runs.row_sums().tolist() == budgets.tolist()
    assert int(runs.column_sums().min()) >= 21


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"gamma": 3}, r"gamma must be at most 2 \(room for 8 units over 4 units\); got 3"),
        (
            {"tolerate": 2},
            r"tolerate must be at most 1: 2 drop-outs need coverage 3, .* largest feasible is 2",
        ),
        ({"gamma": -1}, "gamma must be at least 0; got -1"),
        ({"tolerate": -1}, "tolerate must be at least 0; got -1"),
        ({"budgets": [5, 3]}, r"budgets must be whole numbers in 0\.\.4"),
        ({"budgets": [0.5, 3]}, "budgets must be whole numbers"),
        ({"budgets": []}, "budgets must be whole numbers"),
        ({"energies": [1, -1, 1, 1]}, "energies must be a list of finite numbers"),
        ({"energies": [1, float("nan"), 1, 1]}, "energies must be"),
        ({"energies": []}, "energies must be"),
        ({"energies": "abc"}, "energies must be a list .*; got 'abc'"),
        ({"energies": None}, "energies must be a list .*; got None"),
        (
            {"budgets": [1.0, 2.0]},
            r"budgets must be whole numbers .* \(of an integer type\).*; got \[1.0, 2.0\]",
        ),
        ({"gamma": 0.5}, "gamma must be a whole number from 0 on; got 0.5"),
        ({"gamma": "1"}, "gamma must be a whole number from 0 on; got '1'"),
        ({"tolerate": True}, "tolerate must be a whole number from 0 on; got True"),
    ],
)
def test_impossible_plan_is_refused(wrong, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        plan(**{"energies": [4, 3, 2, 1], "budgets": [4, 2, 2], **wrong})


def test_plan_depends_on_ratios_of_energies_alone():
    small, huge = [4.0, 3.0, 2.0, 1.0], [4e307, 3e307, 2e307, 1e307]
    for budgets in ([4, 2, 2], [1, 2], [3, 3, 3, 1]):
        assert np.array_equal(plan(small, budgets), plan([e * 4 for e in huge], budgets))


def test_gamma_and_tolerate_together_give_the_larger_coverage():
    assert plan([4, 3, 2, 1], [4, 4, 4], gamma=1, tolerate=1).sum(0).min() >= 2
