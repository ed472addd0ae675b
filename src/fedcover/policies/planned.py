"""The planner as a policy: every round the least noise for the coverage that is wanted, from the current weights."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedcover.coverage import energy
from fedcover.design import Wish, colours, design, is_exact, unit_energies
from fedcover.errors import InvalidValue, unknown
from fedcover.groups import units_kept
from fedcover.planner import Bound, Group
from fedcover.policies.common import prunable_budget, width
from fedcover.reduction import Masks, Slices
from fedcover.types import Client, Reduction, View

KINDS = ("subnet", "pruning")


def planned(
    view: View,
    *,
    kind: str = "subnet",
    gamma: int | None = None,
    tolerate: int = 0,
    share: float = 0.5,
    variance: float = Bound().variance,
    drift: float = Bound().drift,
) -> Sequence[Reduction]:
    """The least noise with every unit covered `gamma` times, or after any `tolerate` drop-outs, planned each round.

    Units are hidden units and channels (`subnet`) or single weights (`pruning`). Without a wish, single weights and
    models whose groups never meet get the coverage of smallest Theorem 1' bound (`variance`, `drift`: its constants);
    where groups meet, every unit is held at least `share` as often as possible, and windows of rounds cover the pairs.
    """
    if kind not in KINDS:
        raise unknown("policy planned: kind", kind, KINDS)
    wish = Wish(gamma, tolerate, share, Bound(variance, drift))
    places = sorted(range(len(view.cohort)), key=lambda i: (-view.cohort[i].capacity, view.cohort[i].id))
    clients = [view.cohort[place] for place in places]  # not as drawn: arcs must keep their owners over the rounds
    try:
        parts = _subnets(view, clients, wish) if kind == "subnet" else _masks(view, clients, wish)
    except InvalidValue as error:
        raise InvalidValue(f"policy planned, round {view.round}: {error}") from None
    made = dict(zip(places, parts, strict=True))
    return [made[place] for place in range(len(places))]


def _subnets(view: View, clients: list[Client], wish: Wish) -> list[Reduction]:
    shares = {client.capacity: width(view, client.capacity) for client in clients}
    weights = unit_energies(view.groups, view.params)
    groups = {
        g.name: Group.of(weights[g.name], [units_kept(g.size, shares[client.capacity]) for client in clients])
        for g in view.groups
    }
    exact = is_exact(view.groups)
    tints = dict.fromkeys(groups, 0) if exact else colours(view.groups)
    plans = design(groups, tints, energy(view.params) if exact else 1.0, wish, view.round)
    held = {name: runs.matrix() for name, runs in plans.items()}
    return [
        Slices(view.groups, {name: held_NU[n].nonzero().flatten() for name, held_NU in held.items()})
        for n in range(len(clients))
    ]


def _masks(view: View, clients: list[Client], wish: Wish) -> list[Reduction]:
    """Every prunable layer keeps the same share, as greedy pruning and the paper's designs do."""
    if not view.prunable:
        raise InvalidValue("kind 'pruning' needs a model with prunable weights; this one names none")
    weights = {name: view.params[name] for name in view.prunable}
    prunable = sum(weight.numel() for weight in weights.values())
    shares = {client.capacity: prunable_budget(view, client.capacity) / prunable for client in clients}
    groups = {
        name: Group.of(
            weight.detach().flatten().double().square(),
            np.array([int(shares[client.capacity] * weight.numel() + 1e-9) for client in clients]),
        )
        for name, weight in weights.items()
    }
    plans = design(groups, dict.fromkeys(groups, 0), energy(view.params), wish, view.round)
    labels = {name: runs.labels() for name, runs in plans.items()}

    def bits(name: str, n: int) -> Tensor:
        held_R = plans[name].columns_RN[:, n].to(labels[name].device)
        return held_R[labels[name]].view_as(weights[name])

    return [Masks({name: bits(name, n) for name in weights}) for n in range(len(clients))]
