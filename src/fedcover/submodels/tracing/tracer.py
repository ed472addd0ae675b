"""Run a module once and note which units each of its tensors, numbers and outputs belongs to."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

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

COUNT_ATTRIBUTES = ("groups",)
"""Numbers of torch's layers that their tensors do not tell."""

MAX_SIZE = 1 << 20
"""A number beyond this counts no units."""


@dataclass(frozen=True)
class TracedOp:
    """A function that the module's code called, where, and the fields of what came out."""

    name: str
    location: str
    shape: torch.Size
    fields: list[Field]

    def __str__(self) -> str:
        return f"operation {self.name!r} in {self.location}"


@dataclass
class TraceRecord:
    """What was seen while a module ran."""

    labels: UnitLabels = field(default_factory=UnitLabels)
    parameters: set[str] = field(default_factory=set)
    tracked_sizes: dict[str, TrackedInt] = field(default_factory=dict)
    averaged_fields: list[list[Field]] = field(default_factory=list)
    traced_ops: list[TracedOp] = field(default_factory=list)


class ModuleStack:
    """Where in a module the run is: the path of the innermost module that is at work."""

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
        """The path of the innermost module."""
        return self.stack[-1]

    def __str__(self) -> str:
        layer = self.root.get_submodule(self.path)
        return (
            f"module {self.path!r} ({type(layer).__name__})"
            if self.path
            else f"the model ({type(layer).__name__})"
        )


@contextmanager
def _raise_untraceable(operation: str, module_stack: ModuleStack) -> Iterator[None]:
    """Refuse a call that cannot be followed: it is not the module that failed."""
    try:
        yield
    except InvalidValue:
        raise
    except Exception as error:
        raise InvalidValue(
            f"tracing: fedcover cannot follow operation {operation!r} in {module_stack} as it is called here "
            f"({type(error).__name__}: {error})"
        ) from error


class OperationTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation below the level of the module's code."""

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
        """Run an operation and follow it; one without a rule is taken apart where torch knows how."""
        if self.labels.atoms.tracking_paused:
            return func(*args, **(kwargs or {}))
        arguments = bind_arguments(func, args, kwargs or {})
        takes = any(tensors_in(value) for value in arguments.values())
        if not has_rule(func, takes):
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
    """Follows what the module's own code says about sizes."""

    def __init__(self, notes: TraceRecord, module_stack: ModuleStack) -> None:
        super().__init__()
        self.notes, self.module_stack = notes, module_stack

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with plain numbers; sizes that come out remember their axis."""
        arguments = dict(kwargs or {})
        if self.notes.labels.atoms.tracking_paused:
            return func(*args, **arguments)
        name = func.__name__
        if name in MASKED_OPS:
            with self.notes.labels.atoms.untracked():
                source = normalize_arguments(name, args, arguments)[0][0]
                self.notes.averaged_fields.append(self.notes.labels.of(source))
        out = func(*to_plain_ints(args), **to_plain_ints(arguments))
        with self.notes.labels.atoms.untracked(), _raise_untraceable(name, self.module_stack):
            return self._follow(name, *normalize_arguments(name, args, arguments), out)

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Keep what the call promises about sizes; what came out of it, sizes as numbers."""
        labels, layer = (
            self.notes.labels,
            self.module_stack.root.get_submodule(self.module_stack.path),
        )
        if isinstance(out, torch.Size):
            return torch.Size([_length(labels, args[0], axis) for axis in range(len(out))])
        if name == "size" and isinstance(out, int):
            return _length(
                labels, args[0], int(args[1] if len(args) > 1 else kwargs["dim"]) % args[0].ndim
            )
        promise = BUILTIN_LAYER_CONSTRAINTS.get(name) or (
            None if size_follows_tensors(layer) else SIZE_CONSTRAINTS.get(name)
        )
        if promise is not None:
            promise(labels, args, kwargs, out)
        channels = vars(layer).get("num_features")
        if name == "instance_norm" and isinstance(channels, TrackedInt):
            constrain_shape(labels, out, [None, channels, *[None] * (out.ndim - 2)])
        if isinstance(out, Tensor):
            self.notes.traced_ops.append(
                TracedOp(name, str(self.module_stack), out.shape, labels.of(out))
            )
        return out


def _length(labels: UnitLabels, tensor: Tensor, axis: int) -> TrackedInt:
    """The length of an axis, which shrinks with the units that lie along it."""
    for found in labels.of(tensor):
        if found.shape[axis] > 1 and found.numel() == found.shape[axis]:
            return TrackedInt.of(labels.atoms, found.flatten())
    return TrackedInt.of(labels.atoms, torch.zeros(tensor.shape[axis], dtype=torch.int64))


def record_trace(
    module: nn.Module, example: tuple[Any, ...], constant: Collection[str] = ()
) -> TraceRecord:
    """Run a copy of a module on an example and note what belongs together; its inputs and outputs are fixed.

    The module's own numbers that are `constant` count nothing that could be cut.
    """
    notes = TraceRecord()
    with (
        torch.inference_mode(),
        seeded(0, "trace"),
    ):  # plain tensors that keep their identity through views
        twin = copy.deepcopy(module).train()
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            notes.labels.register(name, tensor)
        notes.parameters.update(name for name, _ in twin.named_parameters())
        _track_sizes(twin, notes, constant)
        module_stack = ModuleStack(twin)
        try:
            with FunctionTracer(notes, module_stack), OperationTracer(notes.labels, module_stack):
                out = twin(
                    *[each.clone() if isinstance(each, Tensor) else each for each in example]
                )
        except InvalidValue:
            raise
        except Exception as error:
            raise InvalidValue(
                f"tracing: {module_stack} cannot run on the example: {error}"
            ) from error
        for each in tree_flatten(out)[0]:
            for found in notes.labels.of(each) if isinstance(each, Tensor) else ():
                notes.labels.atoms.fix(found)
    return notes


def _track_sizes(module: nn.Module, notes: TraceRecord, constant: Collection[str]) -> None:
    """Replace the sizes that modules keep for their own code by numbers that remember what they count."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for key, value in list(vars(layer).items()):
            if not key.startswith("_") and (
                key in COUNT_ATTRIBUTES or not size_follows_tensors(layer)
            ):
                _track_size(vars(layer), key, f"{path}.{key}" if path else key, notes, constant)
                if (
                    _is_plain_object(value) and id(value) not in seen
                ):  # a configuration, which modules may share
                    seen.add(id(value))
                    for inner in list(vars(value)):
                        location = f"{path}.{key}.{inner}" if path else f"{key}.{inner}"
                        _track_size(vars(value), inner, location, notes, constant)


def _track_size(
    home: dict[str, Any], key: str, location: str, notes: TraceRecord, constant: Collection[str]
) -> None:
    atoms, value = notes.labels.atoms, home[key]
    if _is_size(value) and location not in constant:
        home[key] = notes.tracked_sizes[location] = TrackedInt.of(atoms, atoms.new(value))
    elif type(value) in (list, tuple) and value and all(map(_is_size, value)):
        sizes = {f"{location}.{i}": each for i, each in enumerate(value)}
        tracked_sizes = {
            name: TrackedInt.of(atoms, atoms.new(each))
            for name, each in sizes.items()
            if name not in constant
        }
        home[key] = type(value)(tracked_sizes.get(name, each) for name, each in sizes.items())
        notes.tracked_sizes.update(tracked_sizes)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 < value < MAX_SIZE


def _is_plain_object(value: object) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | type)
        and not callable(value)
    )
