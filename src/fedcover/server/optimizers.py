"""Server optimisers: how the average of a round becomes the next model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.server.aggregation import UNCOVERED
from fedcover.tensors import flatten_if_cuda, in_pieces, map_elementwise_named
from fedcover.types import Params


@dataclass(frozen=True, slots=True)
class AggregatedTensor:
    """A tensor before and after the rule, and where anybody trained it."""

    old: Tensor
    new: Tensor
    where: Tensor


OptimizerState = dict[str, Tensor]


ServerStep = Callable[[AggregatedTensor, OptimizerState], tuple[Tensor, OptimizerState]]


@dataclass(frozen=True, slots=True)
class ElementwiseStep:
    """A server step that treats every entry by itself, so that all tensors can go through it as one."""

    step: ServerStep

    def __call__(
        self, tensor: AggregatedTensor, memory: OptimizerState
    ) -> tuple[Tensor, OptimizerState]:
        """The step."""
        return self.step(tensor, memory)


def apply_server_step(
    step: ServerStep,
    old: Params,
    averaged: Params,
    counts: Params,
    memory: Mapping[str, Params],
    uncovered: str,
) -> tuple[Params, dict[str, Params]]:
    """What a server optimiser makes of a rule's result where covered, what becomes of the rest, and what it remembers.

    `uncovered` names what an entry becomes that nobody trained.
    """

    def one(before: Tensor, new: Tensor, count: Tensor, *known: Tensor) -> dict[str, Tensor]:
        where = count > 0
        moved, after = step(
            AggregatedTensor(before, new, where), dict(zip(memory, known, strict=True))
        )
        return {"": torch.where(where, moved, UNCOVERED[uncovered](before)), **after}

    trees = (old, averaged, counts, *memory.values())
    if isinstance(step, ElementwiseStep):
        made = map_elementwise_named(in_pieces(one), *map(flatten_if_cuda, trees))
    else:  # a step of one's own may look at a whole tensor
        made = map_elementwise_named(one, *map(dict, trees))
    return made.pop(""), made


def server_none() -> ServerStep:
    """The rule's result is the new model."""
    return ElementwiseStep(lambda tensor, memory: (tensor.new, {}))


def server_momentum(*, lr: float = 1.0, beta: float = 0.9) -> ServerStep:
    """Momentum on the server (FedAvgM, Hsu, Qi, Brown 2019); an entry's momentum moves only when it is covered."""
    if not (lr > 0 and 0 <= beta < 1):
        raise InvalidValue(
            f"server momentum: lr must be above 0 and beta in [0, 1); got {lr:g} and {beta:g}"
        )

    def step(tensor: AggregatedTensor, memory: OptimizerState) -> tuple[Tensor, OptimizerState]:
        before = memory.get("velocity", torch.zeros_like(tensor.old))
        velocity = torch.where(tensor.where, beta * before + (tensor.new - tensor.old), before)
        return torch.where(tensor.where, tensor.old + lr * velocity, tensor.new), {
            "velocity": velocity
        }

    return ElementwiseStep(step)


def server_adam(
    *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> ServerStep:
    """FedAdam (Reddi et al., ICLR 2021); an entry's moments move only when it is covered."""
    if not (lr > 0 and tau > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise InvalidValue(
            f"server adam: lr and tau must be above 0, beta1 and beta2 in [0, 1); "
            f"got {lr:g}, {tau:g}, {beta1:g} and {beta2:g}"
        )

    def step(tensor: AggregatedTensor, memory: OptimizerState) -> tuple[Tensor, OptimizerState]:
        change = tensor.new - tensor.old
        first = memory.get("first", torch.zeros_like(tensor.old))
        second = memory.get("second", torch.full_like(tensor.old, tau**2))
        first = torch.where(tensor.where, beta1 * first + (1 - beta1) * change, first)
        second = torch.where(tensor.where, beta2 * second + (1 - beta2) * change**2, second)
        moved = tensor.old + lr * first / (second.sqrt() + tau)
        return torch.where(tensor.where, moved, tensor.new), {"first": first, "second": second}

    return ElementwiseStep(step)


SERVERS: dict[str, Callable[..., ServerStep]] = {
    "none": server_none,
    "momentum": server_momentum,
    "adam": server_adam,
}
