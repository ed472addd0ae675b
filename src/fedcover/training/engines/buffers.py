"""Lanes: room for clients of one shape, in which one client or a crew trains at a time and others follow.

The tensors of a lane stay where they are from round to round, so that whatever was prepared for its steps (a compiled
function, a captured CUDA graph) serves every client that comes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from fedcover.errors import TrainingDiverged
from fedcover.models.norms import statistics_key
from fedcover.tensors import FlatParams, unflatten
from fedcover.training.engines import stacked_layers
from fedcover.training.engines.sgd_step import (
    BatchSchedule,
    FunctionalForward,
    SGDStep,
    StepTensors,
    TreeSpec,
    UnsupportedByEngine,
    observes_gradients,
    tree_leaves,
    tree_map,
    tree_spec,
)
from fedcover.training.engines.stacked_layers import from_taps, to_taps
from fedcover.training.local_sgd import (
    build_update,
    check_divergence,
    client_module,
    draw_row_order,
)
from fedcover.types import Assignment, Carry, LocalTraining, Params, Recipe, Shard, Update


@dataclass(frozen=True, slots=True, eq=False)
class ClientJob:
    """A client's work in a round and its learning rate; jobs of one `family`, of the same modules, may share lanes."""

    assignment: Assignment
    lr: float
    family: object = None


JobResult = tuple[ClientJob, Update | TrainingDiverged]
"""What comes of a job."""


@dataclass(frozen=True, slots=True)
class StepSignature:
    """What clients must have in common to take turns in a lane: what a step does, and the sizes of its tensors."""

    family: object
    recipe: Recipe
    local: LocalTraining
    param_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    masked: tuple[str, ...]
    carry_spec: TreeSpec
    sample: tuple[int, ...]
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class ClientInputs:
    """A client on its way into a lane: its part of the model, what its recipe remembers, and its samples."""

    job: ClientJob
    params: Params
    masks: Mapping[str, Tensor]
    carry: Carry
    shard: Shard

    @property
    def rows(self) -> int:
        """How many samples the client has."""
        return len(self.shard.index)

    def row_orders(self) -> tuple[Tensor, Tensor]:
        """The order of the client's rows in each epoch, and what is drawn to augment them, in that order."""
        a = self.job.assignment
        made = [draw_row_order(a, self.rows, epoch) for epoch in range(a.task.local.epochs)]
        return torch.stack([order for order, _ in made]), torch.stack(
            [drawn[order] for order, drawn in made]
        )

    def signature(self, rows: int) -> StepSignature:
        """The shape of the lane that this client needs, with room for so many rows."""
        task = self.job.assignment.task
        return StepSignature(
            family=self.job.family,
            recipe=task.recipe,
            local=task.local,
            param_shapes=tuple((name, tuple(p.shape)) for name, p in self.params.items()),
            masked=tuple(self.masks),
            carry_spec=tree_spec(self.carry),
            sample=tuple(self.shard.samples.x.shape[1:]),
            rows=rows,
            dtype=next(iter(self.params.values())).dtype,
        )


def client_inputs(jobs: Iterable[ClientJob]) -> Iterator[ClientInputs]:
    """What clients bring along; those with the same part of the same model share its tensors."""
    cut: dict[tuple[int, int], Params] = {}
    for job in jobs:
        a = job.assignment
        key = id(a.state), id(a.reduction)
        if key not in cut:
            cut[key] = a.reduction.extract(a.state.params)
        carry = a.task.recipe.start(a, dict(cut[key]))
        yield ClientInputs(
            job, cut[key], a.reduction.gradient_mask(), carry, a.task.source.shard(a.client.id)
        )


