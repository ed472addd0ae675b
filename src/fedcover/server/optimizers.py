"""Server optimisers: how the server moves the model towards the aggregated parameters.

An optimiser is a function of its options that returns a `ServerStep`. The step gets one parameter
at a time, and its memory: the tensors that it returned for this parameter after the round before.
The memory is part of a run's state and of its checkpoints. To add an optimiser, add it to
`SERVERS`.
"""

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
    """A parameter before and after aggregation; `where` is True where some client trained it."""

    old: Tensor
    new: Tensor
    where: Tensor


OptimizerMemory = dict[str, Tensor]
"""What an optimiser remembers of one parameter, by name; empty in the first round."""

ServerStep = Callable[[AggregatedTensor, OptimizerMemory], tuple[Tensor, OptimizerMemory]]
"""Returns the new parameter and the new memory. The names in the memory must never change."""


@dataclass(frozen=True, slots=True)
class ElementwiseStep:
    """A server step that treats every entry by itself.

    It can be applied to all parameters at once, or to a part of a large one.
    """

    step: ServerStep

    def __call__(
        self, tensor: AggregatedTensor, memory: OptimizerMemory
    ) -> tuple[Tensor, OptimizerMemory]:
        """Apply the step."""
        return self.step(tensor, memory)


_PARAMS = ""
"""Names the new parameter among the results of a step; no name in the memory may be this."""


def apply_server_step(
    step: ServerStep,
    old: Params,
    averaged: Params,
    counts: Params,
    memory: Mapping[str, Params],
    uncovered: str,
) -> tuple[Params, dict[str, Params]]:
    """Apply a server optimiser to all parameters.

    Args:
        step: the optimiser's step.
        old: the parameters before the round.
        averaged: the parameters that the aggregation rule returned.
        counts: how many clients trained each entry.
        memory: the optimiser's memory: by name, one tensor per parameter.
        uncovered: what becomes of entries that nobody trained; a key of `UNCOVERED`.

    Returns:
        The new parameters, and the new memory.
    """

    def step_one(
        old_tensor: Tensor, new_tensor: Tensor, count: Tensor, *memory_tensors: Tensor
    ) -> dict[str, Tensor]:
        where = count > 0
        tensor_memory = dict(zip(memory, memory_tensors, strict=True))
        tensor = AggregatedTensor(old_tensor, new_tensor, where)
        moved, new_memory = step(tensor, tensor_memory)
        return {
            _PARAMS: torch.where(where, moved, UNCOVERED[uncovered](old_tensor)),
            **new_memory,
        }

    trees = [old, averaged, counts, *memory.values()]
    if isinstance(step, ElementwiseStep):
        flat_trees = [flatten_if_cuda(tree) for tree in trees]
        results = map_elementwise_named(in_pieces(step_one), *flat_trees)
    else:  # a user-defined step may need whole parameters
        results = map_elementwise_named(step_one, *[dict(tree) for tree in trees])
    params = results.pop(_PARAMS)
    return params, results


# ── the optimisers ──────────────────────────────────────────────────────────────────────────────


def server_none() -> ServerStep:
    """Use the aggregated parameters as the new model."""
    return ElementwiseStep(lambda tensor, memory: (tensor.new, {}))


def server_momentum(*, lr: float = 1.0, beta: float = 0.9) -> ServerStep:
    """Use momentum (FedAvgM, Hsu, Qi, Brown 2019); uncovered entries keep theirs."""
    if not (lr > 0 and 0 <= beta < 1):
        raise InvalidValue(
            f"server momentum: lr must be above 0 and beta in [0, 1); got {lr:g} and {beta:g}"
        )

    def step(tensor: AggregatedTensor, memory: OptimizerMemory) -> tuple[Tensor, OptimizerMemory]:
        old_velocity = memory.get("velocity", torch.zeros_like(tensor.old))
        new_velocity = beta * old_velocity + (tensor.new - tensor.old)
        velocity = torch.where(tensor.where, new_velocity, old_velocity)
        moved = torch.where(tensor.where, tensor.old + lr * velocity, tensor.new)
        return moved, {"velocity": velocity}

    return ElementwiseStep(step)


def server_adam(
    *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> ServerStep:
    """Use FedAdam (Reddi et al., ICLR 2021); uncovered entries keep their moments."""
    if not (lr > 0 and tau > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise InvalidValue(
            f"server adam: lr and tau must be above 0, beta1 and beta2 in [0, 1); "
            f"got {lr:g}, {tau:g}, {beta1:g} and {beta2:g}"
        )

    def step(tensor: AggregatedTensor, memory: OptimizerMemory) -> tuple[Tensor, OptimizerMemory]:
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
"""All server optimisers, by the name that an experiment gives them."""
