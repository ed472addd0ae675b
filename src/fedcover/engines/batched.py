"""Clients that share shapes as a crew: their parameters are stacked, and `vmap` makes their steps one.

Masked clients always share shapes, sliced ones do by width. On the CPU the step of a crew is compiled; what cannot run
together (dropout, tracked statistics, a width of its own) is trained by `sequential`, and one line of the log says so.
On CUDA a crew's step is captured in a graph, and those who are alone train after the crews as under `streams`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fedcover.engines.lanes import Answer, Arrival, Job, Shape, arrivals
from fedcover.engines.pools import (
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
from fedcover.engines.sequential import sequential
from fedcover.engines.steps import Unfit
from fedcover.engines.streams import side_by_side, streams
from fedcover.norms import statistics_key
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MOST_SIZES = 4
"""Sizes of crews that are made fast for one shape: compiling is dear, so later crews are put together from these."""

MOST_SHAPES = 12
"""Shapes that are compiled on a CPU for one run: clients of further ones are trained one after another."""

MOST_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 30}
"""Parameters of all clients of a crew, about: on a CPU what stays in its caches from step to step."""


Crew = Sequence[Arrival]


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
    together, alone = crews_of(jobs, pool)
    on_a_gpu = _on_a_gpu(jobs)
    if len(alone) > len(jobs) / 2 and not on_a_gpu:
        say(
            "most clients share their shape (part of the model and number of samples) with too few others, so they are "
            "trained one after another"
        )
    answers: list[Answer] = []
    for turn in turns(together):
        try:
            places = seated(turn, pool, precision, make)
        except Uncompiled as reason:
            pool.uncompiled = str(reason)
            raise
        drive(places)
        answers += [answer for place in places for answer in place.answers()]
    if on_a_gpu:
        return [*answers, *side_by_side(alone, pool, precision)], []
    return answers, alone


def crews_of(jobs: Sequence[Job], pool: Pool) -> tuple[list[Crew], list[Job]]:
    """Clients of equal shapes and learning rates, in crews, and the jobs of those who are the only ones of theirs."""
    if any(statistics_key(job.assignment.task.norm, 1.0) for job in jobs):
        raise Unfit("norm statistics are tracked for each client")
    alike: dict[tuple[Shape, float], list[Arrival]] = defaultdict(list)
    for client in arrivals(jobs):
        alike[client.shape(client.rows), client.job.lr].append(client)
    few = alike if _on_a_gpu(jobs) else _few_shapes(alike, pool, len({id(job.assignment.task) for job in jobs}))
    found = [crew for (shape, _), clients in few.items() for crew in crews(clients, pool.known(shape))]
    found += [[client] for key, clients in alike.items() if key not in few for client in clients]
    return [crew for crew in found if len(crew) > 1], [crew[0].job for crew in found if len(crew) == 1]


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
    params = clients[0].params.values()
    most = max(2, MOST_NUMBERS[_device(clients[0])] // max(1, sum(p.numel() for p in params)))
    left = list(clients)
    while left:
        size = -(-len(left) // max(1, len(left) // most))
        if size not in known and len(set(known)) >= MOST_SIZES:
            size = max((k for k in known if k <= size), default=1)
        yield left[:size]
        left = left[size:]


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
