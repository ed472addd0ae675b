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
from fedcover.tensors import Slab, views
from fedcover.training.engines import stacked_layers
from fedcover.training.engines.sgd_step import (
    Form,
    Slots,
    Step,
    Track,
    Unfit,
    Whole,
    form_of,
    leaves_of,
    map_trees,
    observes,
)
from fedcover.training.engines.stacked_layers import from_taps, taps
from fedcover.training.local_sgd import client_module, order_of_rows, refuse_divergence, update_of
from fedcover.types import Assignment, Carry, LocalTraining, Params, Recipe, Shard, Update


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A client's work in a round and its learning rate; jobs of one `family`, of the same modules, may share lanes."""

    assignment: Assignment
    lr: float
    family: object = None


Answer = tuple[Job, Update | TrainingDiverged]
"""What comes of a job."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What clients must have in common to take turns in a lane: what a step does, and the sizes of its tensors."""

    family: object
    recipe: Recipe
    local: LocalTraining
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    masked: tuple[str, ...]
    memory: Form
    sample: tuple[int, ...]
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A client on its way into a lane: its part of the model, what its recipe remembers, and its samples."""

    job: Job
    params: Params
    masks: Mapping[str, Tensor]
    carry: Carry
    shard: Shard

    @property
    def rows(self) -> int:
        """How many samples the client has."""
        return len(self.shard.index)

    def orders(self) -> tuple[Tensor, Tensor]:
        """The order of the client's rows in each epoch, and what is drawn to augment them, in that order."""
        a = self.job.assignment
        made = [order_of_rows(a, self.rows, epoch) for epoch in range(a.task.local.epochs)]
        return torch.stack([order for order, _ in made]), torch.stack([drawn[order] for order, drawn in made])

    def shape(self, rows: int) -> Shape:
        """The shape of the lane that this client needs, with room for so many rows."""
        task = self.job.assignment.task
        return Shape(
            family=self.job.family,
            recipe=task.recipe,
            local=task.local,
            tensors=tuple((name, tuple(p.shape)) for name, p in self.params.items()),
            masked=tuple(self.masks),
            memory=form_of(self.carry),
            sample=tuple(self.shard.samples.x.shape[1:]),
            rows=rows,
            dtype=next(iter(self.params.values())).dtype,
        )


def arrivals(jobs: Iterable[Job]) -> Iterator[Arrival]:
    """What clients bring along; those with the same part of the same model share its tensors."""
    cut: dict[tuple[int, int], Params] = {}
    for job in jobs:
        a = job.assignment
        key = id(a.state), id(a.reduction)
        if key not in cut:
            cut[key] = a.reduction.extract(a.state.params)
        carry = a.task.recipe.start(a, dict(cut[key]))
        yield Arrival(job, cut[key], a.reduction.gradient_mask(), carry, a.task.source.shard(a.client.id))


