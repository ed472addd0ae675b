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

from fedcover.log import warn_once
from fedcover.models.norms import statistics_key
from fedcover.training.engines.buffers import (
    ClientInputs,
    ClientJob,
    JobResult,
    StepSignature,
    client_inputs,
)
from fedcover.training.engines.compilation import (
    CompileFailed,
    StepBackend,
    cuda_graph_backend,
    inductor_backend,
)
from fedcover.training.engines.ragged import train_ragged
from fedcover.training.engines.runners import (
    RunnerCache,
    StepRunner,
    get_runner_cache,
    raise_on_divergence,
    run_steps,
)
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import UnsupportedByEngine
from fedcover.training.engines.streams import streams, train_on_streams
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

MAX_STACK_SIZES = 4
"""Sizes of crews that are made fast for one shape: compiling is dear, so later crews are put together from these."""

MAX_SIGNATURES = 12
"""Shapes that are compiled on a CPU for one run: clients of further ones are trained one after another."""

MAX_STACK_PARAMS = {"cpu": 1 << 18, "cuda": 1 << 30}
"""Parameters of all clients of a crew, about: on a CPU what stays in its caches from step to step."""


MIN_CLIENTS_PER_ROW_COUNT = 3
"""Clients for each number of samples, on average, from which on those with equally many form crews of their own."""

ClientStack = Sequence[ClientInputs]
RaggedStack = tuple[StepSignature, ClientStack]


def batched(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
    backend: StepBackend | None = None,
) -> Iterator[Update]:
    """Train clients of equal shapes together; what cannot run together, one after another."""
    jobs = [ClientJob(Assignment(task, state, client, reduction), lr) for client, reduction in work]
    try:
        made, alone = train_stacked(jobs, get_runner_cache(task), precision, backend)
    except UnsupportedByEngine as reason:
        if _on_gpu(jobs):
            warn_once(f"{reason}, so every client trains by itself on a stream of its own")
            yield from streams(task, state, work, lr, precision=precision)
            return
        warn_once(f"{reason}, so clients are trained one after another")
        made, alone = [], jobs
    yield from raise_on_divergence(made)
    left = [(job.assignment.client, job.assignment.reduction) for job in alone]
    yield from sequential(task, state, left, lr, precision=precision)


def train_stacked(
    jobs: Sequence[ClientJob],
    cache: RunnerCache,
    precision: str,
    backend: StepBackend | None = None,
) -> tuple[list[JobResult], list[ClientJob]]:
    """What comes of the clients that can form crews, and the jobs of those that cannot."""
    if cache.compile_error:
        raise UnsupportedByEngine(cache.compile_error)
    together, ragged_stacks, alone = group_into_stacks(jobs, cache)
    on_gpu = _on_gpu(jobs)
    if len(alone) > len(jobs) / 2 and not on_gpu:
        warn_once(
            "most clients share the shape of their part (and, with less than a batch each, their number of samples) "
            "with too few others, so they are trained one after another"
        )
    results: list[JobResult] = []
    try:
        for turn in concurrent_stacks(together):
            runners = load_stack_runners(turn, cache, precision, backend)
            run_steps(runners)
            results += [result for runner in runners for result in runner.results()]
        for signature, ragged_stack in ragged_stacks:
            runner = cache.runner(
                ragged_stack,
                signature,
                ragged_stack_size(ragged_stack),
                0,
                backend or inductor_backend,
                precision,
            )
            results += train_ragged(runner, ragged_stack)
    except UnsupportedByEngine as reason:
        cache.drop_unprepared()
        cache.compile_error = str(reason) if isinstance(reason, CompileFailed) else ""
        raise
    if on_gpu:
        return [*results, *train_on_streams(alone, cache, precision)], []
    return results, alone


def group_into_stacks(
    jobs: Sequence[ClientJob], cache: RunnerCache
) -> tuple[list[ClientStack], list[RaggedStack], list[ClientJob]]:
    """Clients of equal shapes and learning rates: crews with equally many samples, queues with unequal numbers of them.

    The jobs of those who are the only ones of their shape come last.
    """
    if any(statistics_key(job.assignment.task.norm, 1.0) for job in jobs):
        raise UnsupportedByEngine("norm statistics are tracked for each client")
    if any(
        isinstance(layer, nn.RNNBase)
        for job in jobs[:1]
        for layer in job.assignment.task.model.module.modules()
    ):
        raise UnsupportedByEngine(
            "the model has recurrent layers, which torch computes for one client at a time"
        )
    parts: dict[tuple[StepSignature, float], list[ClientInputs]] = defaultdict(list)
    for client in client_inputs(jobs):
        parts[client.signature(rows=0), client.job.lr].append(client)
    on_gpu = _on_gpu(jobs)
    alike: dict[tuple[StepSignature, float], list[ClientInputs]] = defaultdict(list)
    for (part, lr), clients in parts.items():
        room = (
            None if on_gpu or _fits_uniform_stacks(clients) else _row_capacity(part, clients, cache)
        )
        for client in clients:
            alike[client.signature(room or client.rows), lr].append(client)
    few = (
        alike
        if on_gpu
        else _limit_signatures(alike, cache, len({id(job.assignment.task) for job in jobs}))
    )
    found: list[ClientStack] = [
        [client] for key, clients in alike.items() if key not in few for client in clients
    ]
    ragged_stacks: list[RaggedStack] = []
    for (signature, _), clients in few.items():
        if len({client.rows for client in clients}) > 1:
            ragged_stacks.append((signature, clients))
        else:
            found += stacks(clients, cache.stack_sizes(signature))
    return (
        [stack for stack in found if len(stack) > 1],
        ragged_stacks,
        [stack[0].job for stack in found if len(stack) == 1],
    )


