"""The engine `batched`: stack the parameters of clients with equal shapes, and train them at once.

`vmap` turns the step of one client into a step of the whole stack. On a CPU this step is compiled,
on CUDA it is captured as a graph. What cannot be stacked is trained by `sequential` on a CPU and
by `streams` on CUDA; one line in the log says why.

This file only drives the other modules: `grouping` decides who is stacked (change limits there),
`runners` keeps the prepared steps, `ragged` trains clients with different numbers of samples. To
prepare steps in another way, pass a `backend`. Results must stay those of `sequential`;
`tests/training/engines/test_engines.py` compares them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from fedcover.log import warn_once
from fedcover.training.engines.client_inputs import ClientJob, JobResult
from fedcover.training.engines.compilation import (
    StepBackend,
    cuda_graph_backend,
    inductor_backend,
)
from fedcover.training.engines.grouping import (
    ClientStack,
    RaggedStack,
    group_into_stacks,
    is_on_gpu,
    ragged_stack_size,
)
from fedcover.training.engines.ragged import train_ragged
from fedcover.training.engines.runners import (
    RUNNER_POOL,
    RunnerCache,
    StepRunner,
    run_steps,
    updates_or_raise,
)
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.streams import streams, train_on_streams
from fedcover.training.engines.unsupported import CompileFailed, UnsupportedByEngine
from fedcover.types import Assignment, Client, Reduction, State, Task, Update


def batched(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
    backend: StepBackend | None = None,
) -> Iterator[Update]:
    """Train clients of equal shapes together, and the others one after another.

    Arguments, updates and errors are those of `sequential`, but the updates come in any order.
    `backend` prepares the steps (default: compiled on a CPU, a graph on CUDA).
    """
    jobs = [ClientJob(Assignment(task, state, client, reduction), lr) for client, reduction in work]
    try:
        results, alone = train_stacked(jobs, RUNNER_POOL.cache_for(task), precision, backend)
    except UnsupportedByEngine as reason:
        if is_on_gpu(jobs):
            warn_once(f"{reason}, so every client trains by itself on a stream of its own")
            yield from streams(task, state, work, lr, precision=precision)
            return
        warn_once(f"{reason}, so clients are trained one after another")
        results, alone = [], jobs
    yield from updates_or_raise(results)
    remaining = [(job.assignment.client, job.assignment.reduction) for job in alone]
    yield from sequential(task, state, remaining, lr, precision=precision)


def train_stacked(
    jobs: Sequence[ClientJob],
    cache: RunnerCache,
    precision: str,
    backend: StepBackend | None = None,
) -> tuple[list[JobResult], list[ClientJob]]:
    """Train all clients that can be stacked; on a GPU, train the others on streams.

    Returns:
        The results, and the jobs that were not trained.

    Raises:
        UnsupportedByEngine: If the steps cannot be stacked, replayed or compiled.
    """
    if cache.compile_error:
        raise UnsupportedByEngine(cache.compile_error)
    grouping = group_into_stacks(jobs, cache)
    on_gpu = is_on_gpu(jobs)
    if len(grouping.alone) > len(jobs) / 2 and not on_gpu:
        warn_once(
            "too few clients have parts of the same shape (and, with less than a batch each, the "
            "same number of samples), so most are trained one after another"
        )
    results: list[JobResult] = []
    try:
        for stacks in concurrent_stacks(grouping.stacks):
            results += _train_uniform(stacks, cache, precision, backend)
        for ragged_stack in grouping.ragged_stacks:
            results += _train_ragged(ragged_stack, cache, precision, backend)
    except UnsupportedByEngine as reason:
        cache.drop_unprepared()
        cache.compile_error = str(reason) if isinstance(reason, CompileFailed) else ""
        raise
    if on_gpu:
        results += train_on_streams(grouping.alone, cache, precision)
        return results, []
    return results, grouping.alone


def _train_uniform(
    stacks: Sequence[ClientStack], cache: RunnerCache, precision: str, backend: StepBackend | None
) -> list[JobResult]:
    runners = load_stack_runners(stacks, cache, precision, backend)
    run_steps(runners)
    return [result for runner in runners for result in runner.results()]


def _train_ragged(
    ragged_stack: RaggedStack, cache: RunnerCache, precision: str, backend: StepBackend | None
) -> list[JobResult]:
    signature, clients = ragged_stack
    stack_size = ragged_stack_size(clients)
    runner = cache.runner(clients, signature, stack_size, 0, backend or inductor_backend, precision)
    return train_ragged(runner, clients)


def concurrent_stacks(stacks: Sequence[ClientStack]) -> Iterator[Sequence[ClientStack]]:
    """Yield the stacks to train at the same time.

    On a GPU these are all; on a CPU one after another, so that each stays in the CPU's caches.
    """
    if stacks and stacks[0][0].device.type == "cuda":
        yield stacks
    else:
        yield from ([stack] for stack in stacks)


def load_stack_runners(
    stacks: Sequence[ClientStack],
    cache: RunnerCache,
    precision: str,
    backend: StepBackend | None = None,
) -> list[StepRunner]:
    """Return a runner for each stack, with the clients loaded and all steps prepared."""
    runners = []
    uses: Counter[object] = Counter()
    for stack in stacks:
        on_cuda = stack[0].device.type == "cuda"
        stack_backend = backend or (cuda_graph_backend if on_cuda else inductor_backend)
        signature = stack[0].signature(stack[0].rows)
        number = uses[signature, len(stack)]
        runner = cache.runner(stack, signature, len(stack), number, stack_backend, precision)
        runner.load(stack)
        runners.append(runner)
        uses[signature, len(stack)] += 1
    return runners
