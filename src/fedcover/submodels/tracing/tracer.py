"""Run a module once and record which units its tensors, numbers and outputs depend on.

`unit_labels` defines atoms and fields.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedcover.errors import InvalidValue
from fedcover.rng import seeded
from fedcover.submodels.build import size_follows_tensors
from fedcover.submodels.tracing.arguments import normalize_arguments
from fedcover.submodels.tracing.calls import OpCall, bind_arguments, tensors_in
from fedcover.submodels.tracing.masked_ops import MASKED_OPS
from fedcover.submodels.tracing.size_constraints import (
    BUILTIN_LAYER_CONSTRAINTS,
    SIZE_CONSTRAINTS,
    constrain_shape,
)
from fedcover.submodels.tracing.symbolic_sizes import TrackedInt, to_plain_ints
from fedcover.submodels.tracing.unit_labels import Field, UnitLabels
from fedcover.submodels.tracing.weighted_ops import has_rule, propagate
from fedcover.tensors import tree_leaves

COUNT_ATTRIBUTES = ("groups",)
"""Attributes of torch's layers that count units but cannot be read from their tensors."""

MAX_SIZE = 1 << 20
"""Integers from here on are not treated as sizes."""


@dataclass(frozen=True)
class TracedOp:
    """A function that the module's code called, its location, and the fields of its result."""

    name: str
    location: str
    shape: torch.Size
    fields: list[Field]

    def __str__(self) -> str:
        return f"operation {self.name!r} in {self.location}"


@dataclass
class TraceRecord:
    """What was recorded while a module ran.

    `tracked_sizes` are the module's own numbers by location. `averaged_fields` are the fields of
    the inputs of averaging functions, in the order of the calls.
    """

    labels: UnitLabels = field(default_factory=UnitLabels)
    parameters: set[str] = field(default_factory=set)
    tracked_sizes: dict[str, TrackedInt] = field(default_factory=dict)
    averaged_fields: list[list[Field]] = field(default_factory=list)
    traced_ops: list[TracedOp] = field(default_factory=list)


class ModuleStack:
    """The path of the innermost module that is currently running."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.stack: list[str] = [""]
        for path, layer in root.named_modules():
            layer.register_forward_pre_hook(partial(self._enter, path))
            layer.register_forward_hook(self._leave)

    def _enter(self, path: str, layer: nn.Module, args: Any) -> None:
        self.stack.append(path)

    def _leave(self, layer: nn.Module, args: Any, out: Any) -> None:
        self.stack.pop()

    @property
    def path(self) -> str:
        """Return the path of the innermost module."""
        return self.stack[-1]

    @property
    def layer(self) -> nn.Module:
        """Return the innermost module."""
        return self.root.get_submodule(self.path)

    def __str__(self) -> str:
        kind = type(self.layer).__name__
        return f"module {self.path!r} ({kind})" if self.path else f"the model ({kind})"


@contextmanager
def _raise_untraceable(operation: str, module_stack: ModuleStack) -> Iterator[None]:
    """Report an error in a rule as a call that cannot be traced, not as the module's error."""
    try:
        yield
    except InvalidValue:
        raise
    except Exception as error:
        raise InvalidValue(
            f"tracing: fedcover cannot follow operation {operation!r} in {module_stack} "
            f"as it is called here ({type(error).__name__}: {error})"
        ) from error


class OperationTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Trace every ATen operation, below the level of the module's code."""

    def __init__(self, labels: UnitLabels, module_stack: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels, self.module_stack = labels, module_stack

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and apply its rule; decompose it if there is no rule and torch can."""
        if self.labels.atoms.tracking_paused:
            return func(*args, **(kwargs or {}))
        arguments = bind_arguments(func, args, kwargs or {})
        has_inputs = any(tensors_in(value) for value in arguments.values())
        if not has_rule(func, has_inputs):
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        call = OpCall(func, arguments, out, str(self.module_stack))
        with _raise_untraceable(call.name, self.module_stack):
            propagate(self.labels, call)
        return out


class FunctionTracer(TorchFunctionMode):
    """Trace the sizes in the module's own code."""

    def __init__(self, record: TraceRecord, module_stack: ModuleStack) -> None:
        super().__init__()
        self.record, self.module_stack = record, module_stack

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with ordinary ints; sizes in its result are tracked."""
        arguments = dict(kwargs or {})
        atoms = self.record.labels.atoms
        if atoms.tracking_paused:
            return func(*args, **arguments)
        name = func.__name__
        if name in MASKED_OPS:
            with atoms.untracked():
                source = normalize_arguments(name, args, arguments)[0][0]
                self.record.averaged_fields.append(self.record.labels.of(source))
        out = func(*to_plain_ints(args), **to_plain_ints(arguments))
        with atoms.untracked(), _raise_untraceable(name, self.module_stack):
            normalized = normalize_arguments(name, args, arguments)
            tracked_out = self._apply_constraints(name, *normalized, out)
            self._record_op(name, out)
            return tracked_out

    def _apply_constraints(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Apply the size constraints of a call and return its result, with sizes tracked."""
        labels, layer = self.record.labels, self.module_stack.layer
        if isinstance(out, torch.Size):
            return torch.Size([_axis_length(labels, args[0], axis) for axis in range(len(out))])
        if name == "size" and isinstance(out, int):
            axis = args[1] if len(args) > 1 else kwargs["dim"]
            return _axis_length(labels, args[0], int(axis % args[0].ndim))
        constraint = BUILTIN_LAYER_CONSTRAINTS.get(name)
        if constraint is None and not size_follows_tensors(layer):
            constraint = SIZE_CONSTRAINTS.get(name)
        if constraint is not None:
            constraint(labels, args, kwargs, out)
        channels = vars(layer).get("num_features")
        if name == "instance_norm" and isinstance(channels, TrackedInt):
            constrain_shape(labels, out, [None, channels, *[None] * (out.ndim - 2)])
        return out

    def _record_op(self, name: str, out: Any) -> None:
        """Record a call whose result is a tensor."""
        if isinstance(out, Tensor):
            fields = self.record.labels.of(out)
            operation = TracedOp(name, str(self.module_stack), out.shape, fields)
            self.record.traced_ops.append(operation)


def _axis_length(labels: UnitLabels, tensor: Tensor, axis: int) -> TrackedInt:
    """Return the length of an axis, which shrinks with the units along it."""
    length = tensor.shape[axis]
    for unit_field in labels.of(tensor):
        if unit_field.shape[axis] > 1 and unit_field.numel() == unit_field.shape[axis]:
            return TrackedInt.of(labels.atoms, unit_field.flatten())
    return TrackedInt.of(labels.atoms, torch.zeros(length, dtype=torch.int64))


def record_trace(
    module: nn.Module, example: tuple[Any, ...], constant: Collection[str] = ()
) -> TraceRecord:
    """Run a copy of a module on an example and record which indices are coupled.

    The module's inputs and outputs cannot be cut. Its own numbers named in `constant` count nothing
    that can be cut.
    """
    record = TraceRecord()
    # in inference mode tensors are plain, and keep their identity through views
    with torch.inference_mode(), seeded(0, "trace"):
        traced = copy.deepcopy(module).train()
        for name, tensor in [*traced.named_parameters(), *traced.named_buffers()]:
            record.labels.register(name, tensor)
        record.parameters.update(name for name, _ in traced.named_parameters())
        _track_sizes(traced, record, constant)
        module_stack = ModuleStack(traced)
        try:
            with FunctionTracer(record, module_stack), OperationTracer(record.labels, module_stack):
                out = traced(*copy_inputs(example))
        except InvalidValue:
            raise
        except Exception as error:
            raise InvalidValue(
                f"tracing: {module_stack} cannot run on the example: {error}"
            ) from error
        for output in tree_leaves(out):
            if isinstance(output, Tensor):
                for output_field in record.labels.of(output):
                    record.labels.atoms.fix(output_field)
    return record


def copy_inputs(inputs: Iterable[Any]) -> list[Any]:
    """Return the inputs with every tensor cloned, so that a module cannot change the originals."""
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


def _track_sizes(module: nn.Module, record: TraceRecord, constant: Collection[str]) -> None:
    """Replace the sizes that modules store for their own code by tracked integers."""
    seen_objects: set[int] = set()
    for path, layer in module.named_modules():
        follows_tensors = size_follows_tensors(layer)
        for key, value in list(vars(layer).items()):
            if key.startswith("_") or (follows_tensors and key not in COUNT_ATTRIBUTES):
                continue
            location = f"{path}.{key}" if path else key
            _track_size(vars(layer), key, location, record, constant)
            # a configuration object may be shared by several modules
            if _is_plain_object(value) and id(value) not in seen_objects:
                seen_objects.add(id(value))
                for name in list(vars(value)):
                    _track_size(vars(value), name, f"{location}.{name}", record, constant)


def _track_size(
    attributes: dict[str, Any],
    key: str,
    location: str,
    record: TraceRecord,
    constant: Collection[str],
) -> None:
    """Replace one attribute, if it is a size or a sequence of sizes."""
    atoms, value = record.labels.atoms, attributes[key]
    if _is_size(value) and location not in constant:
        size = TrackedInt.of(atoms, atoms.new(value))
        attributes[key] = record.tracked_sizes[location] = size
    elif type(value) in (list, tuple) and value and all(map(_is_size, value)):
        sizes: list[int] = []
        for i, element in enumerate(value):
            name = f"{location}.{i}"
            if name in constant:
                sizes.append(element)
            else:
                size = TrackedInt.of(atoms, atoms.new(element))
                record.tracked_sizes[name] = size
                sizes.append(size)
        attributes[key] = type(value)(sizes)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 < value < MAX_SIZE


def _is_plain_object(value: object) -> bool:
    """Return whether a value is an object with attributes, such as a model's configuration."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return False
    return hasattr(value, "__dict__")
