"""One common mask for all clients, re-configured by squared gradient per unit of time.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning on edge devices
(TNNLS 2022). Clients measure the squared gradients: use it with the recipe `prunefl`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.base import prunable_budget
from fedcover.policies.magnitude import rank_by_magnitude
from fedcover.submodels.reductions import Masks
from fedcover.types import Params, View

RECONFIGURE_EVERY = 50
"""Rounds between two re-configurations, unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """What a re-configuration goes by: the share of candidates, and times in multiply-adds of one sample."""

    share: float
    overhead: float
    traffic: float
    budget: int


def prunefl(
    view: View,
    *,
    every: int = RECONFIGURE_EVERY,
    initial: int = 0,
    share: float = 0.3,
    half_life: float = 10_000.0,
    overhead: float = 0.1,
    traffic: float = 6.0,
) -> Sequence[Masks | None]:
    """The same mask for everybody, within the smallest device's capacity; chosen anew every `every` rounds.

    It begins with the largest weights; for the first `initial` rounds only the strongest client of a cohort trains.
    Then the smallest `share` of each layer's kept weights (halved every `half_life` rounds) and all pruned weights are
    candidates, which return in the order of squared gradient per time while that beats the average of what is kept. A
    weight takes its multiply-adds and `traffic`; a round without any takes `overhead` times the whole model's time.
    Where nothing is measured, because the recipe is not `prunefl`, the mask always is that of the largest weights.
    """
    if every < 1 or initial < 0 or not 0 < share <= 1:
        raise InvalidValue(
            f"policy prunefl: every must be at least 1, initial at least 0 and share in (0, 1]; "
            f"got {every}, {initial} and {share}"
        )
    if half_life <= 0 or overhead <= 0 or traffic < 0:
        raise InvalidValue(
            f"policy prunefl: half_life and overhead must be above 0 and traffic at least 0; "
            f"got {half_life:g}, {overhead:g} and {traffic:g}"
        )
    budget = prunable_budget(view, min(view.levels))
    # not the round itself: a new mask must stay the same until somebody has answered with it
    due = view.round // every * every
    last = last_answered_round(view.measured)
    if last is None:
        mask = _largest(view, budget)
    else:
        mask = {name: view.measured["trained_in"][name] > 0 for name in view.prunable}
        if last < due:
            shrinking = share * 0.5 ** (max(0, due - initial) / half_life)
            mask = reconfigure(view, mask, Reconfiguration(shrinking, overhead, traffic, budget))
    common = Masks(mask)
    if view.round >= initial:
        return [common] * len(view.cohort)
    strongest = min(view.cohort, key=lambda client: (-client.capacity, client.id))
    return [common if client is strongest else None for client in view.cohort]


def last_answered_round(measured: Mapping[str, Params]) -> int | None:
    """The last round in which any client answered, as its `trained_in` says; None before the first."""
    if not measured.get("trained_in"):
        return None
    return round(max(float(tensor.max()) for tensor in measured["trained_in"].values())) - 1


def reconfigure(view: View, kept: Params, greedy: Reconfiguration) -> Params:
    """Certain weights stay; candidates are taken in order while their ratio exceeds the running ratio."""
    certain, gain, time = [], [], []
    measured = view.measured["squared_gradient"]
    for name in view.prunable:
        weight, held = view.params[name], kept[name]
        staying = int(held.sum()) - int(int(held.sum()) * greedy.share)
        order = (
            torch.where(held, weight.abs(), -1.0).flatten().argsort(descending=True, stable=True)
        )
        certain.append(
            torch.zeros_like(order, dtype=torch.bool).index_fill_(0, order[:staying], True)
        )
        gain.append(measured[name].double().flatten())
        seconds = view.uses.get(name, 1) + greedy.traffic
        time.append(
            torch.full((weight.numel(),), seconds, dtype=torch.float64, device=weight.device)
        )
    sure, gains, times = torch.cat(certain), torch.cat(gain), torch.cat(time)
    ratio = gains / times
    order = torch.where(sure, -torch.inf, ratio).argsort(descending=True, stable=True)[
        : int((~sure).sum())
    ]
    never_pruned = sum(
        float(squares.sum()) for name, squares in measured.items() if name not in view.prunable
    )
    # the running ratio before each candidate joins: everything that is kept so far, over its time and the overhead
    gained = never_pruned + gains[sure].sum() + gains[order].cumsum(0) - gains[order]
    spent = (
        greedy.overhead * times.sum() + times[sure].sum() + times[order].cumsum(0) - times[order]
    )
    worth = (
        (ratio[order] > gained / spent).long().cumprod(0).bool()
    )  # stop at the first that is not worth it
    joined = order[worth][: max(0, greedy.budget - int(sure.sum()))]
    chosen = sure.clone().index_fill_(0, joined, True)
    parts = torch.split(chosen, [view.params[name].numel() for name in view.prunable])
    return {
        name: part.view_as(view.params[name])
        for name, part in zip(view.prunable, parts, strict=True)
    }


def _largest(view: View, budget: int) -> dict[str, Tensor]:
    total = sum(view.params[name].numel() for name in view.prunable)
    return {
        name: rank_by_magnitude(view.params[name])
        < int(budget / total * view.params[name].numel() + 1e-9)
        for name in view.prunable
    }
