"""Magnitude pruning: every client keeps the largest weights of the current global model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.errors import unknown
from fedcover.policies.base import prunable_budget, prunable_weights
from fedcover.submodels.reductions import Masks
from fedcover.types import View

SCOPES = ("layer", "model")


def magnitude(view: View, *, scope: str = "layer") -> Sequence[Masks]:
    """Keep the largest weights: the same share of each prunable layer, or the largest overall.

    Ties are broken by position, so that every mask has exactly its size.
    """
    if scope not in SCOPES:
        raise unknown("policy magnitude: scope", scope, SCOPES)
    weights = prunable_weights(view)
    ranks = _ranks_by_layer(weights) if scope == "layer" else _ranks_together(weights)
    prunable = sum(weight.numel() for weight in weights.values())
    masks: dict[float, Masks] = {}  # clients of equal capacity share one mask
    for capacity in {client.capacity for client in view.cohort}:
        budget = prunable_budget(view, capacity)
        bits: dict[str, Tensor] = {}
        for name, rank in ranks.items():
            layer_budget = int(budget / prunable * rank.numel() + 1e-9)
            bits[name] = rank < (layer_budget if scope == "layer" else budget)
        masks[capacity] = Masks(bits)
    return [masks[client.capacity] for client in view.cohort]


def rank_by_magnitude(weight: Tensor) -> Tensor:
    """Return the rank of every entry by magnitude, 0 for the largest (a rank, not an argsort).

    >>> rank_by_magnitude(torch.tensor([1.0, -3.0, 2.0])).tolist()
    [2, 0, 1]
    """
    order = weight.abs().flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return rank.view_as(weight)


def _ranks_by_layer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: rank_by_magnitude(weight) for name, weight in weights.items()}


def _ranks_together(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    rank = rank_by_magnitude(torch.cat([weight.flatten() for weight in weights.values()]))
    layer_ranks = torch.split(rank, [weight.numel() for weight in weights.values()])
    return {
        name: layer_rank.view_as(weights[name])
        for name, layer_rank in zip(weights, layer_ranks, strict=True)
    }
