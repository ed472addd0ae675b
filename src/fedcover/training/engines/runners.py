"""Places where clients train, kept from round to round: a lane, its stream, and steps that were made fast once.

`inductor_backend` is for the CPU: one function for a whole step. `cuda_graph_backend` is for CUDA: the kernels of a step as one graph.
"""

import logging
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.errors import TrainingDiverged
from fedcover.training.engines.buffers import ClientInputs, JobResult, StepBuffers, StepSignature, allocate_buffers
from fedcover.training.engines.cpu_kernels import use_custom_kernels
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.sgd_step import (
    BatchSchedule,
    StepTensors,
    UnsupportedByEngine,
    observes_gradients,
    tree_leaves,
    tree_map,
)
from fedcover.types import Task, Update

log = logging.getLogger("fedcover")
_WARNED: set[str] = set()

PRECISIONS = ("fp32", "tf32", "bf16")
"""What the inside of a step is computed in. Parameters, momentum and sums stay in float32 (or wider) always."""

MAX_RUNNERS = 64
"""Places that a pool keeps; the one that was used longest ago goes first."""

MIN_FREE_MEMORY = 0.15
"""The share of a GPU's memory that must be free before a place is added; else places that wait for clients go."""

StepBackend = Callable[[StepBuffers, int], Callable[[], None]]
"""From a lane and a batch size to a function that makes the next step; it may spoil what is in the lane."""


class CompileFailed(UnsupportedByEngine):
    """A step that the compiler does not take, or for which there is none: trying again would take seconds and fail."""


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
            with precision_context(self.precision, self.step_buffers.tensors.x.device), cudnn_benchmark():
                _check_replayable(self.step_buffers, size)
                self.steps[size] = self.backend(self.step_buffers, size)
        return bool(new)

    def run_step(self, step: int) -> None:
        """Make a step, if the clients here have so many."""
        if step < len(self.batch_sizes):
            with on_stream(self.stream), precision_context(self.precision, self.step_buffers.tensors.x.device):
                self.steps[self.batch_sizes[step]]()

    def results(self) -> list[JobResult]:
        """What comes of the clients here."""
        with on_stream(self.stream):
            made = list(self.step_buffers.results())
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return made


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Do what follows on a CUDA stream; on a CPU there is none, and asking torch for it takes longer than a kernel."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def precision_context(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Compute in bf16 where that is asked for; whether float32 means tf32 is the machine's setting."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def cudnn_benchmark() -> AbstractContextManager[Any]:
    """Let cuDNN try its kernels and take the fastest, unless runs must repeat bit for bit."""
    try_all = not torch.are_deterministic_algorithms_enabled()
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=try_all, deterministic=not try_all, allow_tf32=torch.backends.cudnn.allow_tf32
    )


def _check_replayable(step_buffers: StepBuffers, size: int) -> None:
    """Make one step as it stands; whatever goes wrong, any random draw and any trace in Python makes the lane unfit."""
    before, remembered = _random_state(step_buffers.tensors.x.device), fingerprint(step_buffers.module)
    step_buffers.rewind(size)
    with reraise_as_unsupported():
        step_buffers.step(step_buffers.tensors, step_buffers.schedules[size])
    if before != _random_state(step_buffers.tensors.x.device):
        raise UnsupportedByEngine("the model draws random numbers for each client (dropout)")
    try:
        now = fingerprint(step_buffers.module)
    except UnsupportedByEngine:  # it has kept something of the step that cannot be looked at outside
        now = b""
    if remembered != now:
        raise UnsupportedByEngine(
            "the model changes what it holds in Python while it computes, which a step in place would miss"
        )


@contextmanager
def reraise_as_unsupported() -> Iterator[None]:
    """A step of an own module may raise anything; `sequential` will raise it again if it matters."""
    try:
        yield
    except UnsupportedByEngine:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise UnsupportedByEngine(f"its step cannot be replayed ({type(error).__name__}: {why:.100})") from error


