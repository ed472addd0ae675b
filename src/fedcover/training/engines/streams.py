"""The engine `streams`: train each client's own sub-model on a CUDA stream of its own.

The steps of a client are captured once and replayed in every round. Any module will do, and every
client may have its own shape: clients of one shape share a runner in turns, so capacities may
change from round to round without a new capture. On a CPU the engine works without streams and
graphs; that is not fast, but can be tested anywhere. `MAX_STREAMS` may be changed freely.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from fedcover.log import warn_once
from fedcover.training.engines.client_inputs import (
    ClientInputs,
    ClientJob,
    JobResult,
    client_inputs,
)
from fedcover.training.engines.compilation import cuda_graph_backend, eager_backend
from fedcover.training.engines.runners import (
    RUNNER_POOL,
    RunnerCache,
    StepRunner,
    run_steps,
    updates_or_raise,
)
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MAX_STREAMS = 16
"""Clients that train at once: more streams do not use a GPU better, and each needs memory."""


def streams(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
) -> Iterator[Update]:
    """Train clients side by side; train them one after another if their steps cannot be replayed.

    Arguments, updates and errors are those of `sequential`.
    """
    jobs = [ClientJob(Assignment(task, state, client, reduction), lr) for client, reduction in work]
    num_done = 0
    try:
        results = train_on_streams(jobs, RUNNER_POOL.cache_for(task), precision)
        for update in updates_or_raise(results):
            yield update
            num_done += 1
    except UnsupportedByEngine as reason:
        warn_once(f"{reason}, so clients are trained one after another")
        yield from sequential(task, state, work[num_done:], lr, precision=precision)


def train_on_streams(
    jobs: Sequence[ClientJob], cache: RunnerCache, precision: str
) -> Iterator[JobResult]:
    """Yield the results of jobs, trained `MAX_STREAMS` at a time."""
    for start in range(0, len(jobs), MAX_STREAMS):
        clients = list(client_inputs(jobs[start : start + MAX_STREAMS]))
        runners = load_client_runners(cache, clients, precision)
        run_steps(runners)
        for runner in runners:
            yield from runner.results()


def load_client_runners(
    cache: RunnerCache, clients: Sequence[ClientInputs], precision: str
) -> list[StepRunner]:
    """Return a runner for each client, with the client loaded and all steps prepared."""
    runners = []
    uses: Counter[object] = Counter()
    for client in clients:
        backend = cuda_graph_backend if client.device.type == "cuda" else eager_backend
        # space for a power of two of rows, so that clients with similar numbers share a runner
        signature = client.signature(rows=1 << (client.rows - 1).bit_length())
        runner = cache.runner([client], signature, None, uses[signature], backend, precision)
        runner.load([client])
        runners.append(runner)
        uses[signature] += 1
    return runners
