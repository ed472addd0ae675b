"""Compute the frontier of a fleet: the least noise of each coverage."""

from functools import partial
from typing import Any

import numpy as np

from fedcover.analysis.policy_coverage import measure_policy
from fedcover.policies.planned import plan_problem, plan_reductions
from fedcover.policies.planner.multi_group import PlanTarget, target_coverage
from fedcover.policies.planner.single_group import BudgetedGroup
from fedcover.submodels import coverage
from fedcover.types import View


def planned_coverage(view: View, kind: str, target: PlanTarget) -> int:
    """Return the coverage of every unit in a round that the planned policy aims at."""
    problem = plan_problem(view, kind)
    energy = coverage.energy(view.params)
    return target_coverage(problem.groups, problem.nested, energy, target, problem.exact)


def exact_frontier(view: View, kind: str) -> list[dict[str, Any]]:
    """Return the least noise of each coverage, exactly, over all groups together."""
    groups = plan_problem(view, kind).groups
    total_energy = coverage.energy(view.params) or 1.0
    max_gamma = min(group.gamma_max for group in groups.values())
    points = []
    for gamma in range(max_gamma + 1):
        pruned_energy = sum(_pruned_energy(group, gamma) for group in groups.values())
        points.append({"gamma": gamma, "noise": pruned_energy / total_energy})
    return points


def _pruned_energy(group: BudgetedGroup, gamma: int) -> float:
    return float(np.sum(group.allocation(gamma).pruned_energy(group.tail_energy)))


def achieved_frontier(view: View, rounds: int) -> list[dict[str, Any]]:
    """Return the coverage of parameters for each number of times (`units`) that units are held.

    This is for models in which groups cut the same tensors, so that no exact frontier is known.
    """
    problem = plan_problem(view, "subnet")
    limits = [
        group.gamma_max for name, group in problem.groups.items() if name not in problem.nested
    ]
    max_units = min(limits, default=0)
    for name in problem.nested:
        group = problem.groups[name]
        num_clients_with_all_units = int((group.budgets_N == group.units).sum())
        max_units = min(max_units, num_clients_with_all_units)
    points = []
    for units in range(max_units + 1):
        policy = partial(plan_reductions, gamma=units)
        points.append({"units": units, **measure_policy(policy, view, rounds).line()})
    return points
