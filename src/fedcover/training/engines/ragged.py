"""Clients with unequal numbers of samples in the seats of one crew: whoever has finished leaves its seat to the next.

Whole batches are steps of all seats together, made fast once for whoever sits there. What is left of an epoch has
another size for each client, so that is a step of one seat by itself, as it stands.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.training.engines.buffers import ClientInputs, JobResult, StepBuffers, client_buffers
from fedcover.training.engines.compilation import (
    on_stream,
    precision_context,
    reraise_as_unsupported,
)
from fedcover.training.engines.runners import StepRunner
from fedcover.training.engines.sgd_step import BatchSchedule, StepTensors, tree_leaves, tree_map


@dataclass(slots=True, eq=False)
class StackSlot:
    """One client in a crew: which of its seats, in what order it goes through its rows, and how far it has come."""

    step_buffers: StepBuffers
    index: int
    client: ClientInputs
    row_orders: tuple[Tensor, Tensor] = field(init=False)
    tensors: StepTensors = field(init=False)
    epoch: int = 0
    batches_done: int = 0

    def __post_init__(self) -> None:
        self.row_orders, self.tensors = (
            self.client.row_orders(),
            _slot_tensors(self.step_buffers, self.index),
        )
        self.load()

    @property
    def full_batches(self) -> int:
        """How many whole batches an epoch has."""
        return self.client.rows // self.step_buffers.signature.local.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has."""
        return -(-self.client.rows // self.step_buffers.signature.local.batch_size)

    @property
    def is_finished(self) -> bool:
        """Whether the client has made all of its steps."""
        return self.epoch == self.step_buffers.signature.local.epochs

    def load(self) -> None:
        """Put what the client brings along in the place of whatever was in the seat."""
        client, tensors = self.client, self.tensors
        buffers = client_buffers(client.job.assignment) if tensors.buffers else {}
        for room, values in (
            (tensors.params, client.params),
            (tensors.masks, client.masks),
            (tensors.buffers, buffers),
        ):
            for name, tensor in room.items():
                tensor.copy_(values[name])
        for tensor in tensors.velocity.values():
            tensor.zero_()
        for tensor, value in zip(
            tree_leaves(tensors.carry), tree_leaves(client.carry), strict=True
        ):
            tensor.copy_(value)
        tensors.x[: client.rows].copy_(client.shard.samples.x[client.shard.index])
        tensors.y[: client.rows].copy_(client.shard.samples.y[client.shard.index])

    def load_schedule(self, schedule: BatchSchedule, steps: int) -> None:
        """Put the rows of the client's next steps where those of its crew are."""
        size = self.step_buffers.signature.local.batch_size
        part = slice(self.batches_done * size, (self.batches_done + steps) * size)
        for room, order in zip(
            (schedule.rows_TB, schedule.drawn_TBK), self.row_orders, strict=True
        ):
            room[:steps, self.index].copy_(
                order[self.epoch, part].reshape(room[:steps, self.index].shape)
            )

    def finish_epoch(self) -> None:
        """Make the step of what is left of the epoch, if anything is, and begin the next."""
        if self.steps_per_epoch > self.full_batches:
            left = slice(self.full_batches * self.step_buffers.signature.local.batch_size, None)
            rows_1B, drawn_1BK = (order[self.epoch, left][None] for order in self.row_orders)
            step = replace(self.step_buffers.step, stacked=False)
            with reraise_as_unsupported():  # this size was not tried before
                step(
                    self.tensors,
                    BatchSchedule(rows_1B, drawn_1BK, cursor=torch.zeros(1, dtype=torch.int64)),
                )
        self.epoch, self.batches_done = self.epoch + 1, 0

    def result(self) -> JobResult:
        """What comes of the client."""
        tensors = self.tensors
        flat_P = torch.cat([p.reshape(-1) for p in tensors.params.values()])
        loss = float(
            tensors.losses_T[
                (self.epoch - 1) * self.steps_per_epoch : self.epoch * self.steps_per_epoch
            ].mean()
        )
        kept = (tree_map(torch.clone, tree) for tree in (tensors.carry, tensors.buffers))
        return self.step_buffers.result(
            self.client, flat_P, bool(flat_P.isfinite().all()), loss, *kept
        )


def _slot_tensors(step_buffers: StepBuffers, slot: int) -> StepTensors:
    """What a lane holds for one seat, as if its client were alone."""
    stack = step_buffers.tensors
    tensors = {
        kind: {name: tensor[slot] for name, tensor in getattr(stack, kind).items()}
        for kind in ("params", "velocity", "masks", "buffers")
    }
    carry, observed = (
        tree_map(lambda stacked: stacked[slot], tree) for tree in (stack.carry, stack.observed)
    )
    return StepTensors(**tensors, carry=carry, observed=observed, x=stack.x[slot], y=stack.y[slot], lr=stack.lr,
                 step=stack.step[slot], losses_T=stack.losses_T[:, slot])  # fmt: skip


def train_ragged(runner: StepRunner, clients: Sequence[ClientInputs]) -> list[JobResult]:
    """What comes of clients that differ in their numbers of samples only, those with the most first."""
    step_buffers, size = runner.step_buffers, runner.step_buffers.signature.local.batch_size
    waiting = deque(sorted(clients, key=lambda client: client.rows, reverse=True))
    step_buffers.tensors.lr.fill_(clients[0].job.lr)
    results: list[JobResult] = []
    with (
        on_stream(runner.stream),
        precision_context(runner.precision, step_buffers.tensors.x.device),
    ):
        active_slots = [
            StackSlot(step_buffers, index, waiting.popleft())
            for index in range(min(step_buffers.stack_size or 1, len(waiting)))
        ]
        schedule = step_buffers.schedule(size, active_slots[0].row_orders[1].shape[-1])
        if runner.prepare_steps([size]):
            for slot in active_slots:
                slot.load()
        while active_slots:
            _run_full_batches(step_buffers, schedule, active_slots, runner.steps[size])
            for slot in [slot for slot in active_slots if slot.batches_done == slot.full_batches]:
                slot.finish_epoch()
                if slot.is_finished:
                    results.append(slot.result())
                    active_slots.remove(slot)
                    active_slots += (
                        [StackSlot(step_buffers, slot.index, waiting.popleft())] if waiting else []
                    )
    return results


def _run_full_batches(
    step_buffers: StepBuffers,
    schedule: BatchSchedule,
    active_slots: Sequence[StackSlot],
    step: Callable[[], None],
) -> None:
    """All seats at once through whole batches, until the first of them is at the end of an epoch."""
    steps = min(slot.full_batches - slot.batches_done for slot in active_slots)
    made = [0] * (
        step_buffers.stack_size or 1
    )  # whatever an empty seat does, it begins anew and nobody looks at it
    for slot in active_slots:
        made[slot.index] = slot.epoch * slot.steps_per_epoch + slot.batches_done
        slot.load_schedule(schedule, steps)
        slot.batches_done += steps
    step_buffers.tensors.step.copy_(torch.tensor(made))
    schedule.cursor.zero_()
    for _ in range(steps):
        step()
