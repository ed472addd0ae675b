"""The cache of prepared steps: a runner trains clients, the cache keeps runners between rounds."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fedcover.errors import TrainingDiverged
from fedcover.training.engines.allocation import allocate_workspace
from fedcover.training.engines.client_inputs import ClientInputs, JobResult, StepSignature
from fedcover.training.engines.compilation import (
    StepBackend,
    check_replayable,
    cudnn_benchmark,
    inductor_backend,
    on_stream,
    precision_context,
)
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.workspace import StepWorkspace
from fedcover.types import Task, Update

MAX_RUNNERS = 64
"""The number of runners that a cache keeps; the least recently used is dropped first."""

MIN_FREE_MEMORY = 0.15
"""The share of GPU memory that must be free before a runner is added; else old ones are dropped."""


@dataclass(slots=True, eq=False)
class StepRunner:
    """A workspace with a prepared step for each batch size.

    On CUDA a runner does all of its work on a stream of its own.

    Attributes:
        workspace: The tensors, and the step on them.
        backend: How steps are prepared.
        precision: What steps compute in.
        stream: The CUDA stream, or None on a CPU.
        steps: The prepared step of each batch size.
        batch_sizes: The batch size of each step that the loaded clients take.
    """

    workspace: StepWorkspace
    backend: StepBackend
    precision: str
    stream: Any = None
    steps: dict[int, Callable[[], None]] = field(default_factory=dict)
    batch_sizes: Sequence[int] = ()

    def load(self, clients: Sequence[ClientInputs]) -> None:
        """Load clients and prepare all steps that they need."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with on_stream(self.stream):
            self.workspace.load(clients)
            self.batch_sizes = self.workspace.batch_sizes()
            if self.prepare_steps(self.batch_sizes):
                self.workspace.load(clients)

    def prepare_steps(self, sizes: Iterable[int]) -> bool:
        """Prepare the steps of these batch sizes, unless they are prepared already.

        Returns:
            Whether a step was prepared. If so, the workspace must be loaded again.
        """
        new_sizes = [size for size in dict.fromkeys(sizes) if size not in self.steps]
        for size in new_sizes:
            with self._precision(), cudnn_benchmark():
                check_replayable(self.workspace, size)
                self.steps[size] = self.backend(self.workspace, size)
        return bool(new_sizes)

    def run_step(self, step: int) -> None:
        """Run one step; do nothing if the loaded clients have fewer steps."""
        if step < len(self.batch_sizes):
            with on_stream(self.stream), self._precision():
                self.steps[self.batch_sizes[step]]()

    def results(self) -> list[JobResult]:
        """Return the result of each loaded client."""
        with on_stream(self.stream):
            results = list(self.workspace.results())
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def _precision(self) -> AbstractContextManager[Any]:
        return precision_context(self.precision, self.workspace.tensors.x.device)


def run_steps(runners: Sequence[StepRunner]) -> None:
    """Run all steps of all runners, in turns, so that their streams overlap on a GPU."""
    for step in range(max(len(runner.batch_sizes) for runner in runners)):
        for runner in runners:
            runner.run_step(step)


def updates_or_raise(results: Iterable[JobResult]) -> Iterator[Update]:
    """Yield the updates; raise the error of the first client whose training diverged."""
    for _, result in results:
        if isinstance(result, TrainingDiverged):
            raise result
        yield result


@dataclass(slots=True, eq=False)
class RunnerCache:
    """The runners of one model, least recently used first.

    Attributes:
        model_key: Identifies the state of the model that the runners were made for.
        runners: The runners by all that they depend on.
        compile_error: Why the steps of this model cannot be compiled, once that is known.
    """

    model_key: object = None
    runners: OrderedDict[tuple[object, ...], StepRunner] = field(default_factory=OrderedDict)
    compile_error: str = ""

    def signatures(self) -> set[StepSignature]:
        """Return the signatures that there is a runner for."""
        return {runner.workspace.signature for runner in self.runners.values()}

    def stack_sizes(self, signature: StepSignature) -> list[int]:
        """Return the stack sizes that there is a runner for."""
        sizes = []
        for runner in self.runners.values():
            workspace = runner.workspace
            if workspace.signature == signature and workspace.stack_size:
                sizes.append(workspace.stack_size)
        return sizes

    def runner(
        self,
        clients: Sequence[ClientInputs],
        signature: StepSignature,
        stack_size: int | None,
        number: int,
        backend: StepBackend,
        precision: str,
    ) -> StepRunner:
        """Return a runner; create it if there is none.

        Args:
            clients: The clients to train. Their model and device are used to create the runner.
            signature: What the clients have in common.
            stack_size: How many clients train at once; None for one unstacked client.
            number: 0 for the first runner of this signature and size, 1 for the second, ...
            backend: How steps are prepared.
            precision: What steps compute in.
        """
        key = (signature, stack_size, number, backend, precision)
        if key not in self.runners:
            self._evict_runners(clients[0].device)
            self.runners[key] = _create_runner(
                clients[0], signature, stack_size, backend, precision
            )
        self.runners.move_to_end(key)
        return self.runners[key]

    def drop_unprepared(self) -> None:
        """Drop runners without a prepared step: a failed trial may have changed their modules."""
        unprepared = [key for key, runner in self.runners.items() if not runner.steps]
        for key in unprepared:
            del self.runners[key]

    def _evict_runners(self, device: torch.device) -> None:
        """Drop the least recently used runners until there is space for another one."""
        while self.runners and (len(self.runners) >= MAX_RUNNERS or _memory_is_short(device)):
            self.runners.popitem(last=False)


def _create_runner(
    client: ClientInputs,
    signature: StepSignature,
    stack_size: int | None,
    backend: StepBackend,
    precision: str,
) -> StepRunner:
    stream = None
    if client.device.type == "cuda":
        stream = torch.cuda.Stream(client.device)  # type: ignore[no-untyped-call]
    workspace = allocate_workspace(
        signature,
        client,
        stack_size,
        bf16=precision == "bf16",
        fused=backend is not inductor_backend,
    )
    autocast = "fp32" if workspace.step.bf16 else precision
    return StepRunner(workspace, backend, autocast, stream)


def _memory_is_short(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached < MIN_FREE_MEMORY * total


class RunnerPool:
    """The runner caches of all models in this process, each for as long as its model lives.

    A cache outlives the run that filled it, so that several runs of one module given in Python
    share their compiled steps and captured graphs: compiling takes 10 to 40 seconds. Runs of a
    model that an experiment names have a module each, so their caches end with them.
    """

    def __init__(self) -> None:
        self._caches: WeakKeyDictionary[nn.Module, RunnerCache] = WeakKeyDictionary()

    def cache_for(self, task: Task) -> RunnerCache:
        """Return the cache of a task's model, a new one if the model's Python state has changed."""
        module = task.model.module
        model_key = fingerprint(module), task.norm, task.scaler
        cache = self._caches.get(module)
        if cache is None or cache.model_key != model_key:
            cache = self._caches[module] = RunnerCache(model_key)
        return cache


RUNNER_POOL = RunnerPool()
"""The one pool of this process, which the fast engines share."""
