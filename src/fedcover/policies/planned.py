"""The planner as a policy: in every round, the least pruning noise at the required coverage."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.policies.base import prunable_budget, prunable_weights, width
from fedcover.policies.planner.allocation import RunLengthPlan
from fedcover.policies.planner.multi_group import (
    PlanTarget,
    conflict_colouring,
    is_exact,
    plan_round,
    unit_energies,
)
from fedcover.policies.planner.single_group import BudgetedGroup, PlanObjective
from fedcover.policies.replication import copy_reductions, copy_transform, num_copies
from fedcover.submodels.coverage import energy
from fedcover.submodels.reductions import Masks, Slices
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.types import Client, Params, Policy, Reduction, View

PLAN_KINDS = ("subnet", "pruning")


def plan_reductions(
    view: View,
    *,
    kind: str = "subnet",
    gamma: int | None = None,
    tolerate: int = 0,
    share: float = 0.5,
    variance: float = PlanObjective().variance,
    drift: float = PlanObjective().drift,
    copies: bool = True,
) -> Sequence[Reduction]:
    """Plan the least noise that still covers every unit as often as required.

    Units are hidden units and channels (`subnet`) or single weights (`pruning`). Every unit is
    covered `gamma` times, or at least once after `tolerate` drop-outs. Without either target:

    * Single weights, and models whose groups never meet in a tensor, get the coverage of smallest
      Theorem 1' bound (`variance` and `drift` are its constants).
    * Where groups meet, every unit is held at least `share` as often as the fleet allows, and
      windows of rounds cover the pairs.
    * Where groups meet and the largest device's model fits into the whole one twice or more, that
      model is trained and copied instead, without that coverage (unless `copies` is false). The
      copies become an ensemble.
    """
    if kind not in PLAN_KINDS:
        raise unknown("policy planned: kind", kind, PLAN_KINDS)
    target = PlanTarget(gamma, tolerate, share, PlanObjective(variance, drift))
    if copies and _has_no_target(kind, gamma, tolerate) and num_copies(view) > 1:
        return copy_reductions(view)
    # not in the order of the draw: clients must keep their arcs from round to round
    slots = sorted(
        range(len(view.cohort)),
        key=lambda slot: (-view.cohort[slot].capacity, view.cohort[slot].id),
    )
    problem = plan_problem(view, kind, [view.cohort[slot] for slot in slots])
    try:
        plans = plan_round(
            problem.groups,
            None if problem.exact else conflict_colouring(view.groups),
            energy(view.params),
            target,
            view.round,
            problem.nested,
        )
    except InvalidValue as error:
        raise InvalidValue(f"policy planned, round {view.round}: {error}") from None
    to_reductions = _slices_of_plans if kind == "subnet" else _masks_of_plans
    reductions = to_reductions(view, plans, len(slots))
    reduction_by_slot = dict(zip(slots, reductions, strict=True))
    return [reduction_by_slot[slot] for slot in range(len(slots))]


def growth(
    view: View,
    *,
    kind: str = "subnet",
    gamma: int | None = None,
    tolerate: int = 0,
    copies: bool = True,
    **others: object,
) -> Callable[[Params], Params] | None:
    """Return how the policy, with the same options, changes the model before a round."""
    if copies and _has_no_target(kind, gamma, tolerate):
        return copy_transform(view)
    return None


planned = Policy(plan_reductions, growth, name="planned")


def _has_no_target(kind: str, gamma: int | None, tolerate: int) -> bool:
    return kind == "subnet" and gamma is None and not tolerate


class PlanProblem(NamedTuple):
    """The input of the planner.

    `groups` are units or weights with the clients' budgets, and `nested` names those of which only
    first units can be kept. `exact`: the groups can be planned independently of each other.
    """

    groups: dict[str, BudgetedGroup]
    nested: list[str]
    exact: bool


def plan_problem(view: View, kind: str, clients: Sequence[Client] | None = None) -> PlanProblem:
    """Return the planning problem of some clients (by default the cohort's).

    With pruning every prunable layer keeps the same share, as in greedy pruning and in the paper's
    designs.
    """
    capacities = [client.capacity for client in clients or view.cohort]
    if kind == "subnet":
        return _subnet_problem(view, capacities)
    return _pruning_problem(view, capacities)


def _subnet_problem(view: View, capacities: Sequence[float]) -> PlanProblem:
    widths = {capacity: width(view, capacity) for capacity in set(capacities)}
    energies = unit_energies(view.groups, view.params)
    groups: dict[str, BudgetedGroup] = {}
    for group in view.groups:
        budgets_N = np.array([num_units_kept(group.size, widths[c]) for c in capacities])
        groups[group.name] = BudgetedGroup(energies[group.name], budgets_N)
    nested = [group.name for group in view.groups if group.nested]
    return PlanProblem(groups, nested, is_exact(view.groups))


def _pruning_problem(view: View, capacities: Sequence[float]) -> PlanProblem:
    layers = {name: weight.flatten() for name, weight in prunable_weights(view).items()}
    prunable = sum(layer.numel() for layer in layers.values())
    shares = {capacity: prunable_budget(view, capacity) / prunable for capacity in set(capacities)}
    groups: dict[str, BudgetedGroup] = {}
    for name, layer in layers.items():
        budgets_N = np.array([int(shares[c] * layer.numel() + 1e-9) for c in capacities])
        groups[name] = BudgetedGroup(layer.square(), budgets_N)
    return PlanProblem(groups, [], exact=True)


def _slices_of_plans(
    view: View, plans: Mapping[str, RunLengthPlan], num_clients: int
) -> list[Reduction]:
    membership = {name: plan.matrix() for name, plan in plans.items()}
    reductions: list[Reduction] = []
    for client in range(num_clients):
        units = {name: held_NU[client].nonzero().flatten() for name, held_NU in membership.items()}
        reductions.append(Slices(view.groups, units))
    return reductions


def _masks_of_plans(
    view: View, plans: Mapping[str, RunLengthPlan], num_clients: int
) -> list[Reduction]:
    run_of_unit = {name: plan.labels() for name, plan in plans.items()}

    def mask(name: str, client: int) -> Tensor:
        runs_U = run_of_unit[name]
        held_R = plans[name].columns_RN[:, client].to(runs_U.device)
        return held_R[runs_U].view_as(view.params[name])

    return [Masks({name: mask(name, client) for name in plans}) for client in range(num_clients)]
