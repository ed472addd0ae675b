"""Train clients with different numbers of samples in the slots of one stack.

A full batch is one prepared step of all slots. The rows that remain at the end of an epoch differ
from client to client, so they are an eager step of one slot. A client that has finished leaves its
slot to the next one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.tensors import clone, tree_map, tree_map_
from fedcover.training.engines.client_inputs import ClientInputs, JobResult, client_buffers
from fedcover.training.engines.compilation import on_stream, precision_context
from fedcover.training.engines.runners import StepRunner
from fedcover.training.engines.step_tensors import BatchSchedule, StepTensors
from fedcover.training.engines.unsupported import reraise_as_unsupported
from fedcover.training.engines.workspace import StepWorkspace
from fedcover.types import LocalTraining, Params


@dataclass(slots=True, eq=False)
class StackSlot:
    """One client of a stack: its slot, its row order, and how far it has come.

    Attributes:
        workspace: The step tensors of the stack.
        index: The slot's position along the axis of clients.
        client: The client in the slot.
        row_orders: The client's row order in each epoch, and the numbers that augment the rows.
        tensors: The slot's part of the step tensors, as views.
        epoch: The number of epochs done.
        batches_done: The number of full batches done in this epoch.
    """

    workspace: StepWorkspace
    index: int
    client: ClientInputs
    row_orders: tuple[Tensor, Tensor] = field(init=False)
    tensors: StepTensors = field(init=False)
    epoch: int = 0
    batches_done: int = 0

    def __post_init__(self) -> None:
        self.row_orders = self.client.row_orders()
        self.tensors = _slot_tensors(self.workspace.tensors, self.index)
        self.load()

    @property
    def local(self) -> LocalTraining:
        """The hyper-parameters of local training."""
        return self.workspace.signature.local

    @property
    def full_batches(self) -> int:
        """The number of full batches in an epoch."""
        return self.client.rows // self.local.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch, with that of the remaining rows."""
        return -(-self.client.rows // self.local.batch_size)

    @property
    def at_epoch_end(self) -> bool:
        """Whether all full batches of the epoch are done."""
        return self.batches_done == self.full_batches

    @property
    def is_finished(self) -> bool:
        """Whether the client has done all of its epochs."""
        return self.epoch == self.local.epochs

    def load(self) -> None:
        """Copy the client's inputs into the slot."""
        client, tensors = self.client, self.tensors
        buffers = client_buffers(client.job.assignment) if tensors.buffers else {}
        _copy_named(tensors.params, client.params)
        _copy_named(tensors.masks, dict(client.masks))
        _copy_named(tensors.buffers, buffers)
        for velocity in tensors.velocity.values():
            velocity.zero_()
        tree_map_(Tensor.copy_, tensors.carry, client.carry)
        samples, index = client.shard.samples, client.shard.index
        tensors.x[: client.rows].copy_(samples.x[index])
        tensors.y[: client.rows].copy_(samples.y[index])

    def load_schedule(self, schedule: BatchSchedule, steps: int) -> None:
        """Copy the rows of the client's next full batches into the stack's schedule."""
        size = self.local.batch_size
        rows = slice(self.batches_done * size, (self.batches_done + steps) * size)
        order_EN, drawn_ENK = self.row_orders
        for target, source in ((schedule.rows_TB, order_EN), (schedule.drawn_TBK, drawn_ENK)):
            slot_target = target[:steps, self.index]
            slot_target.copy_(source[self.epoch, rows].reshape(slot_target.shape))

    def finish_epoch(self) -> None:
        """Train on the remaining rows of the epoch, if there are any, and begin the next epoch."""
        if self.steps_per_epoch > self.full_batches:
            self._run_remainder()
        self.epoch += 1
        self.batches_done = 0

    def _run_remainder(self) -> None:
        rows = slice(self.full_batches * self.local.batch_size, None)
        order_EN, drawn_ENK = self.row_orders
        schedule = BatchSchedule(
            rows_TB=order_EN[self.epoch, rows][None],
            drawn_TBK=drawn_ENK[self.epoch, rows][None],
            cursor=torch.zeros(1, dtype=torch.int64),
        )
        step = replace(self.workspace.step, stacked=False)
        with reraise_as_unsupported():  # this batch size has not been tried before
            step(self.tensors, schedule)

    def result(self) -> JobResult:
        """Return the client's result."""
        tensors = self.tensors
        flat_P = torch.cat([p.reshape(-1) for p in tensors.params.values()])
        last_epoch = slice(
            (self.epoch - 1) * self.steps_per_epoch, self.epoch * self.steps_per_epoch
        )
        return self.workspace.result(
            self.client,
            flat_P,
            finite=bool(flat_P.isfinite().all()),
            loss=float(tensors.losses_T[last_epoch].mean()),
            carry=tree_map(torch.clone, tensors.carry),
            buffers=clone(tensors.buffers),
        )


def _copy_named(targets: Params, values: Params) -> None:
    for name, target in targets.items():
        target.copy_(values[name])


def _slot_tensors(stack: StepTensors, index: int) -> StepTensors:
    """Return views of one slot, as if its client trained alone."""

    def of_slot(stacked: Tensor) -> Tensor:
        return stacked[index]

    return StepTensors(
        params=tree_map(of_slot, stack.params),
        velocity=tree_map(of_slot, stack.velocity),
        masks=tree_map(of_slot, stack.masks),
        buffers=tree_map(of_slot, stack.buffers),
        carry=tree_map(of_slot, stack.carry),
        observed=tree_map(of_slot, stack.observed),
        x=of_slot(stack.x),
        y=of_slot(stack.y),
        lr=stack.lr,
        step=of_slot(stack.step),
        losses_T=stack.losses_T[:, index],
    )


def train_ragged(runner: StepRunner, clients: Sequence[ClientInputs]) -> list[JobResult]:
    """Train clients that differ only in their number of samples, the largest first."""
    workspace = runner.workspace
    waiting = deque(sorted(clients, key=lambda client: client.rows, reverse=True))
    workspace.tensors.lr.fill_(clients[0].job.lr)
    device = workspace.tensors.x.device
    with on_stream(runner.stream), precision_context(runner.precision, device):
        num_slots = min(workspace.stack_size or 1, len(waiting))
        slots = [StackSlot(workspace, index, waiting.popleft()) for index in range(num_slots)]
        return _train_slots(runner, slots, waiting)


def _train_slots(
    runner: StepRunner, active_slots: list[StackSlot], waiting: deque[ClientInputs]
) -> list[JobResult]:
    """Train until no client is left; waiting clients take the slots of those that finish."""
    workspace, batch_size = runner.workspace, runner.workspace.signature.local.batch_size
    _, drawn_ENK = active_slots[0].row_orders
    schedule = workspace.schedule(batch_size, drawn_ENK.shape[-1])
    if runner.prepare_steps([batch_size]):
        for slot in active_slots:
            slot.load()
    results: list[JobResult] = []
    while active_slots:
        _run_full_batches(workspace, schedule, active_slots, runner.steps[batch_size])
        for slot in [slot for slot in active_slots if slot.at_epoch_end]:
            slot.finish_epoch()
            if not slot.is_finished:
                continue
            results.append(slot.result())
            active_slots.remove(slot)
            if waiting:
                active_slots.append(StackSlot(workspace, slot.index, waiting.popleft()))
    return results


def _run_full_batches(
    workspace: StepWorkspace,
    schedule: BatchSchedule,
    active_slots: Sequence[StackSlot],
    step: Callable[[], None],
) -> None:
    """Run full batches of all slots until the first one reaches the end of its epoch."""
    num_steps = min(slot.full_batches - slot.batches_done for slot in active_slots)
    # an empty slot starts at 0 and trains too, but nobody reads its result
    steps_done = [0] * (workspace.stack_size or 1)
    for slot in active_slots:
        steps_done[slot.index] = slot.epoch * slot.steps_per_epoch + slot.batches_done
        slot.load_schedule(schedule, num_steps)
        slot.batches_done += num_steps
    workspace.tensors.step.copy_(torch.tensor(steps_done))
    schedule.cursor.zero_()
    for _ in range(num_steps):
        step()
