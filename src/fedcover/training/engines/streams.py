"""Every client's own sub-model on its own CUDA stream, its steps captured once and replayed in every round.

Needs nothing of the model: any module, every client with its own shape. Clients of one shape take turns in the same
places, so that capacities may change from round to round without anything being captured again. On a CPU it does the
same without streams and graphs, which is not fast, but can be tested anywhere.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from fedcover.log import warn_once
from fedcover.training.engines.buffers import ClientInputs, ClientJob, JobResult, client_inputs
from fedcover.training.engines.compilation import cuda_graph_backend, eager_backend
from fedcover.training.engines.runners import (
    RunnerCache,
    StepRunner,
    get_runner_cache,
    raise_on_divergence,
    run_steps,
)
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import UnsupportedByEngine
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MAX_STREAMS = 16
"""Clients that train at the same time: more streams do not fill a GPU further, and each needs memory of its own."""


def streams(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
) -> Iterator[Update]:
    """Train clients side by side, each in a place of its own; those that cannot, one after another."""
    jobs = [ClientJob(Assignment(task, state, *each), lr) for each in work]
    done = 0
    try:
        for update in raise_on_divergence(
            train_on_streams(jobs, get_runner_cache(task), precision)
        ):
            yield update
            done += 1
    except UnsupportedByEngine as reason:
        warn_once(f"{reason}, so clients are trained one after another")
        yield from sequential(task, state, work[done:], lr, precision=precision)


def train_on_streams(
    jobs: Sequence[ClientJob], cache: RunnerCache, precision: str
) -> Iterator[JobResult]:
    """What comes of jobs, as many at a time as fill a GPU."""
    for start in range(0, len(jobs), MAX_STREAMS):
        runners = load_client_runners(
            cache, list(client_inputs(jobs[start : start + MAX_STREAMS])), precision
        )
        run_steps(runners)
        for runner in runners:
            yield from runner.results()


def load_client_runners(
    cache: RunnerCache, clients: Sequence[ClientInputs], precision: str
) -> list[StepRunner]:
    """A place of its own for each client."""
    seen: Counter[object] = Counter()
    runners = []
    for client in clients:
        signature = client.signature(rows=1 << (client.rows - 1).bit_length())
        backend = (
            cuda_graph_backend if next(iter(client.params.values())).is_cuda else eager_backend
        )
        runner = cache.runner([client], signature, None, seen[signature], backend, precision)
        runner.load([client])
        runners.append(runner)
        seen[signature] += 1
    return runners
