"""PruneFL: one mask for all clients, reconfigured by squared gradient per unit of time.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning
on edge devices (TNNLS 2022). Clients measure the squared gradients, so use this policy with the
recipe `prunefl`.
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
"""Default number of rounds between two reconfigurations."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """Settings of one reconfiguration.

    `share` is the share of kept weights that become candidates for removal. `overhead` is the time
    of a round without any weights, relative to the whole model's. `traffic` is the time to send one
    weight, in multiply-adds of one sample. `budget` is the largest number of weights in the mask.
    """

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
    """Give all clients one mask within the smallest capacity, reconfigured every `every` rounds.

    The first mask keeps the largest weights. In the first `initial` rounds only the strongest
    client of a cohort trains. In a reconfiguration, the smallest `share` of each layer's kept
    weights (halved every `half_life` rounds) and all pruned weights are candidates. They are added
    in the order of squared gradient per time, as long as this exceeds the average of what is kept.
    The time of a weight is its multiply-adds plus `traffic`; a round without any weights takes
    `overhead` times the whole model's time. If nothing is measured, because the recipe is not
    `prunefl`, the mask stays that of the largest weights.
    """
    if every < 1 or initial < 0 or not 0 < share <= 1:
        raise InvalidValue(
            "policy prunefl: every must be at least 1, initial at least 0 and share in (0, 1]; "
            f"got {every}, {initial} and {share}"
        )
    if half_life <= 0 or overhead <= 0 or traffic < 0:
        raise InvalidValue(
            "policy prunefl: half_life and overhead must be above 0 and traffic at least 0; "
            f"got {half_life:g}, {overhead:g} and {traffic:g}"
        )
    budget = prunable_budget(view, min(view.levels))
    # not the round itself: a new mask must stay the same until a client has answered with it
    due_round = view.round // every * every
    last_round = last_answered_round(view.measured)
    if last_round is None:
        mask = _largest_weights(view, budget)
    else:
        mask = {name: view.measured["trained_in"][name] > 0 for name in view.prunable}
        if last_round < due_round:
            current_share = share * 0.5 ** (max(0, due_round - initial) / half_life)
            settings = Reconfiguration(current_share, overhead, traffic, budget)
            mask = reconfigure(view, mask, settings)
    common = Masks(mask)
    if view.round >= initial:
        return [common] * len(view.cohort)
    strongest = min(view.cohort, key=lambda client: (-client.capacity, client.id))
    return [common if client is strongest else None for client in view.cohort]


def last_answered_round(measured: Mapping[str, Params]) -> int | None:
    """Return the last round in which a client answered (see `trained_in`); None if none did."""
    if not measured.get("trained_in"):
        return None
    return round(max(float(tensor.max()) for tensor in measured["trained_in"].values())) - 1


def reconfigure(view: View, masks: Params, settings: Reconfiguration) -> Params:
    """Return a new mask: keep the certain weights and add candidates greedily.

    Candidates are added by gain per time, until one does not exceed the ratio of all kept so far.
    """
    squared_gradients = view.measured["squared_gradient"]
    certain = torch.cat(
        [_certain_weights(view.params[name], masks[name], settings.share) for name in view.prunable]
    )
    gains = torch.cat([squared_gradients[name].double().flatten() for name in view.prunable])
    times = torch.cat([_time_per_weight(view, name, settings.traffic) for name in view.prunable])
    ratios = gains / times
    num_candidates = int((~certain).sum())
    candidates = torch.where(certain, -torch.inf, ratios).argsort(descending=True, stable=True)
    candidates = candidates[:num_candidates]

    # the ratio of everything that is kept before each candidate joins, overhead included
    never_pruned = sum(
        float(squares.sum())
        for name, squares in squared_gradients.items()
        if name not in view.prunable
    )
    gain_before = never_pruned + gains[certain].sum() + gains[candidates].cumsum(0)
    gain_before = gain_before - gains[candidates]
    time_before = settings.overhead * times.sum() + times[certain].sum()
    time_before = time_before + times[candidates].cumsum(0) - times[candidates]
    exceeds = ratios[candidates] > gain_before / time_before
    worthwhile = exceeds.long().cumprod(0).bool()  # stop at the first that does not exceed it

    num_free = max(0, settings.budget - int(certain.sum()))
    new_weights = candidates[worthwhile][:num_free]
    new_mask = certain.clone().index_fill_(0, new_weights, True)
    layers = torch.split(new_mask, [view.params[name].numel() for name in view.prunable])
    return {
        name: layer.view_as(view.params[name])
        for name, layer in zip(view.prunable, layers, strict=True)
    }


def _certain_weights(weight: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return a flat mask of the kept weights without the smallest `share` of them."""
    num_kept = int(mask.sum())
    num_certain = num_kept - int(num_kept * share)
    magnitudes = torch.where(mask, weight.abs(), -1.0).flatten()
    order = magnitudes.argsort(descending=True, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).index_fill_(0, order[:num_certain], True)


def _time_per_weight(view: View, name: str, traffic: float) -> Tensor:
    weight = view.params[name]
    time = view.uses.get(name, 1) + traffic
    return torch.full((weight.numel(),), time, dtype=torch.float64, device=weight.device)


def _largest_weights(view: View, budget: int) -> dict[str, Tensor]:
    total = sum(view.params[name].numel() for name in view.prunable)
    mask: dict[str, Tensor] = {}
    for name in view.prunable:
        weight = view.params[name]
        layer_budget = int(budget / total * weight.numel() + 1e-9)
        mask[name] = rank_by_magnitude(weight) < layer_budget
    return mask
