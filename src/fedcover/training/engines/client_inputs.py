"""What one client brings to a training step: its parameters, masks, samples and row order.

`StepSignature` says which clients can use the same step tensors, one after another or stacked.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import TrainingDiverged
from fedcover.models.norms import statistics_key
from fedcover.tensors import device_of
from fedcover.training.engines.carries import CarrySpec, carry_spec, plain_carry
from fedcover.training.local_sgd import draw_row_order
from fedcover.types import Assignment, Carry, LocalTraining, Params, Recipe, Shard, Update


@dataclass(frozen=True, slots=True, eq=False)
class ClientJob:
    """One client's work in a round.

    Attributes:
        assignment: The client, its part of the model, and the task.
        lr: The learning rate.
        family: Jobs with equal families train equal modules and can share step tensors.
    """

    assignment: Assignment
    lr: float
    family: object = None


JobResult = tuple[ClientJob, Update | TrainingDiverged]
"""A job with the update that it led to, or the error that ended it."""


@dataclass(frozen=True, slots=True)
class StepSignature:
    """What clients must have in common to use the same step tensors.

    Attributes:
        family: The `family` of the clients' jobs.
        recipe: Decides, with `local`, what a step computes.
        local: The hyper-parameters of local training.
        param_shapes: Names and shapes of the parameters.
        masked: Names of the parameters whose gradients are masked.
        carry_spec: The structure of what the recipe remembers.
        sample: The shape of one input.
        rows: The number of samples that there is space for.
        dtype: The dtype of the parameters.
    """

    family: object
    recipe: Recipe
    local: LocalTraining
    param_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    masked: tuple[str, ...]
    carry_spec: CarrySpec
    sample: tuple[int, ...]
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class ClientInputs:
    """The tensors that a client starts the round with."""

    job: ClientJob
    params: Params
    masks: Mapping[str, Tensor]
    carry: Carry
    shard: Shard

    @property
    def rows(self) -> int:
        """The number of the client's samples."""
        return len(self.shard.index)

    @property
    def device(self) -> torch.device:
        """The device of the client's parameters."""
        return device_of(self.params)

    @property
    def shuffle_key(self) -> tuple[int, int, int]:
        """What determines the row order, among clients with one signature."""
        assignment = self.job.assignment
        return assignment.task.seed, assignment.state.round, assignment.client.id

    def row_orders(self) -> tuple[Tensor, Tensor]:
        """Return the row order of each epoch, and the random numbers that augment the rows."""
        assignment = self.job.assignment
        orders, draws = [], []
        for epoch in range(assignment.task.local.epochs):
            order_N, drawn_NK = draw_row_order(assignment, self.rows, epoch)
            orders.append(order_N)
            draws.append(drawn_NK[order_N])
        return torch.stack(orders), torch.stack(draws)

    def signature(self, rows: int) -> StepSignature:
        """Return the signature of step tensors for this client with space for `rows` samples."""
        task = self.job.assignment.task
        return StepSignature(
            family=self.job.family,
            recipe=task.recipe,
            local=task.local,
            param_shapes=tuple((name, tuple(p.shape)) for name, p in self.params.items()),
            masked=tuple(self.masks),
            carry_spec=carry_spec(self.carry),
            sample=tuple(self.shard.samples.x.shape[1:]),
            rows=rows,
            dtype=next(iter(self.params.values())).dtype,
        )


def client_inputs(jobs: Iterable[ClientJob]) -> Iterator[ClientInputs]:
    """Yield the inputs of each client; clients with the same part of a model share its tensors."""
    extracted: dict[tuple[int, int], Params] = {}
    for job in jobs:
        assignment = job.assignment
        task, state, reduction = assignment.task, assignment.state, assignment.reduction
        key = id(state), id(reduction)
        if key not in extracted:
            extracted[key] = reduction.extract(state.params)
        params = extracted[key]
        yield ClientInputs(
            job=job,
            params=params,
            masks=reduction.gradient_mask(),
            carry=plain_carry(task.recipe.start(assignment, dict(params))),
            shard=task.source.shard(assignment.client.id),
        )


def client_buffers(assignment: Assignment) -> Params:
    """Return a client's part of the model's buffers, with the running statistics of its width."""
    task, state = assignment.task, assignment.state
    key = statistics_key(task.norm, assignment.client.capacity)
    statistics = state.statistics.get(key, {}) if key else {}
    module_buffers = dict(task.model.module.named_buffers())
    return assignment.reduction.extract({**module_buffers, **statistics})
