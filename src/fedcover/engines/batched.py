"""Clients that share shapes as a crew: their parameters are stacked, and `vmap` makes their steps one.

Masked clients always share shapes, sliced ones do by width. On the CPU the step of a crew is compiled, on CUDA it is
captured in a graph. What cannot run together (dropout, tracked statistics) is trained by `sequential`, and one line of
the log says so.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fedcover.engines.lanes import Answer, Arrival, Job, Shape, arrival
from fedcover.engines.pools import Make, Place, Pool, captured, compiled, drive, pool_of, say, without_divergence
from fedcover.engines.sequential import sequential
from fedcover.engines.steps import Unfit
from fedcover.norms import statistics_key
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MOST_SIZES = 4
"""Sizes of crews that are made fast for one shape: compiling is dear, so later crews are put together from these."""

MOST_NUMBERS = 1 << 30
"""Parameters that a crew holds at most, all clients together."""


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
        made, alone = in_crews(jobs, pool_of(task.model.module), precision, make)
    except Unfit as reason:
        say(f"{reason}, so clients are trained one after another")
        made, alone = [], jobs
    yield from without_divergence(made)
    left = [(job.assignment.client, job.assignment.reduction) for job in alone]
    yield from sequential(task, state, left, lr, precision=precision)


def in_crews(
    jobs: Sequence[Job], pool: Pool, precision: str, make: Make | None = None
) -> tuple[list[Answer], list[Job]]:
    """What comes of the clients that can form crews, and the jobs of those that cannot."""
    places, alone = placed_in_crews(jobs, pool, precision, make)
    if len(alone) > len(jobs) / 2:
        say("most clients share their shape with too few others, so they are trained one after another")
    if places:
        drive(places)
    return [answer for place in places for answer in place.answers()], alone


def placed_in_crews(
    jobs: Sequence[Job], pool: Pool, precision: str, make: Make | None = None
) -> tuple[list[Place], list[Job]]:
    """Crews in their places, ready to train, and the jobs of clients that share their shape with nobody."""
    if any(statistics_key(job.assignment.task.norm, 1.0) for job in jobs):
        raise Unfit("norm statistics are tracked for each client")
    alike: dict[tuple[Shape, float], list[Arrival]] = defaultdict(list)
    for client in map(arrival, jobs):
        alike[client.shape(client.rows), client.job.lr].append(client)
    places: list[Place] = []
    alone: list[Job] = []
    for (shape, _), clients in alike.items():
        fast = make or (captured if next(iter(clients[0].params.values())).is_cuda else compiled)
        seen: dict[int, int] = defaultdict(int)
        for crew in crews(clients, pool.known(shape)):
            if len(crew) == 1:
                alone += [crew[0].job]
                continue
            place = pool.place(crew, shape, len(crew), seen[len(crew)], fast, precision)
            seen[len(crew)] += 1
            place.load(crew)
            places.append(place)
    return places, alone


def crews(clients: Sequence[Arrival], known: Sequence[int]) -> Iterator[Sequence[Arrival]]:
    """Clients of a shape in crews: one crew, or, when enough sizes are known, crews of those sizes."""
    most = max(1, MOST_NUMBERS // max(1, sum(p.numel() for p in clients[0].params.values())))
    left = list(clients)
    while left:
        size = min(len(left), most)
        if size not in known and len(set(known)) >= MOST_SIZES:
            size = max((k for k in known if k <= size), default=1)
        yield left[:size]
        left = left[size:]
