"""The planner as a policy: every round the least noise for the coverage that is wanted, from the current weights."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.policies.base import prunable_budget, prunable_weights, width
from fedcover.policies.planner.multi_group import (
    PlanTarget,
    conflict_colouring,
    is_exact,
    plan_round,
    unit_energies,
)
from fedcover.policies.planner.single_group import BudgetedGroup, PlanObjective, RunLengthPlan
from fedcover.policies.replication import copy_reductions, copy_transform, num_copies
from fedcover.submodels.coverage import energy
from fedcover.submodels.reductions import Masks, Slices
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.types import Client, Params, Reduction, View

PLAN_KINDS = ("subnet", "pruning")


def planned(
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
    """The least noise with every unit covered `gamma` times, or after `tolerate` drop-outs; else, maybe, copies.

    Units are hidden units and channels (`subnet`) or single weights (`pruning`). Without a target, single weights and
    models whose groups never meet get the coverage of smallest Theorem 1' bound (`variance`, `drift`: its constants);
    where groups meet, every unit is held at least `share` as often as possible, and windows of rounds cover the pairs.
    But where groups meet and the largest device's model fits into the whole one twice or more, runs do without that
    coverage (unless `copies` is false): they train that model, copy it, and make an ensemble of the copies.
    """
    if kind not in PLAN_KINDS:
        raise unknown("policy planned: kind", kind, PLAN_KINDS)
    target = PlanTarget(gamma, tolerate, share, PlanObjective(variance, drift))
    if copies and _has_no_target(kind, gamma, tolerate) and num_copies(view) > 1:
        return copy_reductions(view)
    places = sorted(
        range(len(view.cohort)), key=lambda i: (-view.cohort[i].capacity, view.cohort[i].id)
    )
    clients = [
        view.cohort[place] for place in places
    ]  # not as drawn: arcs must keep their owners over the rounds
    groups, stacked, exact = budgeted_groups(view, kind, clients)
    try:
        plans = plan_round(
            groups,
            None if exact else conflict_colouring(view.groups),
            energy(view.params),
            target,
            view.round,
            stacked,
        )
    except InvalidValue as error:
        raise InvalidValue(f"policy planned, round {view.round}: {error}") from None
    own = (_slices if kind == "subnet" else _masks)(view, plans, len(clients))
    made = dict(zip(places, own, strict=True))
    return [made[place] for place in range(len(places))]


def growth(
    view: View,
    *,
    kind: str = "subnet",
    gamma: int | None = None,
    tolerate: int = 0,
    copies: bool = True,
    **others: object,
) -> Callable[[Params], Params] | None:
    """What `planned`, with the same options, does to the model before a round."""
    return copy_transform(view) if copies and _has_no_target(kind, gamma, tolerate) else None


def _has_no_target(kind: str, gamma: int | None, tolerate: int) -> bool:
    return kind == "subnet" and gamma is None and not tolerate


def budgeted_groups(
    view: View, kind: str, clients: Sequence[Client] | None = None
) -> tuple[dict[str, BudgetedGroup], list[str], bool]:
    """What is planned (units or weights with the clients' budgets), which groups are stacked, and whether it is exact.

    Pruning: every prunable layer keeps the same share, as greedy pruning and the paper's designs do.
    """
    shares = [client.capacity for client in clients or view.cohort]
    if kind == "subnet":
        widths = {capacity: width(view, capacity) for capacity in set(shares)}
        weights = unit_energies(view.groups, view.params)
        budgets = {
            g.name: np.array([num_units_kept(g.size, widths[c]) for c in shares])
            for g in view.groups
        }
        stacked = [group.name for group in view.groups if group.nested]
        return (
            {g.name: BudgetedGroup(weights[g.name], budgets[g.name]) for g in view.groups},
            stacked,
            is_exact(view.groups),
        )
    layers = {name: weight.flatten() for name, weight in prunable_weights(view).items()}
    prunable = sum(layer.numel() for layer in layers.values())
    kept = {capacity: prunable_budget(view, capacity) / prunable for capacity in set(shares)}
    budgets = {
        n: np.array([int(kept[c] * layer.numel() + 1e-9) for c in shares])
        for n, layer in layers.items()
    }
    return (
        {name: BudgetedGroup(layer.square(), budgets[name]) for name, layer in layers.items()},
        [],
        True,
    )


def _slices(view: View, plans: Mapping[str, RunLengthPlan], clients: int) -> list[Reduction]:
    held = {name: runs.matrix() for name, runs in plans.items()}
    return [
        Slices(
            view.groups, {name: held_NU[n].nonzero().flatten() for name, held_NU in held.items()}
        )
        for n in range(clients)
    ]


def _masks(view: View, plans: Mapping[str, RunLengthPlan], clients: int) -> list[Reduction]:
    labels = {name: runs.labels() for name, runs in plans.items()}

    def bits(name: str, n: int) -> Tensor:
        held_R = plans[name].columns_RN[:, n].to(labels[name].device)
        return held_R[labels[name]].view_as(view.params[name])

    return [Masks({name: bits(name, n) for name in plans}) for n in range(clients)]