def _fits_uniform_stacks(clients: Sequence[ClientInputs]) -> bool:
    """Whether clients with equally many samples are enough for crews of their own, or nobody has a whole batch."""
    rows = {client.rows for client in clients}
    enough = len(rows) == 1 or len(rows) * MIN_CLIENTS_PER_ROW_COUNT <= len(clients)
    return enough or max(rows) < clients[0].job.assignment.task.local.batch_size


def _row_capacity(part: StepSignature, clients: Sequence[ClientInputs], cache: RunnerCache) -> int:
    """For how many rows a seat has room: as in a crew that is there, else for two to four times as many as now."""
    rows, stack_size = max(client.rows for client in clients), ragged_stack_size(clients)
    known = [
        runner.step_buffers.signature
        for runner in cache.runners.values()
        if runner.step_buffers.stack_size == stack_size
    ]
    fitting = [
        signature.rows
        for signature in known
        if signature.rows >= rows and replace(signature, rows=0) == part
    ]
    return min(fitting, default=2 << (rows - 1).bit_length())


def _limit_signatures(
    alike: Mapping[tuple[StepSignature, float], list[ClientInputs]], cache: RunnerCache, runs: int
) -> dict[tuple[StepSignature, float], list[ClientInputs]]:
    """Clients of shapes that are known, and of new ones as long as these are few: each takes seconds to compile."""
    known, most = (
        {runner.step_buffers.signature for runner in cache.runners.values()},
        runs * MAX_SIGNATURES,
    )
    few: dict[tuple[StepSignature, float], list[ClientInputs]] = {}
    for (signature, lr), clients in alike.items():
        if signature in known or len(known) < most:
            few[signature, lr] = clients
            known |= {signature} if len(clients) > 1 else set()
        elif len(clients) > 1:
            warn_once(
                f"there are more than {most} shapes of clients (parts of the model and numbers of samples), so "
                "those of further ones are trained one after another"
            )
    return few


def stacks(clients: Sequence[ClientInputs], known: Sequence[int]) -> Iterator[ClientStack]:
    """Clients of a shape in crews, none much larger than pays; when enough sizes are known, of those sizes."""
    most, left = _max_stack_size(clients), list(clients)
    while left:
        size = -(-len(left) // max(1, len(left) // most))
        if size not in known and len(set(known)) >= MAX_STACK_SIZES:
            size = max((k for k in known if k <= size), default=1)
        yield left[:size]
        left = left[size:]


def ragged_stack_size(clients: Sequence[ClientInputs]) -> int:
    """How many clients of unequal numbers of samples train at once: with more, some would wait for the longest.

    As many as pay, or a power of two below: few sizes are compiled, and which one does not depend on earlier rounds.
    """
    steps = [client.rows // client.job.assignment.task.local.batch_size for client in clients]
    useful, most = -(-sum(steps) // max(steps)), _max_stack_size(clients)
    return most if useful >= most else 1 << (useful.bit_length() - 1)


def _max_stack_size(clients: Sequence[ClientInputs]) -> int:
    numbers = sum(p.numel() for p in clients[0].params.values())
    return max(2, MAX_STACK_PARAMS[_device_type(clients[0])] // max(1, numbers))


def concurrent_stacks(stacks: Sequence[ClientStack]) -> Iterator[Sequence[ClientStack]]:
    """The crews that train side by side: all of them on a GPU; on a CPU one after another, each in its caches."""
    if stacks and _device_type(stacks[0][0]) == "cuda":
        yield stacks
    else:
        yield from ([stack] for stack in stacks)


def load_stack_runners(
    stacks: Sequence[ClientStack],
    cache: RunnerCache,
    precision: str,
    backend: StepBackend | None = None,
) -> list[StepRunner]:
    """Crews in their places, ready to train."""
    seen: Counter[object] = Counter()
    runners = []
    for stack in stacks:
        signature = stack[0].signature(stack[0].rows)
        fast = backend or (
            cuda_graph_backend if _device_type(stack[0]) == "cuda" else inductor_backend
        )
        runner = cache.runner(
            stack, signature, len(stack), seen[signature, len(stack)], fast, precision
        )
        seen[signature, len(stack)] += 1
        runner.load(stack)
        runners.append(runner)
    return runners


def _on_gpu(jobs: Sequence[ClientJob]) -> bool:
    return any(next(iter(job.assignment.state.params.values())).is_cuda for job in jobs[:1])


def _device_type(client: ClientInputs) -> str:
    return next(iter(client.params.values())).device.type