@dataclass(slots=True, eq=False)
class Lane:
    """Where clients of one shape train; `crew` says how many at once, None that they come alone and unstacked.

    The parameters of a lone client lie side by side in its `slab`.
    """

    shape: Shape
    crew: int | None
    module: nn.Module
    step: Step
    slots: Slots
    slab: Tensor | None
    tracks: dict[int, Track] = field(default_factory=dict)
    clients: Sequence[Arrival] = ()

    def load(self, clients: Sequence[Arrival]) -> None:
        """Let clients in, in the place of those who were here before."""
        self.clients = clients
        slots = self.slots
        self._load_params([client.params for client in clients])
        torch._foreach_zero_(list(slots.velocity.values()))
        for name, room in slots.masks.items():
            self._put(room, [client.masks[name] for client in clients])
        for place, room in enumerate(leaves_of(slots.carry)):
            self._put(room, [leaves_of(client.carry)[place] for client in clients])
        slots.rate.fill_(clients[0].job.lr)
        self._load_buffers(clients)
        self._load_samples(clients)
        slots.step.zero_()
        self._load_rows(clients)

    def _load_params(self, given: Sequence[Params]) -> None:
        slabs = [params for params in given if isinstance(params, Slab)]
        if not self.crew or len(slabs) < len(given):
            for name, room in self.slots.params.items():
                self._put(room, [params[name] for params in given])
            return
        same = all(slab is slabs[0] for slab in slabs)
        flat_CP = slabs[0].flat.expand(len(slabs), -1) if same else torch.stack([slab.flat for slab in slabs])
        values = views(flat_CP, self.shape.tensors)
        torch._foreach_copy_(list(self.slots.params.values()), [values[name] for name in self.slots.params])

    def _put(self, room: Tensor, values: Sequence[Tensor]) -> None:
        if self.crew and any(value is not values[0] for value in values):
            room.copy_(torch.stack([value.to(room.device) for value in values]))
        else:  # also where a crew begins with the same values
            room.copy_(values[0])

    def _load_buffers(self, clients: Sequence[Arrival]) -> None:
        """Running statistics and frozen weights are each client's own."""
        rooms = self.slots.buffers if self.crew else dict(self.module.named_buffers())
        if rooms:
            own = [client_buffers(client.job.assignment) for client in clients]
            for name, room in rooms.items():
                self._put(room, [buffers[name] for buffers in own])

    def _load_samples(self, clients: Sequence[Arrival]) -> None:
        rows = clients[0].rows
        for room, kind in ((self.slots.x, "x"), (self.slots.y, "y")):
            samples = [getattr(client.shard.samples, kind) for client in clients]
            if self.crew and len({id(each) for each in samples}) == 1:  # all in one go
                torch.index_select(
                    samples[0],
                    0,
                    torch.cat([c.shard.index for c in clients]).to(room.device),
                    out=room.view(-1, *room.shape[2:]),
                )
                continue
            values = [each[client.shard.index] for each, client in zip(samples, clients, strict=True)]
            self._put(room if self.crew else room[:rows], values)

    def _load_rows(self, clients: Sequence[Arrival]) -> None:
        batch, rows = self.shape.local.batch_size, clients[0].rows
        plans: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # runs of one seed draw the same
        for key, client in zip(keys := [_draws(c.job.assignment) for c in clients], clients, strict=True):
            if key not in plans:
                plans[key] = client.orders()
        order_CEN, drawn_CENK = (torch.stack([plans[key][kind] for key in keys]) for kind in (0, 1))
        full = rows // batch * batch
        for size, part in ((batch, slice(0, full)), (rows - full, slice(full, rows))):
            if part.start < part.stop:
                self._load_track(size, order_CEN[:, :, part], drawn_CENK[:, :, part])

    def _load_track(self, size: int, order_CEN: Tensor, drawn_CENK: Tensor) -> None:
        """The steps of one batch size: epoch after epoch, a crew side by side."""
        clients, epochs, rows = order_CEN.shape
        steps = epochs * (rows // size)
        rows_TCB = order_CEN.reshape(clients, steps, size).transpose(0, 1)
        drawn_TCBK = drawn_CENK.reshape(clients, steps, size, -1).transpose(0, 1)
        if not self.crew:
            rows_TCB, drawn_TCBK = rows_TCB[:, 0], drawn_TCBK[:, 0]
        track = self.track(size, drawn_TCBK.shape[-1])
        track.rows_TB[:steps].copy_(rows_TCB)
        track.drawn_TBK[:steps].copy_(drawn_TCBK)
        track.cursor.zero_()

    def track(self, size: int, draws: int) -> Track:
        """Room for the steps of one batch size, with so many numbers drawn for each row."""
        if size not in self.tracks:
            local, each = self.shape.local, (self.crew,) if self.crew else ()
            most = local.epochs * (self.shape.rows // size if size == local.batch_size else 1)
            empty = torch.zeros(1, dtype=torch.int64, device=self.slots.step.device)
            self.tracks[size] = Track(
                empty.new_zeros((most, *each, size)), empty.new_zeros((most, *each, size, draws)), cursor=empty
            )
        return self.tracks[size]

    def rewind(self, size: int) -> None:
        """Back to the first step of some batch size."""
        self.tracks[size].cursor.zero_()
        self.slots.step.zero_()

    def batches(self) -> list[int]:
        """The batch sizes of the steps that the clients in the lane make, in order."""
        rows, local = self.clients[0].rows, self.shape.local
        rest = rows % local.batch_size
        return ([local.batch_size] * (rows // local.batch_size) + [rest] * (rest > 0)) * local.epochs

    def answers(self) -> Iterator[Answer]:
        """What comes of the clients in the lane."""
        steps = len(self.batches())
        losses = self.slots.losses_T[steps - steps // self.shape.local.epochs : steps].mean(0).view(-1).tolist()
        if self.slab is None:
            flat_CP = torch.cat([p.reshape(len(p), p[0].numel()) for p in self.slots.params.values()], 1)
        else:
            flat_CP = self.slab[None].clone()
        whole = torch.stack(torch.aminmax(flat_CP, dim=1)).isfinite().all(0).tolist()  # no copy, NaN comes through
        carry = map_trees(torch.clone, self.slots.carry)
        for place, client in enumerate(self.clients):
            kept = (self._own(tree, place) for tree in (carry, self.slots.buffers))
            yield self.answer(client, flat_CP[place], whole[place], losses[place], *kept)

    def answer(
        self, client: Arrival, flat_P: Tensor, whole: bool, loss: float, memory: Carry, buffers: Params
    ) -> Answer:
        """What comes of one client: of its trained parameters, side by side, and whatever else is its own."""
        a = client.job.assignment
        try:
            refuse_divergence(a, whole, loss, client.job.lr)
        except TrainingDiverged as error:  # others here may belong to another run
            return client.job, error
        last = self.step.channels_last
        own = views(flat_P, self.shape.tensors, last) if last else Slab(flat_P, self.shape.tensors)

        def forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return self.step.whole(buffers, values, x)

        outcome = a.task.recipe.finish(a, forward, dict(own), memory)
        if outcome.params.keys() == own.keys() and all(outcome.params[name] is own[name] for name in own):
            outcome = replace(outcome, params=own)  # still side by side
        return client.job, update_of(a, self.module, outcome, loss)

    def _own(self, tree: Carry, place: int) -> Carry:
        return map_trees(lambda stacked: stacked[place], tree) if self.crew else tree


def _draws(assignment: Assignment) -> tuple[int, int, int]:
    """What the order of a client's rows depends on, among clients of one shape."""
    return assignment.task.seed, assignment.state.round, assignment.client.id


def client_buffers(assignment: Assignment) -> Params:
    """A client's part of what a model keeps beside its parameters."""
    task, state = assignment.task, assignment.state
    key = statistics_key(task.norm, assignment.client.capacity)
    known = state.statistics.get(key, {}) if key else {}
    return assignment.reduction.extract({**dict(task.model.module.named_buffers()), **known})


def new_lane(shape: Shape, like: Arrival, crew: int | None, *, half: bool, fused: bool) -> Lane:
    """An empty lane for clients of a shape, on the device of one of them."""
    module = client_module(like.job.assignment)
    lead = () if crew is None else (crew,)
    device = next(iter(like.params.values())).device
    # NVIDIA's convolutions want channels last, and would else turn every tensor round, every time
    last = crew is None and device.type == "cuda" and len(shape.sample) == 3

    def room(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.zeros((*lead, *sizes), dtype=dtype, device=device)

    own = crew is not None and stacked_layers.serve(module, device, shape.dtype)

    def tensors() -> tuple[Params, Tensor | None]:
        if crew is not None:
            return {name: _laid_out(room(*size), own) for name, size in shape.tensors}, None
        slab = room(sum(prod(size) for _, size in shape.tensors))
        return views(slab, shape.tensors, last), slab

    def memory() -> Carry:
        return map_trees(lambda leaf: room(*leaf.shape, dtype=leaf.dtype), like.carry)

    params, slab = tensors()
    slots = Slots(
        params=params,
        velocity=tensors()[0],
        masks={name: torch.zeros_like(params[name]) for name in shape.masked},
        buffers={name: room(*b.shape, dtype=b.dtype) for name, b in module.named_buffers()} if crew else {},
        carry=memory(),
        observed=memory() if observes(shape.recipe) else (),
        x=room(shape.rows, *like.shard.samples.x.shape[1:], dtype=like.shard.samples.x.dtype),
        y=room(shape.rows, *like.shard.samples.y.shape[1:], dtype=like.shard.samples.y.dtype),
        rate=torch.zeros((), dtype=shape.dtype, device=device),
        step=room(dtype=torch.int64),
        losses_T=room(shape.local.epochs * -(-shape.rows // shape.local.batch_size)).movedim(-1, 0).contiguous(),
    )
    step = Step(
        shape.recipe, shape.local, _whole(module), crew is not None, last, fused=fused,
        half=half and crew is not None, in_one_go=_products(module) if half and crew is None else (),
        own_layers=own,
    )  # fmt: skip
    return Lane(shape, crew, module, step, slots, slab)


def _laid_out(room: Tensor, own: bool) -> Tensor:
    """Weights of convolutions as our own kernels take them; logically the same."""
    return from_taps(taps(room).contiguous()) if own and room.ndim == 5 else room


def _products(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module's products and convolutions, which autocast turns into bf16."""
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, _ConvNd))]
    return tuple(
        f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_parameters(recurse=False)
    )


def _whole(module: nn.Module) -> Whole:
    def whole(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        given = {**buffers, **values}
        logits: Tensor = functional_call(module, given, (x,))
        if any(given[name] is not tensor for name, tensor in buffers.items()):  # where torch leaves what it finds after
            raise Unfit("the model puts new tensors in the place of its buffers, which a step in place would miss")
        return logits

    return whole
