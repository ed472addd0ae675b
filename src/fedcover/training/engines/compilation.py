"""Prepare a step: run it eagerly, compile it, or capture it as a CUDA graph."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.log import log, warn_once
from fedcover.training.engines.buffers import StepBuffers
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

PRECISIONS = ("fp32", "tf32", "bf16")
"""What the inside of a step is computed in. Parameters, momentum and sums stay in float32 (or wider) always."""


StepBackend = Callable[[StepBuffers, int], Callable[[], None]]
"""From a lane and a batch size to a function that makes the next step; it may spoil what is in the lane."""


class CompileFailed(UnsupportedByEngine):
    """A step that the compiler does not take, or for which there is none: trying again would take seconds and fail."""


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
        enabled=True,
        benchmark=try_all,
        deterministic=not try_all,
        allow_tf32=torch.backends.cudnn.allow_tf32,
    )


def _check_replayable(step_buffers: StepBuffers, size: int) -> None:
    """Make one step as it stands; whatever goes wrong, any random draw and any trace in Python makes the lane unfit."""
    before, remembered = (
        _random_state(step_buffers.tensors.x.device),
        fingerprint(step_buffers.module),
    )
    step_buffers.rewind(size)
    with reraise_as_unsupported():
        step_buffers.step(step_buffers.tensors, step_buffers.schedules[size])
    if before != _random_state(step_buffers.tensors.x.device):
        raise UnsupportedByEngine("the model draws random numbers for each client (dropout)")
    try:
        now = fingerprint(step_buffers.module)
    except (
        UnsupportedByEngine
    ):  # it has kept something of the step that cannot be looked at outside
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
        raise UnsupportedByEngine(
            f"its step cannot be replayed ({type(error).__name__}: {why:.100})"
        ) from error


def _random_state(device: torch.device) -> tuple[object, ...]:
    """Where the generators stand that a model may draw from: torch's, Python's and NumPy's."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    numpys = np.random.get_state(legacy=False)["state"]
    return state.numpy().tobytes(), random.getstate(), numpys["key"].tobytes(), numpys["pos"]


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
        except (
            Exception
        ) as error:  # the step itself has been tried; tracing and compiling may fail in any way
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


def _compile(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    with warnings.catch_warnings(
        action="ignore"
    ):  # the compiler's own, which a user may have made errors
        return _compile_graph(step, leaves, options)


def _compile_graph(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import (
        compile as inductor,
    )  # takes a second to import, so not for those who do not compile

    graph = make_fx(step)(*leaves)
    failed = ""
    try:
        use_custom_kernels(graph.graph)
        graph.recompile()
    except Exception as error:  # building them may fail in any way
        failed = type(error).__name__
    for (
        node
    ) in graph.graph.nodes:  # what tracing noted of its tensors is in the way of a wrapper in C++
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
        raise UnsupportedByEngine(
            f"its step cannot be captured ({str(error).splitlines()[0]:.100})"
        ) from error
    return graph.replay
