"""Importance by threshold: a weight is used while it is large enough, and learns its size.

Wu, Wang, Wang, Liu, Su, Gao: FIARSE, Model-heterogeneous federated learning via importance-aware
submodel extraction (NeurIPS 2024).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.policies.magnitude import SCOPES
from fedcover.submodels.reductions import Slices
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Assignment, Batch, Carry, Forward, Params, Recipe


class _ImportanceMask(torch.autograd.Function):
    """w where |w| >= tau, else 0; the derivative there is 1 + 2 tau / (|w| + tau)^2 * |w|."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, threshold: Tensor) -> Tensor:
        return torch.where(weight.abs() >= threshold, weight, 0.0)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        weight, threshold = ctx.saved_tensors
        size = weight.abs()
        surrogate = 1 + size * 2 * threshold / (size + threshold).clamp_min(1e-12) ** 2
        return torch.where(size >= threshold, gradient * surrogate, 0.0), None


def _hard_threshold(weight: Tensor, threshold: Tensor) -> Tensor:
    """w where |w| >= tau, else 0; the derivative there is 1."""
    return torch.where(weight.abs() >= threshold, weight, 0.0)


def fiarse(*, scope: str = "model", surrogate: bool = True) -> Recipe:
    """Train through the threshold of the client's mask: weights may drop out, none comes back.

    Use it with the policy `magnitude` of the same scope, which provides the threshold.

    Args:
        scope: One threshold for the whole "model", or one for each "layer".
        surrogate: Whether to use the derivative of the threshold. The authors' public code
            does not.
    """
    if scope not in SCOPES:
        raise unknown("recipe fiarse: scope", scope, SCOPES)
    apply_threshold: Callable[[Tensor, Tensor], Tensor] = (
        _ImportanceMask.apply if surrogate else _hard_threshold
    )

    def start(assignment: Assignment, params: Params) -> Carry:
        if isinstance(assignment.reduction, Slices):
            raise InvalidValue(
                "recipe fiarse trains within masks, and this policy gives slices: "
                "use policy magnitude"
            )
        masks = assignment.reduction.gradient_mask()
        thresholds = {name: _min_magnitude(params[name][bits]) for name, bits in masks.items()}
        if scope == "model" and thresholds:
            smallest = torch.stack(list(thresholds.values())).min()
            thresholds = dict.fromkeys(thresholds, smallest)
        return thresholds

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        used = {name: apply_threshold(params[name], threshold) for name, threshold in carry.items()}
        return cross_entropy(forward, {**params, **used}, batch, carry)

    return Recipe(loss, start)


def _min_magnitude(weights: Tensor) -> Tensor:
    """Return the smallest magnitude, or infinity if there are no weights."""
    if len(weights):
        return weights.abs().min()
    return torch.full((), torch.inf, dtype=weights.dtype, device=weights.device)