def _random_state(device: torch.device) -> tuple[object, ...]:
    """Where the generators stand that a model may draw from: torch's, Python's and NumPy's."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    numpys = np.random.get_state(legacy=False)["state"]
    return state.numpy().tobytes(), random.getstate(), numpys["key"].tobytes(), numpys["pos"]


# ── making steps fast ───────────────────────────────────────────────────────────────────────────────────


def eager_backend(step_buffers: StepBuffers, size: int) -> Callable[[], None]:
    """The step as it stands."""
    return lambda: step_buffers.step(step_buffers.tensors, step_buffers.schedules[size])


def inductor_backend(step_buffers: StepBuffers, size: int) -> Callable[[], None]:
    """The step as one compiled function; a rest of a few rows is not worth compiling.

    It is traced to a list of operations on the lane's tensors first, whatever Python a model and a recipe are made of.
    The compiler gets that list itself, not through `torch.compile`, which would look at each call anew: these tensors
    stay what they are.
    """
    plain = eager_backend(step_buffers, size)
    if size != step_buffers.signature.local.batch_size:
        return plain
    tree = _field_values(step_buffers.tensors), _field_values(step_buffers.schedules[size])
    leaves = tree_leaves(tree)
    numbers = sum(prod(shape) for _, shape in step_buffers.signature.param_shapes)
    log.info(
        "engine: compiling, once, the step of %d clients with %s parameters each",
        step_buffers.stack_size or 1,
        f"{numbers:,}",
    )

    def step(*inputs: Tensor) -> tuple[()]:
        following = iter(inputs)
        tensors, schedule = tree_map(lambda _: next(following), tree)
        step_buffers.step.compute(StepTensors(*tensors), BatchSchedule(*schedule))
        return ()

    for wrapper in ({"cpp_wrapper": True, "size_asserts": False}, {}):
        try:
            step_buffers.rewind(size)
            fast = _compile(step, leaves, wrapper)
            step_buffers.rewind(size)
            fast(*leaves)
        except Exception as error:  # the step itself has been tried; tracing and compiling may fail in any way
            failed = type(error).__name__
        else:
            break
    else:
        raise CompileFailed(f"the step cannot be compiled ({failed})")
    if not observes_gradients(step_buffers.signature.recipe):
        return lambda: fast(*leaves)

    def step_and_update_carry() -> None:
        fast(*leaves)
        step_buffers.step.update_carry(step_buffers.tensors)

    return step_and_update_carry


def _compile(step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    with warnings.catch_warnings(action="ignore"):  # the compiler's own, which a user may have made errors
        return _compile_graph(step, leaves, options)


def _compile_graph(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import compile as inductor  # takes a second to import, so not for those who do not compile

    graph = make_fx(step)(*leaves)
    failed = ""
    try:
        use_custom_kernels(graph.graph)
        graph.recompile()
    except Exception as error:  # building them may fail in any way
        failed = type(error).__name__
    for node in graph.graph.nodes:  # what tracing noted of its tensors is in the way of a wrapper in C++
        node.meta.clear()
    fast: Callable[..., Any] = inductor(graph, list(leaves), options)
    if failed:  # said now: without any compiler it would be the lesser half of the truth
        warn_once(f"kernels for small products cannot be built ({failed}), so torch's are used")
    return fast


def _field_values(record: StepTensors | BatchSchedule) -> tuple[Any, ...]:
    return tuple(getattr(record, field.name) for field in fields(record))


def cuda_graph_backend(step_buffers: StepBuffers, size: int) -> Callable[[], None]:
    """The kernels of a step as a CUDA graph; its memory belongs to the lane and is not given back in between."""
    step_buffers.rewind(size)
    step_buffers.step(
        step_buffers.tensors, step_buffers.schedules[size]
    )  # once more: by now all workspaces and choices of kernels are made
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step_buffers.step(step_buffers.tensors, step_buffers.schedules[size])
    except RuntimeError as error:
        raise UnsupportedByEngine(f"its step cannot be captured ({str(error).splitlines()[0]:.100})") from error
    return graph.replay


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
                signature, clients[0], stack_size, bf16=precision == "bf16", fused=backend is not inductor_backend
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


def warn_once(reason: str) -> None:
    """Tell the log why something is not as fast as it could be, once."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        log.warning("engine: %s", reason)
