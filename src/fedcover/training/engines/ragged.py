"""Clients with unequal numbers of samples in the seats of one crew: whoever has finished leaves its seat to the next.

Whole batches are steps of all seats together, made fast once for whoever sits there. What is left of an epoch has
another size for each client, so that is a step of one seat by itself, as it stands.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.training.engines.buffers import Answer, Arrival, Lane, client_buffers
from fedcover.training.engines.runners import Place, computing, on, unfit_if_it_fails
from fedcover.training.engines.sgd_step import Slots, Track, leaves_of, map_trees


@dataclass(slots=True, eq=False)
class Seat:
    """One client in a crew: which of its seats, in what order it goes through its rows, and how far it has come."""

    lane: Lane
    number: int
    client: Arrival
    orders: tuple[Tensor, Tensor] = field(init=False)
    own: Slots = field(init=False)
    epoch: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self.orders, self.own = self.client.orders(), _slots(self.lane, self.number)
        self.sit()

    @property
    def whole(self) -> int:
        """How many whole batches an epoch has."""
        return self.client.rows // self.lane.shape.local.batch_size

    @property
    def each(self) -> int:
        """How many steps an epoch has."""
        return -(-self.client.rows // self.lane.shape.local.batch_size)

    @property
    def finished(self) -> bool:
        """Whether the client has made all of its steps."""
        return self.epoch == self.lane.shape.local.epochs

    def sit(self) -> None:
        """Put what the client brings along in the place of whatever was in the seat."""
        client, own = self.client, self.own
        buffers = client_buffers(client.job.assignment) if own.buffers else {}
        for room, values in ((own.params, client.params), (own.masks, client.masks), (own.buffers, buffers)):
            for name, tensor in room.items():
                tensor.copy_(values[name])
        for tensor in own.velocity.values():
            tensor.zero_()
        for tensor, value in zip(leaves_of(own.carry), leaves_of(client.carry), strict=True):
            tensor.copy_(value)
        own.x[: client.rows].copy_(client.shard.samples.x[client.shard.index])
        own.y[: client.rows].copy_(client.shard.samples.y[client.shard.index])

    def lay_out(self, track: Track, steps: int) -> None:
        """Put the rows of the client's next steps where those of its crew are."""
        size = self.lane.shape.local.batch_size
        part = slice(self.done * size, (self.done + steps) * size)
        for room, order in zip((track.rows_TB, track.drawn_TBK), self.orders, strict=True):
            room[:steps, self.number].copy_(order[self.epoch, part].reshape(room[:steps, self.number].shape))

    def finish_epoch(self) -> None:
        """Make the step of what is left of the epoch, if anything is, and begin the next."""
        if self.each > self.whole:
            left = slice(self.whole * self.lane.shape.local.batch_size, None)
            rows_1B, drawn_1BK = (order[self.epoch, left][None] for order in self.orders)
            step = replace(self.lane.step, crew=False)
            with unfit_if_it_fails():  # this size was not tried before
                step(self.own, Track(rows_1B, drawn_1BK, cursor=torch.zeros(1, dtype=torch.int64)))
        self.epoch, self.done = self.epoch + 1, 0

    def answer(self) -> Answer:
        """What comes of the client."""
        own = self.own
        flat_P = torch.cat([p.reshape(-1) for p in own.params.values()])
        loss = float(own.losses_T[(self.epoch - 1) * self.each : self.epoch * self.each].mean())
        kept = (map_trees(torch.clone, tree) for tree in (own.carry, own.buffers))
        return self.lane.answer(self.client, flat_P, bool(flat_P.isfinite().all()), loss, *kept)


def _slots(lane: Lane, seat: int) -> Slots:
    """What a lane holds for one seat, as if its client were alone."""
    crew = lane.slots
    own = {
        kind: {name: tensor[seat] for name, tensor in getattr(crew, kind).items()}
        for kind in ("params", "velocity", "masks", "buffers")
    }
    carry, observed = (map_trees(lambda stacked: stacked[seat], tree) for tree in (crew.carry, crew.observed))
    return Slots(**own, carry=carry, observed=observed, x=crew.x[seat], y=crew.y[seat], rate=crew.rate,
                 step=crew.step[seat], losses_T=crew.losses_T[:, seat])  # fmt: skip


def take_turns(place: Place, clients: Sequence[Arrival]) -> list[Answer]:
    """What comes of clients that differ in their numbers of samples only, those with the most first."""
    lane, size = place.lane, place.lane.shape.local.batch_size
    waiting = deque(sorted(clients, key=lambda client: client.rows, reverse=True))
    lane.slots.rate.fill_(clients[0].job.lr)
    answers: list[Answer] = []
    with on(place.stream), computing(place.precision, lane.slots.x.device):
        seats = [Seat(lane, number, waiting.popleft()) for number in range(min(lane.crew or 1, len(waiting)))]
        track = lane.track(size, seats[0].orders[1].shape[-1])
        if place.prepare([size]):
            for seat in seats:
                seat.sit()
        while seats:
            _step_together(lane, track, seats, place.steps[size])
            for seat in [seat for seat in seats if seat.done == seat.whole]:
                seat.finish_epoch()
                if seat.finished:
                    answers.append(seat.answer())
                    seats.remove(seat)
                    seats += [Seat(lane, seat.number, waiting.popleft())] if waiting else []
    return answers


def _step_together(lane: Lane, track: Track, seats: Sequence[Seat], step: Callable[[], None]) -> None:
    """All seats at once through whole batches, until the first of them is at the end of an epoch."""
    steps = min(seat.whole - seat.done for seat in seats)
    made = [0] * (lane.crew or 1)  # whatever an empty seat does, it begins anew and nobody looks at it
    for seat in seats:
        made[seat.number] = seat.epoch * seat.each + seat.done
        seat.lay_out(track, steps)
        seat.done += steps
    lane.slots.step.copy_(torch.tensor(made))
    track.cursor.zero_()
    for _ in range(steps):
        step()
