"""The genuine certificate: for softmax regression the constants are proved and the optimum is known."""

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
    """What is proved about a run of softmax regression; without decay it has no unique optimum."""

    convex_constants: ConvexConstants
    least: float
    optimum: Params | None
    left_gradient: float
    """The squared gradient at the optimum that was found."""


def is_softmax(module: nn.Module) -> bool:
    """Whether a model is softmax regression, for which everything is known."""
    return isinstance(module, nn.Sequential) and isinstance(module[0], FeatureSelector)


def solve_softmax(
    experiment: Experiment, global_loss: GlobalLoss, first: Params, trained: Mapping[str, Tensor]
) -> SoftmaxSolution:
    """Constants and optimum over the parameters that are ever trained."""
    bias = "head.bias" in first
    weights = (
        torch.cat([first["head.weight"], first["head.bias"][:, None]], 1)
        if bias
        else first["head.weight"]
    )
    decay = experiment.weight_decay
    decay_contracts = experiment.momentum == 0 and experiment.lr * decay <= 1
    known = convex_constants(
        [global_loss.rows(client).x for client in global_loss.client_weights], weights.double(), bias=bias, decay=decay,
        batch_size=experiment.batch_size, decay_contracts=decay_contracts,
    )  # fmt: skip
    if not decay:
        return SoftmaxSolution(known, 0.0, None, 0.0)
    shapes = {name: tensor.shape for name, tensor in first.items()}
    free = torch.cat([trained[name].flatten() for name in first])

    def loss(flat: Tensor) -> tuple[float, Tensor]:
        full = global_loss.evaluate(_shaped(flat, shapes))
        return full.value, torch.where(
            free, torch.cat([full.gradient[name].flatten().double() for name in first]), 0
        )

    start = torch.zeros(len(free), dtype=torch.float64, device=free.device)
    found = minimise(loss, start, decay)
    return SoftmaxSolution(known, found.least, _shaped(found.point, shapes), found.gradient)


def _shaped(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Params:
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
