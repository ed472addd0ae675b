"""Masks whose coverage and whose total noise are set independently of each other, at equal
capacity.
"""

import math

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.magnitude import rank_by_magnitude
from fedcover.policies.planned import plan_problem
from fedcover.policies.planner.allocation import GOLDEN, RunLengthPlan
from fedcover.policies.planner.single_group import BudgetedGroup
from fedcover.rng import generator
from fedcover.submodels.reductions import Masks
from fedcover.types import View

TOLERANCE, MAX_DEVIATION = 0.02, 0.1
"""How far the total noise should be, and may be, from the wanted one, as a share of it: few
weights, few values.
"""


def designed(view: View, *, gamma: int, noise: float) -> list[Masks]:
    """Every prunable weight is held at least `gamma` times; all clients together lack `noise` times
    its layer's energy.

    The planner's construction for that coverage, fed with a ranking between heaviest first and
    lightest first.
    """
    groups, _, _ = plan_problem(view, "pruning")
    matrix_by_tensor = {}
    for name, group in groups.items():
        jitter_U = torch.rand(group.units, generator=generator(view.seed, "design", name)).to(
            group.energies_U.device
        )
        matrix_by_tensor[name] = _with_noise(
            group, jitter_U, gamma, noise, view.round * GOLDEN
        ).matrix()
    return [
        Masks(
            {
                name: held_NU[n].view_as(view.params[name])
                for name, held_NU in matrix_by_tensor.items()
            }
        )
        for n in range(len(view.cohort))
    ]


def _with_noise(
    group: BudgetedGroup, jitter_U: Tensor, gamma: int, noise: float, phase: float
) -> RunLengthPlan:
    """Bisect how far the ranking is turned over until the plan lacks the wanted energy, or as
    nearly as it can be.
    """
    low, high = 0.0, 1.0
    nearest, best = math.inf, None
    for _ in range(40):
        middle = (low + high) / 2
        ranked = _ranked(group, jitter_U, middle)
        plan = ranked.allocation(gamma).assign_units(ranked.order, phase)
        lacking = missing_energy(group, plan)
        if abs(lacking - noise) < abs(nearest - noise):
            nearest, best = lacking, plan
        if abs(nearest - noise) <= TOLERANCE * noise:
            break
        low, high = (middle, high) if lacking < noise else (low, middle)
    if best is None or abs(nearest - noise) > MAX_DEVIATION * noise:
        raise InvalidValue(
            f"no ranking has noise {noise:g} at coverage {gamma}; the nearest has {nearest:.4g}"
        )
    return best


def _ranked(group: BudgetedGroup, jitter_U: Tensor, over: float) -> BudgetedGroup:
    """The same units in another order: 0 heaviest first, 1/2 at random, 1 lightest first."""
    place_U = 1 - rank_by_magnitude(group.energies_U) / group.units
    wanted_U = (1 - 2 * over) * place_U + 2 * min(over, 1 - over) * jitter_U
    return BudgetedGroup(wanted_U, group.budgets_N)


def missing_energy(group: BudgetedGroup, plan: RunLengthPlan) -> float:
    """The energy that all clients lack together, over the energy of the layer."""
    energies_U = group.energies_U.double()
    missing_U = len(group.budgets_N) - plan.column_sums()
    return float((energies_U * missing_U).sum() / energies_U.sum())