@dataclass(slots=True, eq=False)
class StepBuffers:
    """Where clients of one shape train; `crew` says how many at once, None that they come alone and unstacked.

    The parameters of a lone client lie side by side in its `flat_params`.
    """

    signature: StepSignature
    stack_size: int | None
    module: nn.Module
    step: SGDStep
    tensors: StepTensors
    flat_params: Tensor | None
    schedules: dict[int, BatchSchedule] = field(default_factory=dict)
    clients: Sequence[ClientInputs] = ()

    def load(self, clients: Sequence[ClientInputs]) -> None:
        """Let clients in, in the place of those who were here before."""
        self.clients = clients
        tensors = self.tensors
        self._load_params([client.params for client in clients])
        torch._foreach_zero_(list(tensors.velocity.values()))
        for name, room in tensors.masks.items():
            self._copy_values(room, [client.masks[name] for client in clients])
        for place, room in enumerate(tree_leaves(tensors.carry)):
            self._copy_values(room, [tree_leaves(client.carry)[place] for client in clients])
        tensors.lr.fill_(clients[0].job.lr)
        self._load_buffers(clients)
        self._load_samples(clients)
        tensors.step.zero_()
        self._load_schedules(clients)

    def _load_params(self, given: Sequence[Params]) -> None:
        slabs = [params for params in given if isinstance(params, FlatParams)]
        if not self.stack_size or len(slabs) < len(given):
            for name, room in self.tensors.params.items():
                self._copy_values(room, [params[name] for params in given])
            return
        same = all(flat_params is slabs[0] for flat_params in slabs)
        flat_CP = (
            slabs[0].flat.expand(len(slabs), -1)
            if same
            else torch.stack([flat_params.flat for flat_params in slabs])
        )
        values = unflatten(flat_CP, self.signature.param_shapes)
        torch._foreach_copy_(
            list(self.tensors.params.values()), [values[name] for name in self.tensors.params]
        )

    def _copy_values(self, room: Tensor, values: Sequence[Tensor]) -> None:
        if self.stack_size and any(value is not values[0] for value in values):
            room.copy_(torch.stack([value.to(room.device) for value in values]))
        else:  # also where a crew begins with the same values
            room.copy_(values[0])

    def _load_buffers(self, clients: Sequence[ClientInputs]) -> None:
        """Running statistics and frozen weights are each client's own."""
        rooms = self.tensors.buffers if self.stack_size else dict(self.module.named_buffers())
        if rooms:
            own = [client_buffers(client.job.assignment) for client in clients]
            for name, room in rooms.items():
                self._copy_values(room, [buffers[name] for buffers in own])

    def _load_samples(self, clients: Sequence[ClientInputs]) -> None:
        rows = clients[0].rows
        for room, kind in ((self.tensors.x, "x"), (self.tensors.y, "y")):
            samples = [getattr(client.shard.samples, kind) for client in clients]
            if self.stack_size and len({id(each) for each in samples}) == 1:  # all in one go
                torch.index_select(
                    samples[0],
                    0,
                    torch.cat([c.shard.index for c in clients]).to(room.device),
                    out=room.view(-1, *room.shape[2:]),
                )
                continue
            values = [
                each[client.shard.index] for each, client in zip(samples, clients, strict=True)
            ]
            self._copy_values(room if self.stack_size else room[:rows], values)

    def _load_schedules(self, clients: Sequence[ClientInputs]) -> None:
        batch, rows = self.signature.local.batch_size, clients[0].rows
        plans: dict[
            tuple[int, int, int], tuple[Tensor, Tensor]
        ] = {}  # runs of one seed draw the same
        for key, client in zip(
            keys := [_shuffle_key(c.job.assignment) for c in clients], clients, strict=True
        ):
            if key not in plans:
                plans[key] = client.row_orders()
        order_CEN, drawn_CENK = (torch.stack([plans[key][kind] for key in keys]) for kind in (0, 1))
        full = rows // batch * batch
        for size, part in ((batch, slice(0, full)), (rows - full, slice(full, rows))):
            if part.start < part.stop:
                self._load_schedule(size, order_CEN[:, :, part], drawn_CENK[:, :, part])

    def _load_schedule(self, size: int, order_CEN: Tensor, drawn_CENK: Tensor) -> None:
        """The steps of one batch size: epoch after epoch, a crew side by side."""
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
        """Room for the steps of one batch size, with so many numbers drawn for each row."""
        if size not in self.schedules:
            local, each = self.signature.local, (self.stack_size,) if self.stack_size else ()
            most = local.epochs * (self.signature.rows // size if size == local.batch_size else 1)
            empty = torch.zeros(1, dtype=torch.int64, device=self.tensors.step.device)
            self.schedules[size] = BatchSchedule(
                empty.new_zeros((most, *each, size)),
                empty.new_zeros((most, *each, size, draws)),
                cursor=empty,
            )
        return self.schedules[size]

    def rewind(self, size: int) -> None:
        """Back to the first step of some batch size."""
        self.schedules[size].cursor.zero_()
        self.tensors.step.zero_()

    def batch_sizes(self) -> list[int]:
        """The batch sizes of the steps that the clients in the lane make, in order."""
        rows, local = self.clients[0].rows, self.signature.local
        rest = rows % local.batch_size
        return (
            [local.batch_size] * (rows // local.batch_size) + [rest] * (rest > 0)
        ) * local.epochs

    def results(self) -> Iterator[JobResult]:
        """What comes of the clients in the lane."""
        steps = len(self.batch_sizes())
        losses = (
            self.tensors.losses_T[steps - steps // self.signature.local.epochs : steps]
            .mean(0)
            .view(-1)
            .tolist()
        )
        if self.flat_params is None:
            flat_CP = torch.cat(
                [p.reshape(len(p), p[0].numel()) for p in self.tensors.params.values()], 1
            )
        else:
            flat_CP = self.flat_params[None].clone()
        finite = (
            torch.stack(torch.aminmax(flat_CP, dim=1)).isfinite().all(0).tolist()
        )  # no copy, NaN comes through
        carry = tree_map(torch.clone, self.tensors.carry)
        for place, client in enumerate(self.clients):
            kept = (self._client_slice(tree, place) for tree in (carry, self.tensors.buffers))
            yield self.result(client, flat_CP[place], finite[place], losses[place], *kept)

    def result(
        self,
        client: ClientInputs,
        flat_P: Tensor,
        finite: bool,
        loss: float,
        carry: Carry,
        buffers: Params,
    ) -> JobResult:
        """What comes of one client: of its trained parameters, side by side, and whatever else is its own."""
        a = client.job.assignment
        try:
            check_divergence(a, finite, loss, client.job.lr)
        except TrainingDiverged as error:  # others here may belong to another run
            return client.job, error
        last = self.step.channels_last
        own = (
            unflatten(flat_P, self.signature.param_shapes, last)
            if last
            else FlatParams(flat_P, self.signature.param_shapes)
        )

        def forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return self.step.functional_forward(buffers, values, x)

        outcome = a.task.recipe.finish(a, forward, dict(own), carry)
        if outcome.params.keys() == own.keys() and all(
            outcome.params[name] is own[name] for name in own
        ):
            outcome = replace(outcome, params=own)  # still side by side
        return client.job, build_update(a, self.module, outcome, loss)

    def _client_slice(self, tree: Carry, place: int) -> Carry:
        return tree_map(lambda stacked: stacked[place], tree) if self.stack_size else tree


def _shuffle_key(assignment: Assignment) -> tuple[int, int, int]:
    """What the order of a client's rows depends on, among clients of one shape."""
    return assignment.task.seed, assignment.state.round, assignment.client.id


def client_buffers(assignment: Assignment) -> Params:
    """A client's part of what a model keeps beside its parameters."""
    task, state = assignment.task, assignment.state
    key = statistics_key(task.norm, assignment.client.capacity)
    known = state.statistics.get(key, {}) if key else {}
    return assignment.reduction.extract({**dict(task.model.module.named_buffers()), **known})


def allocate_buffers(
    signature: StepSignature, like: ClientInputs, stack_size: int | None, *, bf16: bool, fused: bool
) -> StepBuffers:
    """An empty lane for clients of a shape, on the device of one of them."""
    module = client_module(like.job.assignment)
    lead = () if stack_size is None else (stack_size,)
    device = next(iter(like.params.values())).device
    # NVIDIA's convolutions want channels last, and would else turn every tensor round, every time
    last = stack_size is None and device.type == "cuda" and len(signature.sample) == 3

    def room(*sizes: int, dtype: torch.dtype = signature.dtype) -> Tensor:
        return torch.zeros((*lead, *sizes), dtype=dtype, device=device)

    own = stack_size is not None and stacked_layers.uses_stacked_kernels(
        module, device, signature.dtype
    )

    def param_tensors() -> tuple[Params, Tensor | None]:
        if stack_size is not None:
            return {
                name: _kernel_layout(room(*size), own) for name, size in signature.param_shapes
            }, None
        flat_params = room(sum(prod(size) for _, size in signature.param_shapes))
        return unflatten(flat_params, signature.param_shapes, last), flat_params

    def empty_carry() -> Carry:
        return tree_map(lambda leaf: room(*leaf.shape, dtype=leaf.dtype), like.carry)

    params, flat_params = param_tensors()
    tensors = StepTensors(
        params=params,
        velocity=param_tensors()[0],
        masks={name: torch.zeros_like(params[name]) for name in signature.masked},
        buffers={name: room(*b.shape, dtype=b.dtype) for name, b in module.named_buffers()}
        if stack_size
        else {},
        carry=empty_carry(),
        observed=empty_carry() if observes_gradients(signature.recipe) else (),
        x=room(signature.rows, *like.shard.samples.x.shape[1:], dtype=like.shard.samples.x.dtype),
        y=room(signature.rows, *like.shard.samples.y.shape[1:], dtype=like.shard.samples.y.dtype),
        lr=torch.zeros((), dtype=signature.dtype, device=device),
        step=room(dtype=torch.int64),
        losses_T=room(signature.local.epochs * -(-signature.rows // signature.local.batch_size))
        .movedim(-1, 0)
        .contiguous(),
    )
    step = SGDStep(
        signature.recipe, signature.local, _functional_forward(module), stack_size is not None, last, fused=fused,
        bf16=bf16 and stack_size is not None, cast_params=_autocast_params(module) if bf16 and stack_size is None else (),
        stacked_kernels=own,
    )  # fmt: skip
    return StepBuffers(signature, stack_size, module, step, tensors, flat_params)


def _kernel_layout(room: Tensor, own: bool) -> Tensor:
    """Weights of convolutions as our own kernels take them; logically the same."""
    return from_taps(to_taps(room).contiguous()) if own and room.ndim == 5 else room


def _autocast_params(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module's products and convolutions, which autocast turns into bf16."""
    layers = [
        (path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, _ConvNd))
    ]
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, layer in layers
        for name, _ in layer.named_parameters(recurse=False)
    )


def _functional_forward(module: nn.Module) -> FunctionalForward:
    def functional_forward(
        buffers: Mapping[str, Tensor], values: Mapping[str, Tensor], x: Tensor
    ) -> Tensor:
        given = {**buffers, **values}
        logits: Tensor = functional_call(module, given, (x,))
        if any(
            given[name] is not tensor for name, tensor in buffers.items()
        ):  # where torch leaves what it finds after
            raise UnsupportedByEngine(
                "the model puts new tensors in the place of its buffers, which a step in place would miss"
            )
        return logits

    return functional_forward
