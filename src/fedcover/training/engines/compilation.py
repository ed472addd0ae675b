"""Prepare a step so that it can be replayed: eagerly, compiled (CPU) or as a CUDA graph.

Each way is a `StepBackend`. To add one, write a function with that signature and let
`batched.load_stack_runners` or `streams.load_client_runners` choose it.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.log import log, warn_once
from fedcover.tensors import tree_leaves, tree_map
from fedcover.training.engines.cpu_kernels import use_custom_kernels
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.sgd_step import observes_gradients
from fedcover.training.engines.step_tensors import BatchSchedule, StepTensors
from fedcover.training.engines.unsupported import (
    CompileFailed,
    UnsupportedByEngine,
    reraise_as_unsupported,
)
from fedcover.training.engines.workspace import StepWorkspace

PRECISIONS = ("fp32", "tf32", "bf16")
"""What the model computes in. Parameters, momentum and sums are in float32 or wider always."""

StepBackend = Callable[[StepWorkspace, int], Callable[[], None]]
"""Turn a workspace and a batch size into a function that does the next step.

A backend may run steps while it prepares, so the workspace must be loaded again afterwards.
"""

_INDUCTOR_OPTIONS: tuple[dict[str, Any], ...] = (
    {"cpp_wrapper": True, "size_asserts": False},  # faster to call, but not always possible
    {},
)


# ── the context of a step ───────────────────────────────────────────────────────────────────────


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Make a CUDA stream current; do nothing if it is None.

    On a CPU there is no stream, and asking torch for one takes longer than a kernel.
    """
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def precision_context(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Enable autocast for bf16. Whether float32 means tf32 is a setting of the machine."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def cudnn_benchmark() -> AbstractContextManager[Any]:
    """Let cuDNN measure its kernels and take the fastest, unless results must repeat exactly."""
    benchmark = not torch.are_deterministic_algorithms_enabled()
    return torch.backends.cudnn.flags(
        enabled=True,
        benchmark=benchmark,
        deterministic=not benchmark,
        allow_tf32=torch.backends.cudnn.allow_tf32,
    )


# ── whether a step can be replayed ──────────────────────────────────────────────────────────────


def check_replayable(workspace: StepWorkspace, size: int) -> None:
    """Run one step eagerly and check that it leaves no trace outside the step tensors.

    Raises:
        UnsupportedByEngine: If the step fails, draws random numbers, or changes Python state.
    """
    device = workspace.tensors.x.device
    random_state = _random_state(device)
    model_state = fingerprint(workspace.module)
    workspace.rewind(size)
    with reraise_as_unsupported():
        workspace.step(workspace.tensors, workspace.schedules[size])
    if random_state != _random_state(device):
        raise UnsupportedByEngine("the model draws random numbers for each client (dropout)")
    try:
        unchanged = fingerprint(workspace.module) == model_state
    except UnsupportedByEngine:  # the module kept an object of the step that has no fingerprint
        unchanged = False
    if not unchanged:
        raise UnsupportedByEngine(
            "the model changes its Python state in forward, which a replayed step would miss"
        )


def _random_state(device: torch.device) -> tuple[object, ...]:
    """Return the states of all generators that a model may draw from."""
    if device.type == "cuda":
        torch_state = torch.cuda.get_rng_state(device)
    else:
        torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state(legacy=False)["state"]
    return (
        torch_state.numpy().tobytes(),
        random.getstate(),
        numpy_state["key"].tobytes(),
        numpy_state["pos"],
    )


# ── backends ────────────────────────────────────────────────────────────────────────────────────


def eager_backend(workspace: StepWorkspace, size: int) -> Callable[[], None]:
    """Return the step as it is."""
    return lambda: workspace.step(workspace.tensors, workspace.schedules[size])


def inductor_backend(workspace: StepWorkspace, size: int) -> Callable[[], None]:
    """Return the step as one function compiled for the CPU.

    The step is first traced to a list of tensor operations, so a model or a recipe may use any
    Python. The compiler gets this list directly, not through `torch.compile`, whose guards would
    check in every call that the tensors are still the same. They always are.

    Only full batches are compiled: the few rows that remain are not worth the time.
    """
    if size != workspace.signature.local.batch_size:
        return eager_backend(workspace, size)
    _log_compilation(workspace)
    fields_of_step = (
        _field_values(workspace.tensors),
        _field_values(workspace.schedules[size]),
    )
    leaves = tree_leaves(fields_of_step)

    def step(*inputs: Tensor) -> tuple[()]:
        remaining = iter(inputs)
        tensors, schedule = tree_map(lambda _: next(remaining), fields_of_step)
        workspace.step.compute(StepTensors(*tensors), BatchSchedule(*schedule))
        return ()

    compiled = _compile_and_try(workspace, size, step, leaves)
    if not observes_gradients(workspace.signature.recipe):
        return lambda: compiled(*leaves)

    def step_and_update_carry() -> None:
        compiled(*leaves)
        workspace.step.update_carry(workspace.tensors)

    return step_and_update_carry


def cuda_graph_backend(workspace: StepWorkspace, size: int) -> Callable[[], None]:
    """Return the replay of a CUDA graph of the step. The graph keeps its memory to itself."""
    workspace.rewind(size)
    # run it once more: `check_replayable` made cuDNN choose kernels and allocate workspaces
    workspace.step(workspace.tensors, workspace.schedules[size])
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            workspace.step(workspace.tensors, workspace.schedules[size])
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise UnsupportedByEngine(f"its step cannot be captured ({first_line:.100})") from error
    return graph.replay


# ── compiling ───────────────────────────────────────────────────────────────────────────────────


def _log_compilation(workspace: StepWorkspace) -> None:
    num_params = sum(prod(shape) for _, shape in workspace.signature.param_shapes)
    log.info(
        "engine: compiling, once, the step of %d clients with %s parameters each",
        workspace.stack_size or 1,
        f"{num_params:,}",
    )


def _field_values(record: StepTensors | BatchSchedule) -> tuple[Any, ...]:
    return tuple(getattr(record, field.name) for field in fields(record))


def _compile_and_try(
    workspace: StepWorkspace,
    size: int,
    step: Callable[..., tuple[()]],
    leaves: Sequence[Tensor],
) -> Callable[..., Any]:
    """Compile a step with the first options under which it runs."""
    reason = ""
    for options in _INDUCTOR_OPTIONS:
        try:
            workspace.rewind(size)
            compiled = _compile(step, leaves, dict(options))
            workspace.rewind(size)
            compiled(*leaves)
        except Exception as error:  # the step itself works: `check_replayable` has run it
            reason = type(error).__name__
        else:
            return compiled
    raise CompileFailed(f"the step cannot be compiled ({reason})")


def _compile(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    # the compiler warns, and a user may have turned warnings into errors
    with warnings.catch_warnings(action="ignore"):
        return _compile_graph(step, leaves, options)


def _compile_graph(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import compile as inductor  # takes a second to import

    module = make_fx(step)(*leaves)
    kernel_error = _insert_cpu_kernels(module)
    for node in module.graph.nodes:  # the C++ wrapper rejects the tensors that tracing noted
        node.meta.clear()
    compiled: Callable[..., Any] = inductor(module, list(leaves), options)
    if kernel_error:  # only now: without a compiler, the missing kernels are not the reason
        warn_once(
            f"kernels for small products cannot be built ({kernel_error}), so torch's are used"
        )
    return compiled


def _insert_cpu_kernels(module: GraphModule) -> str:
    """Use our own CPU kernels in a traced step; return what went wrong, if anything did."""
    try:
        use_custom_kernels(module.graph)
        module.recompile()
    except Exception as error:  # building C++ code may fail in any way
        return type(error).__name__
    return ""
