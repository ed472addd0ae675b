"""Softmax regression: its constants are proved and its optimum is known; nothing is estimated."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcover.models.softmax import FeatureSelector
from fedcover.runs.experiment import Experiment
from fedcover.theory.certificate.global_loss import GlobalLoss
from fedcover.theory.convex import ConvexConstants, convex_constants, minimise
from fedcover.types import Params


@dataclass(frozen=True)
class SoftmaxSolution:
    """The proved constants and the optimum of a run; without weight decay there is no optimum."""

    convex_constants: ConvexConstants
    least: float
    optimum: Params | None
    left_gradient: float
    """The squared gradient at the optimum, which is not exactly zero."""


def is_softmax(module: nn.Module) -> bool:
    """Return whether a model is softmax regression."""
    return isinstance(module, nn.Sequential) and isinstance(module[0], FeatureSelector)


def solve_softmax(
    experiment: Experiment, global_loss: GlobalLoss, first: Params, trained: Mapping[str, Tensor]
) -> SoftmaxSolution:
    """Compute the constants and the optimum over the parameters that are ever trained.

    Args:
        experiment: the run's experiment.
        global_loss: F over all clients.
        first: the initial parameters.
        trained: True for each entry that some client trains in some round.
    """
    bias = "head.bias" in first
    weights = first["head.weight"]
    if bias:
        weights = torch.cat([weights, first["head.bias"][:, None]], 1)
    decay = experiment.weight_decay
    decay_contracts = experiment.momentum == 0 and experiment.lr * decay <= 1
    constants = convex_constants(
        [global_loss.rows(client).x for client in global_loss.client_weights],
        weights.double(),
        bias=bias,
        decay=decay,
        batch_size=experiment.batch_size,
        decay_contracts=decay_contracts,
    )
    if not decay:
        return SoftmaxSolution(constants, 0.0, None, 0.0)
    shapes = {name: tensor.shape for name, tensor in first.items()}
    is_trained = torch.cat([trained[name].flatten() for name in first])

    def loss(flat: Tensor) -> tuple[float, Tensor]:
        evaluation = global_loss.evaluate(_unflatten(flat, shapes))
        gradients = [evaluation.gradient[name].flatten().double() for name in first]
        return evaluation.value, torch.where(is_trained, torch.cat(gradients), 0)

    start = torch.zeros(len(is_trained), dtype=torch.float64, device=is_trained.device)
    optimum = minimise(loss, start, decay)
    return SoftmaxSolution(
        constants, optimum.least, _unflatten(optimum.point, shapes), optimum.gradient
    )


def _unflatten(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Params:
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
