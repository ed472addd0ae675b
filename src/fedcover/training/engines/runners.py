"""Places where clients train, kept from round to round: a lane, its stream, and steps that were made fast once.

`inductor_backend` is for the CPU: one function for a whole step. `cuda_graph_backend` is for CUDA: the kernels of a step as one graph.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fedcover.errors import TrainingDiverged
from fedcover.training.engines.buffers import (
    ClientInputs,
    JobResult,
    StepBuffers,
    StepSignature,
    allocate_buffers,
)
from fedcover.training.engines.compilation import (
    StepBackend,
    _check_replayable,
    cudnn_benchmark,
    inductor_backend,
    on_stream,
    precision_context,
)
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.types import Task, Update

MAX_RUNNERS = 64
"""Places that a pool keeps; the one that was used longest ago goes first."""

MIN_FREE_MEMORY = 0.15
"""The share of a GPU's memory that must be free before a place is added; else places that wait for clients go."""


@dataclass(slots=True, eq=False)
class StepRunner:
    """A lane with its fast steps, one for each batch size; on CUDA everything in it happens on its own stream."""

    step_buffers: StepBuffers
    backend: StepBackend
    precision: str
    stream: Any = None
    steps: dict[int, Callable[[], None]] = field(default_factory=dict)
    batch_sizes: Sequence[int] = ()

    def load(self, clients: Sequence[ClientInputs]) -> None:
        """Let clients in, and see to it that all of their steps can be made."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with on_stream(self.stream):
            self.step_buffers.load(clients)
            self.batch_sizes = self.step_buffers.batch_sizes()
            if self.prepare_steps(self.batch_sizes):
                self.step_buffers.load(clients)

    def prepare_steps(self, sizes: Iterable[int]) -> bool:
        """Make steps of these batch sizes fast, if they are not; whether that has spoilt what is in the lane."""
        new = [size for size in dict.fromkeys(sizes) if size not in self.steps]
        for size in new:
            with (
                precision_context(self.precision, self.step_buffers.tensors.x.device),
                cudnn_benchmark(),
            ):
                _check_replayable(self.step_buffers, size)
                self.steps[size] = self.backend(self.step_buffers, size)
        return bool(new)

    def run_step(self, step: int) -> None:
        """Make a step, if the clients here have so many."""
        if step < len(self.batch_sizes):
            with (
                on_stream(self.stream),
                precision_context(self.precision, self.step_buffers.tensors.x.device),
            ):
                self.steps[self.batch_sizes[step]]()

    def results(self) -> list[JobResult]:
        """What comes of the clients here."""
        with on_stream(self.stream):
            made = list(self.step_buffers.results())
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return made


# ── making steps fast ───────────────────────────────────────────────────────────────────────────────────


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class RunnerCache:
    """The places of one model, those used last at the end; and why its steps cannot be compiled, once that is known.

    `model_key` is what the model was when the first place was made; what was prepared for it serves no other.
    """

    model_key: object = None
    runners: OrderedDict[tuple[object, ...], StepRunner] = field(default_factory=OrderedDict)
    compile_error: str = ""

    def stack_sizes(self, signature: StepSignature) -> list[int]:
        """The sizes of crews that there is a place for."""
        return [
            runner.step_buffers.stack_size
            for runner in self.runners.values()
            if runner.step_buffers.signature == signature and runner.step_buffers.stack_size
        ]

    def runner(
        self,
        clients: Sequence[ClientInputs],
        signature: StepSignature,
        stack_size: int | None,
        number: int,
        backend: StepBackend,
        precision: str,
    ) -> StepRunner:
        """The place for clients of a shape (the first, second, ... for as many at once), made if there is none."""
        key = (signature, stack_size, number, backend, precision)
        if key not in self.runners:
            device = next(iter(clients[0].params.values())).device
            self._evict_runners(device)
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            step_buffers = allocate_buffers(
                signature,
                clients[0],
                stack_size,
                bf16=precision == "bf16",
                fused=backend is not inductor_backend,
            )
            self.runners[key] = StepRunner(
                step_buffers, backend, "fp32" if step_buffers.step.bf16 else precision, stream
            )
        self.runners.move_to_end(key)
        return self.runners[key]

    def drop_unprepared(self) -> None:
        """Drop places whose steps could not be made: their modules may hold what is left of the trial."""
        for key in [key for key, runner in self.runners.items() if not runner.steps]:
            del self.runners[key]

    def _evict_runners(self, device: torch.device) -> None:
        def short() -> bool:
            if device.type != "cuda":
                return False
            free, total = torch.cuda.mem_get_info(device)
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return free + idle < MIN_FREE_MEMORY * total

        while self.runners and (len(self.runners) >= MAX_RUNNERS or short()):
            self.runners.popitem(last=False)


_RUNNER_CACHES: WeakKeyDictionary[nn.Module, RunnerCache] = WeakKeyDictionary()


def get_runner_cache(task: Task) -> RunnerCache:
    """The pool that belongs to a task's global model, for as long as it lives and is not changed in Python."""
    module = task.model.module
    model_key = fingerprint(module), task.norm, task.scaler
    if module not in _RUNNER_CACHES or _RUNNER_CACHES[module].model_key != model_key:
        _RUNNER_CACHES[module] = RunnerCache(model_key)
    return _RUNNER_CACHES[module]


def run_steps(runners: Sequence[StepRunner]) -> None:
    """All steps of all places, in turn, so that on a GPU their streams fill it together."""
    for step in range(max(len(runner.batch_sizes) for runner in runners)):
        for runner in runners:
            runner.run_step(step)


def raise_on_divergence(results: Iterable[JobResult]) -> Iterator[Update]:
    """The updates; the first client that has diverged ends it."""
    for _, result in results:
        if isinstance(result, TrainingDiverged):
            raise result
        yield result
