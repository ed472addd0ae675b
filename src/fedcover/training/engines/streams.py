"""Every client's own sub-model on its own CUDA stream, its steps captured once and replayed in every round.

Needs nothing of the model: any module, every client with its own shape. Clients of one shape take turns in the same
places, so that capacities may change from round to round without anything being captured again. On a CPU it does the
same without streams and graphs, which is not fast, but can be tested anywhere.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from fedcover.training.engines.buffers import Answer, Arrival, Job, arrivals
from fedcover.training.engines.runners import Place, Pool, captured, drive, plainly, pool_of, say, without_divergence
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import Unfit
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

AT_ONCE = 16
"""Clients that train at the same time: more streams do not fill a GPU further, and each needs memory of its own."""


def streams(
    task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float, *, precision: str = "fp32"
) -> Iterator[Update]:
    """Train clients side by side, each in a place of its own; those that cannot, one after another."""
    jobs = [Job(Assignment(task, state, *each), lr) for each in work]
    done = 0
    try:
        for update in without_divergence(side_by_side(jobs, pool_of(task), precision)):
            yield update
            done += 1
    except Unfit as reason:
        say(f"{reason}, so clients are trained one after another")
        yield from sequential(task, state, work[done:], lr, precision=precision)


def side_by_side(jobs: Sequence[Job], pool: Pool, precision: str) -> Iterator[Answer]:
    """What comes of jobs, as many at a time as fill a GPU."""
    for start in range(0, len(jobs), AT_ONCE):
        places = placed(pool, list(arrivals(jobs[start : start + AT_ONCE])), precision)
        drive(places)
        for place in places:
            yield from place.answers()


def placed(pool: Pool, clients: Sequence[Arrival], precision: str) -> list[Place]:
    """A place of its own for each client."""
    seen: Counter[object] = Counter()
    places = []
    for client in clients:
        shape = client.shape(rows=1 << (client.rows - 1).bit_length())
        make = captured if next(iter(client.params.values())).is_cuda else plainly
        place = pool.place([client], shape, None, seen[shape], make, precision)
        place.load([client])
        places.append(place)
        seen[shape] += 1
    return places
