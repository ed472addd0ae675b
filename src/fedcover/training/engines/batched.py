"""Clients that share shapes as a crew: their parameters are stacked, and `vmap` makes their steps one.

Masked clients always share shapes, sliced ones do by width. On the CPU the step of a crew is compiled, and clients with
unequal numbers of samples take turns in its seats; what cannot run together (dropout, tracked statistics, a width of
its own) is trained by `sequential`, and one line of the log says so. On CUDA a crew's step is captured in a graph, its
clients have equally many samples, and those who are alone train after the crews as under `streams`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fedcover.models.norms import statistics_key
from fedcover.training.engines.buffers import Answer, Arrival, Job, Shape, arrivals
from fedcover.training.engines.ragged import take_turns
from fedcover.training.engines.runners import (
    Make,
    Place,
    Pool,
    Uncompiled,
    captured,
    compiled,
    drive,
    pool_of,
    say,
    without_divergence,
)
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import Unfit
from fedcover.training.engines.streams import side_by_side, streams
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MOST_SIZES = 4
"""Sizes of crews that are made fast for one shape: compiling is dear, so later crews are put together from these."""

MOST_SHAPES = 12
"""Shapes that are compiled on a CPU for one run: clients of further ones are trained one after another."""

MOST_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 30}
"""Parameters of all clients of a crew, about: on a CPU what stays in its caches from step to step."""


LEAST_ALIKE = 3
"""Clients for each number of samples, on average, from which on those with equally many form crews of their own."""

Crew = Sequence[Arrival]
Queue = tuple[Shape, Crew]


def batched(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
    make: Make | None = None,
) -> Iterator[Update]:
    """Train clients of equal shapes together; what cannot run together, one after another."""
    jobs = [Job(Assignment(task, state, client, reduction), lr) for client, reduction in work]
    try:
        made, alone = in_crews(jobs, pool_of(task), precision, make)
    except Unfit as reason:
        if _on_a_gpu(jobs):
            say(f"{reason}, so every client trains by itself on a stream of its own")
            yield from streams(task, state, work, lr, precision=precision)
            return
        say(f"{reason}, so clients are trained one after another")
        made, alone = [], jobs
    yield from without_divergence(made)
    left = [(job.assignment.client, job.assignment.reduction) for job in alone]
    yield from sequential(task, state, left, lr, precision=precision)


def in_crews(
    jobs: Sequence[Job], pool: Pool, precision: str, make: Make | None = None
) -> tuple[list[Answer], list[Job]]:
    """What comes of the clients that can form crews, and the jobs of those that cannot."""
    if pool.uncompiled:
        raise Unfit(pool.uncompiled)
    together, queues, alone = crews_of(jobs, pool)
    on_a_gpu = _on_a_gpu(jobs)
    if len(alone) > len(jobs) / 2 and not on_a_gpu:
        say(
            "most clients share the shape of their part (and, with less than a batch each, their number of samples) "
            "with too few others, so they are trained one after another"
        )
    answers: list[Answer] = []
    try:
        for turn in turns(together):
            places = seated(turn, pool, precision, make)
            drive(places)
            answers += [answer for place in places for answer in place.answers()]
        for shape, queue in queues:
            place = pool.place(queue, shape, seats(queue), 0, make or compiled, precision)
            answers += take_turns(place, queue)
    except Unfit as reason:
        pool.forget_unready()
        pool.uncompiled = str(reason) if isinstance(reason, Uncompiled) else ""
        raise
    if on_a_gpu:
        return [*answers, *side_by_side(alone, pool, precision)], []
    return answers, alone


def crews_of(jobs: Sequence[Job], pool: Pool) -> tuple[list[Crew], list[Queue], list[Job]]:
    """Clients of equal shapes and learning rates: crews with equally many samples, queues with unequal numbers of them.

    The jobs of those who are the only ones of their shape come last.
    """
    if any(statistics_key(job.assignment.task.norm, 1.0) for job in jobs):
        raise Unfit("norm statistics are tracked for each client")
    if any(isinstance(layer, nn.RNNBase) for job in jobs[:1] for layer in job.assignment.task.model.module.modules()):
        raise Unfit("the model has recurrent layers, which torch computes for one client at a time")
    parts: dict[tuple[Shape, float], list[Arrival]] = defaultdict(list)
    for client in arrivals(jobs):
        parts[client.shape(rows=0), client.job.lr].append(client)
    on_a_gpu = _on_a_gpu(jobs)
    alike: dict[tuple[Shape, float], list[Arrival]] = defaultdict(list)
    for (part, lr), clients in parts.items():
        room = None if on_a_gpu or _in_step(clients) else _room(part, clients, pool)
        for client in clients:
            alike[client.shape(room or client.rows), lr].append(client)
    few = alike if on_a_gpu else _few_shapes(alike, pool, len({id(job.assignment.task) for job in jobs}))
    found: list[Crew] = [[client] for key, clients in alike.items() if key not in few for client in clients]
    queues: list[Queue] = []
    for (shape, _), clients in few.items():
        if len({client.rows for client in clients}) > 1:
            queues.append((shape, clients))
        else:
            found += crews(clients, pool.known(shape))
    return [crew for crew in found if len(crew) > 1], queues, [crew[0].job for crew in found if len(crew) == 1]


def _in_step(clients: Sequence[Arrival]) -> bool:
    """Whether clients with equally many samples are enough for crews of their own, or nobody has a whole batch."""
    rows = {client.rows for client in clients}
    enough = len(rows) == 1 or len(rows) * LEAST_ALIKE <= len(clients)
    return enough or max(rows) < clients[0].job.assignment.task.local.batch_size


def _room(part: Shape, clients: Sequence[Arrival], pool: Pool) -> int:
    """For how many rows a seat has room: as in a crew that is there, else for two to four times as many as now."""
    rows, crew = max(client.rows for client in clients), seats(clients)
    known = [place.lane.shape for place in pool.places.values() if place.lane.crew == crew]
    fitting = [shape.rows for shape in known if shape.rows >= rows and replace(shape, rows=0) == part]
    return min(fitting, default=2 << (rows - 1).bit_length())


def _few_shapes(
    alike: Mapping[tuple[Shape, float], list[Arrival]], pool: Pool, runs: int
) -> dict[tuple[Shape, float], list[Arrival]]:
    """Clients of shapes that are known, and of new ones as long as these are few: each takes seconds to compile."""
    known, most = {place.lane.shape for place in pool.places.values()}, runs * MOST_SHAPES
    few: dict[tuple[Shape, float], list[Arrival]] = {}
    for (shape, lr), clients in alike.items():
        if shape in known or len(known) < most:
            few[shape, lr] = clients
            known |= {shape} if len(clients) > 1 else set()
        elif len(clients) > 1:
            say(
                f"there are more than {most} shapes of clients (parts of the model and numbers of samples), so "
                "those of further ones are trained one after another"
            )
    return few


def crews(clients: Sequence[Arrival], known: Sequence[int]) -> Iterator[Crew]:
    """Clients of a shape in crews, none much larger than pays; when enough sizes are known, of those sizes."""
    most, left = _most(clients), list(clients)
    while left:
        size = -(-len(left) // max(1, len(left) // most))
        if size not in known and len(set(known)) >= MOST_SIZES:
            size = max((k for k in known if k <= size), default=1)
        yield left[:size]
        left = left[size:]


def seats(clients: Sequence[Arrival]) -> int:
    """How many clients of unequal numbers of samples train at once: with more, some would wait for the longest.

    As many as pay, or a power of two below: few sizes are compiled, and which one does not depend on earlier rounds.
    """
    steps = [client.rows // client.job.assignment.task.local.batch_size for client in clients]
    useful, most = -(-sum(steps) // max(steps)), _most(clients)
    return most if useful >= most else 1 << (useful.bit_length() - 1)


def _most(clients: Sequence[Arrival]) -> int:
    numbers = sum(p.numel() for p in clients[0].params.values())
    return max(2, MOST_NUMBERS[_device(clients[0])] // max(1, numbers))


def turns(crews: Sequence[Crew]) -> Iterator[Sequence[Crew]]:
    """The crews that train side by side: all of them on a GPU; on a CPU one after another, each in its caches."""
    if crews and _device(crews[0][0]) == "cuda":
        yield crews
    else:
        yield from ([crew] for crew in crews)


def seated(crews: Sequence[Crew], pool: Pool, precision: str, make: Make | None = None) -> list[Place]:
    """Crews in their places, ready to train."""
    seen: Counter[object] = Counter()
    places = []
    for crew in crews:
        shape = crew[0].shape(crew[0].rows)
        fast = make or (captured if _device(crew[0]) == "cuda" else compiled)
        place = pool.place(crew, shape, len(crew), seen[shape, len(crew)], fast, precision)
        seen[shape, len(crew)] += 1
        place.load(crew)
        places.append(place)
    return places


def _on_a_gpu(jobs: Sequence[Job]) -> bool:
    return any(next(iter(job.assignment.state.params.values())).is_cuda for job in jobs[:1])


def _device(client: Arrival) -> str:
    return next(iter(client.params.values())).device.type
