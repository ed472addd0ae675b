"""Preallocated step tensors: copy clients in, read their results out.

The tensors outlive a round. What was prepared for them (a compiled function, a captured CUDA
graph) then trains every later client with the same signature.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedcover.errors import TrainingDiverged
from fedcover.tensors import FlatParams, tree_map, tree_map_, unflatten
from fedcover.training.engines.client_inputs import (
    ClientInputs,
    JobResult,
    StepSignature,
    client_buffers,
)
from fedcover.training.engines.sgd_step import SGDStep
from fedcover.training.engines.step_tensors import BatchSchedule, StepTensors
from fedcover.training.local_sgd import build_update, check_divergence
from fedcover.types import Carry, Outcome, Params


@dataclass(slots=True, eq=False)
class StepWorkspace:
    """Step tensors for clients of one signature, and the step that trains on them.

    Attributes:
        signature: What the clients have in common.
        stack_size: How many clients train at once; None for one unstacked client.
        module: The sub-model.
        step: The training step.
        tensors: Where the step reads and writes.
        flat_params: The parameters of an unstacked client as one tensor; None for a stack.
        schedules: The batch schedule of each batch size.
        clients: The clients that are loaded.
    """

    signature: StepSignature
    stack_size: int | None
    module: nn.Module
    step: SGDStep
    tensors: StepTensors
    flat_params: Tensor | None
    schedules: dict[int, BatchSchedule] = field(default_factory=dict)
    clients: Sequence[ClientInputs] = ()

    # ── copying clients in ──────────────────────────────────────────────────────────────────────

    def load(self, clients: Sequence[ClientInputs]) -> None:
        """Replace the loaded clients by others of the same signature."""
        self.clients = clients
        tensors = self.tensors
        self._load_params([client.params for client in clients])
        torch._foreach_zero_(list(tensors.velocity.values()))
        for name, mask in tensors.masks.items():
            self._copy_values(mask, [client.masks[name] for client in clients])
        tree_map_(
            lambda target, *values: self._copy_values(target, values),
            tensors.carry,
            *[client.carry for client in clients],
        )
        tensors.lr.fill_(clients[0].job.lr)
        self._load_buffers(clients)
        self._load_samples(clients)
        tensors.step.zero_()
        self._load_schedules(clients)

    def _load_params(self, params_by_client: Sequence[Params]) -> None:
        flat_by_client = [
            params.flat for params in params_by_client if isinstance(params, FlatParams)
        ]
        if not self.stack_size or len(flat_by_client) < len(params_by_client):
            for name, target in self.tensors.params.items():
                self._copy_values(target, [params[name] for params in params_by_client])
            return
        if all(flat is flat_by_client[0] for flat in flat_by_client):
            flat_CP = flat_by_client[0].expand(len(flat_by_client), -1)
        else:
            flat_CP = torch.stack(flat_by_client)
        source = unflatten(flat_CP, self.signature.param_shapes)
        targets = list(self.tensors.params.values())
        torch._foreach_copy_(targets, [source[name] for name in self.tensors.params])

    def _copy_values(self, target: Tensor, values: Sequence[Tensor]) -> None:
        if self.stack_size and any(value is not values[0] for value in values):
            target.copy_(torch.stack([value.to(target.device) for value in values]))
        else:  # broadcasts if stacked clients share the value
            target.copy_(values[0])

    def _load_buffers(self, clients: Sequence[ClientInputs]) -> None:
        """Copy each client's own running statistics and frozen weights."""
        targets = self.tensors.buffers if self.stack_size else dict(self.module.named_buffers())
        if not targets:
            return
        buffers_by_client = [client_buffers(client.job.assignment) for client in clients]
        for name, target in targets.items():
            self._copy_values(target, [buffers[name] for buffers in buffers_by_client])

    def _load_samples(self, clients: Sequence[ClientInputs]) -> None:
        samples = [client.shard.samples for client in clients]
        self._load_rows(self.tensors.x, [sample.x for sample in samples], clients)
        self._load_rows(self.tensors.y, [sample.y for sample in samples], clients)

    def _load_rows(
        self, target: Tensor, sources: Sequence[Tensor], clients: Sequence[ClientInputs]
    ) -> None:
        """Copy each client's rows of its source."""
        indices = [client.shard.index for client in clients]
        shared = all(source is sources[0] for source in sources)
        if self.stack_size and shared:
            index = torch.cat(indices).to(target.device)
            flat_target = target.view(-1, *target.shape[2:])
            torch.index_select(sources[0], 0, index, out=flat_target)
            return
        rows = [source[index] for source, index in zip(sources, indices, strict=True)]
        self._copy_values(target if self.stack_size else target[: clients[0].rows], rows)

    def _load_schedules(self, clients: Sequence[ClientInputs]) -> None:
        """Copy the row orders: full batches in one schedule, the remainder in another."""
        row_orders: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        for client in clients:
            if client.shuffle_key not in row_orders:  # runs with one seed draw the same order
                row_orders[client.shuffle_key] = client.row_orders()
        orders = [row_orders[client.shuffle_key] for client in clients]
        order_CEN = torch.stack([order_EN for order_EN, _ in orders])
        drawn_CENK = torch.stack([drawn_ENK for _, drawn_ENK in orders])
        batch_size, rows = self.signature.local.batch_size, clients[0].rows
        full = rows // batch_size * batch_size
        if full:
            self._load_schedule(batch_size, order_CEN[:, :, :full], drawn_CENK[:, :, :full])
        if full < rows:
            self._load_schedule(rows - full, order_CEN[:, :, full:], drawn_CENK[:, :, full:])

    def _load_schedule(self, size: int, order_CEN: Tensor, drawn_CENK: Tensor) -> None:
        """Copy the steps of one batch size: the epochs in sequence, the clients side by side."""
        clients, epochs, rows = order_CEN.shape
        steps = epochs * (rows // size)
        rows_TCB = order_CEN.reshape(clients, steps, size).transpose(0, 1)
        drawn_TCBK = drawn_CENK.reshape(clients, steps, size, -1).transpose(0, 1)
        if not self.stack_size:
            rows_TCB, drawn_TCBK = rows_TCB[:, 0], drawn_TCBK[:, 0]
        schedule = self.schedule(size, drawn_TCBK.shape[-1])
        schedule.rows_TB[:steps].copy_(rows_TCB)
        schedule.drawn_TBK[:steps].copy_(drawn_TCBK)
        schedule.cursor.zero_()

    def schedule(self, size: int, draws: int) -> BatchSchedule:
        """Return the schedule of a batch size; allocate it with `draws` random numbers a row."""
        if size in self.schedules:
            return self.schedules[size]
        local = self.signature.local
        steps_per_epoch = self.signature.rows // size if size == local.batch_size else 1
        max_steps = local.epochs * steps_per_epoch
        clients = (self.stack_size,) if self.stack_size else ()
        cursor = torch.zeros(1, dtype=torch.int64, device=self.tensors.step.device)
        self.schedules[size] = BatchSchedule(
            rows_TB=cursor.new_zeros((max_steps, *clients, size)),
            drawn_TBK=cursor.new_zeros((max_steps, *clients, size, draws)),
            cursor=cursor,
        )
        return self.schedules[size]

    def rewind(self, size: int) -> None:
        """Go back to the first step of a batch size."""
        self.schedules[size].cursor.zero_()
        self.tensors.step.zero_()

    def batch_sizes(self) -> list[int]:
        """Return the batch size of each step that the loaded clients take."""
        rows, local = self.clients[0].rows, self.signature.local
        full_batches, remainder = divmod(rows, local.batch_size)
        epoch = [local.batch_size] * full_batches
        if remainder:
            epoch.append(remainder)
        return epoch * local.epochs

    # ── reading results out ─────────────────────────────────────────────────────────────────────

    def results(self) -> Iterator[JobResult]:
        """Yield the result of each loaded client."""
        losses = self._last_epoch_losses()
        flat_CP = self._copy_flat_params()
        # looking at the extremes copies nothing, and NaN passes through
        extremes = torch.stack(torch.aminmax(flat_CP, dim=1))
        finite = extremes.isfinite().all(0).tolist()
        carry = tree_map(torch.clone, self.tensors.carry)
        for index, client in enumerate(self.clients):
            client_carry = self._client_slice(carry, index)
            buffers = self._client_slice(self.tensors.buffers, index)
            yield self.result(
                client, flat_CP[index], finite[index], losses[index], client_carry, buffers
            )

    def _last_epoch_losses(self) -> list[float]:
        """Return each client's mean loss over the last epoch."""
        steps = len(self.batch_sizes())
        first = steps - steps // self.signature.local.epochs
        losses: list[float] = self.tensors.losses_T[first:steps].mean(0).view(-1).tolist()
        return losses

    def _copy_flat_params(self) -> Tensor:
        """Return a copy of the trained parameters, one row for each client."""
        if self.flat_params is not None:
            return self.flat_params[None].clone()
        params = self.tensors.params.values()
        return torch.cat([p.reshape(len(p), p[0].numel()) for p in params], 1)

    def _client_slice(self, tree: Carry, index: int) -> Carry:
        return tree_map(lambda stacked: stacked[index], tree) if self.stack_size else tree

    def result(
        self,
        client: ClientInputs,
        flat_P: Tensor,
        finite: bool,
        loss: float,
        carry: Carry,
        buffers: Params,
    ) -> JobResult:
        """Build the result of one client.

        Args:
            client: The client.
            flat_P: Its trained parameters, flattened and concatenated.
            finite: Whether all of them are finite.
            loss: The mean loss of the last epoch.
            carry: What the recipe remembers.
            buffers: The client's buffers.

        Returns:
            The job with its update. If training diverged, the error takes the update's place,
            because the other clients here may belong to other runs.
        """
        assignment = client.job.assignment
        try:
            check_divergence(assignment, finite, loss, client.job.lr)
        except TrainingDiverged as error:
            return client.job, error
        params = self._unflatten(flat_P)

        def forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return self.step.functional_forward(buffers, values, x)

        outcome = assignment.task.recipe.finish(assignment, forward, dict(params), carry)
        if _has_params(outcome, params):
            outcome = replace(outcome, params=params)  # keeps `FlatParams`, if they are
        return client.job, build_update(assignment, self.module, outcome, loss)

    def _unflatten(self, flat_P: Tensor) -> Params:
        shapes = self.signature.param_shapes
        if self.step.channels_last:
            return unflatten(flat_P, shapes, channels_last=True)
        return FlatParams(flat_P, shapes)


def _has_params(outcome: Outcome, params: Params) -> bool:
    """Return whether an outcome holds exactly these tensors."""
    if outcome.params.keys() != params.keys():
        return False
    return all(outcome.params[name] is params[name] for name in params)
