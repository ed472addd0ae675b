"""One common mask for all clients, re-configured by squared gradient per unit of time.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning on edge devices
(TNNLS 2022). Clients measure the squared gradients: use it with the recipe `prunefl`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.common import prunable_budget
from fedcover.policies.magnitude import rank_by_magnitude
from fedcover.reduction import Masks
from fedcover.types import View


def prunefl(
    view: View, *, every: int = 50, share: float = 0.3, half_life: float = 10_000.0, overhead: float = 0.1
) -> Sequence[Masks]:
    """The same mask for everybody, within the smallest device's capacity; chosen anew every `every` rounds.

    It begins with the largest weights. Then the smallest `share` of each layer's kept weights (halved every `half_life`
    rounds) and all pruned weights become candidates; candidates return in the order of squared gradient per time while
    that beats the average of what is kept so far. A weight's time is its multiply-adds; `overhead` is the time that a
    round takes without any weight, as a share of the whole model's.
    """
    if every < 1 or not 0 < share <= 1:
        raise InvalidValue(f"policy prunefl: every must be at least 1 and share in (0, 1]; got {every} and {share}")
    budget = prunable_budget(view, min(view.levels))
    measured = view.measured.get("squared_gradient")
    kept = _kept_last_round(view)
    if kept is None:
        mask = _largest(view, budget)
    elif view.round % every or measured is None:
        mask = kept
    else:
        mask = _reconfigured(view, kept, measured, share * 0.5 ** (view.round / half_life), overhead, budget)
    return [Masks(mask)] * len(view.cohort)


def _kept_last_round(view: View) -> dict[str, Tensor] | None:
    """The mask in force: what was trained in the last round in which anybody answered."""
    for counts in reversed(view.coverage.window):
        if any(bool(counts[name].any()) for name in view.prunable):
            return {name: counts[name] > 0 for name in view.prunable}
    return None


def _largest(view: View, budget: int) -> dict[str, Tensor]:
    total = sum(view.params[name].numel() for name in view.prunable)
    return {
        name: rank_by_magnitude(view.params[name]) < int(budget / total * view.params[name].numel() + 1e-9)
        for name in view.prunable
    }


def _reconfigured(
    view: View, kept: dict[str, Tensor], measured: dict[str, Tensor], share: float, overhead: float, budget: int
) -> dict[str, Tensor]:
    """Certain weights stay; candidates are taken greedily while their ratio exceeds the running ratio."""
    certain, gain, time = [], [], []
    for name in view.prunable:
        weight, held = view.params[name], kept[name]
        candidates = int(int(held.sum()) * share)
        order = rank_by_magnitude(torch.where(held, weight.abs(), -1.0))  # pruned weights rank last
        certain.append((held & (order < int(held.sum()) - candidates)).flatten())
        gain.append(measured[name].double().flatten())
        time.append(torch.full((weight.numel(),), float(view.uses.get(name, 1)), dtype=torch.float64))
    sure, gains, times = torch.cat(certain), torch.cat(gain), torch.cat(time).to(certain[0].device)
    ratio = gains / times
    order = torch.where(sure, -torch.inf, ratio).argsort(descending=True, stable=True)[: int((~sure).sum())]
    # the running ratio before each candidate joins: everything that is kept so far, over its time and the overhead
    gained = gains[sure].sum() + gains[order].cumsum(0) - gains[order]
    spent = overhead * times.sum() + times[sure].sum() + times[order].cumsum(0) - times[order]
    worth = (ratio[order] >= gained / spent).long().cumprod(0).bool()  # stop at the first that is not worth it
    joined = order[worth][: max(0, budget - int(sure.sum()))]
    chosen = sure.clone().index_fill_(0, joined, True)
    parts = torch.split(chosen, [view.params[name].numel() for name in view.prunable])
    return {name: part.view_as(view.params[name]) for name, part in zip(view.prunable, parts, strict=True)}
