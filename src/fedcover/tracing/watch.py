"""Run a module once and note which units each of its tensors, numbers and outputs belongs to."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fedcover.errors import InvalidValue
from fedcover.rng import seeded
from fedcover.submodel import is_told
from fedcover.tracing.calls import Call, by_name, tensors_in
from fedcover.tracing.labels import Field, Labels
from fedcover.tracing.layers import apply, known
from fedcover.tracing.numbers import Number, plain
from fedcover.tracing.promises import PROMISES, TOLD_PROMISES, keep

MOMENTS = frozenset(["layer_norm", "rms_norm", "mean"])
"""Functions that average over units: over those that are kept, so their masked twin must know which these are."""

COUNTED = ("groups",)
"""Numbers of torch's layers that their tensors do not tell."""

LARGEST_NUMBER = 1 << 20
"""A number beyond this counts no units."""


@dataclass
class Notes:
    """What was seen while a module ran."""

    labels: Labels = field(default_factory=Labels)
    numbers: dict[str, Number] = field(default_factory=dict)
    moments: list[list[Field]] = field(default_factory=list)
    outputs: list[tuple[str, torch.Size, list[Field]]] = field(default_factory=list)


class Place:
    """Where in a module the run is: the path of the innermost module that is at work."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.stack: list[str] = [""]

    def follow(self, finished: Callable[[str, Any], None]) -> None:
        """Keep track of the run with hooks on the module, and say what comes out of each part."""
        for path, layer in self.root.named_modules():
            layer.register_forward_pre_hook(lambda layer, args, path=path: self.stack.append(path))  # type: ignore[misc]
            layer.register_forward_hook(lambda layer, args, out, path=path: self._leave(path, out, finished))  # type: ignore[misc]

    def _leave(self, path: str, out: Any, finished: Callable[[str, Any], None]) -> None:
        self.stack.pop()
        finished(path, out)

    @property
    def path(self) -> str:
        """The path of the innermost module."""
        return self.stack[-1]

    def __str__(self) -> str:
        layer = self.root.get_submodule(self.path)
        return f"module {self.path!r} ({type(layer).__name__})" if self.path else f"the model ({type(layer).__name__})"


class Operations(TorchDispatchMode):
    """Follows every operation below the level of the module's code."""

    def __init__(self, labels: Labels, place: Place) -> None:
        super().__init__()
        self.labels, self.place = labels, place

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and follow it; one without a rule is taken apart where torch knows how."""
        if self.labels.atoms.busy:
            return func(*args, **(kwargs or {}))
        given = by_name(func, args, kwargs or {})
        takes = any(tensors_in(value) for value in given.values())
        if not known(func, takes):
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        apply(self.labels, Call(func, given, out, str(self.place)))
        return out


class Functions(TorchFunctionMode):
    """Follows what the module's own code says about sizes."""

    def __init__(self, notes: Notes, place: Place) -> None:
        super().__init__()
        self.notes, self.place = notes, place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function with plain numbers; sizes that come out remember their axis."""
        given = dict(kwargs or {})
        if self.notes.labels.atoms.busy:
            return func(*args, **given)
        if func.__name__ in MOMENTS:
            with self.notes.labels.atoms.aside():
                self.notes.moments.append(self.notes.labels.of(args[0]))
        out = func(*plain(args), **plain(given))
        with self.notes.labels.atoms.aside():
            return self._follow(func.__name__, args, given, out)

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Keep what the call promises about sizes; what came out of it, sizes as numbers."""
        labels, layer = self.notes.labels, self.place.root.get_submodule(self.place.path)
        if isinstance(out, torch.Size):
            return torch.Size([_length(labels, args[0], axis) for axis in range(len(out))])
        if name == "size" and isinstance(out, int):
            return _length(labels, args[0], int(args[1] if len(args) > 1 else kwargs["dim"]) % args[0].ndim)
        promise = TOLD_PROMISES.get(name) or (None if is_told(layer) else PROMISES.get(name))
        if promise is not None:
            promise(labels, args, kwargs, out)
        if name == "instance_norm" and isinstance(getattr(layer, "num_features", None), Number):
            keep(labels, out, [None, layer.num_features, *[None] * (out.ndim - 2)])
        return out


def _length(labels: Labels, tensor: Tensor, axis: int) -> Number:
    """The length of an axis, which shrinks with the units that lie along it."""
    for found in labels.of(tensor):
        if found.shape[axis] > 1 and found.numel() == found.shape[axis]:
            return Number.of(labels.atoms, found.flatten())
    return Number.of(labels.atoms, torch.zeros(tensor.shape[axis], dtype=torch.int64))


def watch(module: nn.Module, example: tuple[Any, ...]) -> Notes:
    """Run a copy of a module on an example and note what belongs together; its inputs and outputs are fixed."""
    notes = Notes()
    with torch.inference_mode(), seeded(0, "trace"):  # plain tensors that keep their identity through views
        twin = copy.deepcopy(module).train()
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            notes.labels.own(name, tensor)
        _number(twin, notes)
        place = Place(twin)
        place.follow(lambda path, out: _note_output(notes, path, out))
        try:
            with Functions(notes, place), Operations(notes.labels, place):
                out = twin(*[each.clone() if isinstance(each, Tensor) else each for each in example])
        except InvalidValue:
            raise
        except Exception as error:
            raise InvalidValue(f"tracing: {place} cannot run on the example: {error}") from error
        for each in tree_flatten(out)[0]:
            for found in notes.labels.of(each) if isinstance(each, Tensor) else ():
                notes.labels.atoms.fix(found)
    return notes


def _number(module: nn.Module, notes: Notes) -> None:
    """Replace the sizes that modules keep for their own code by numbers that remember what they count."""
    for path, layer in module.named_modules():
        for key, value in list(vars(layer).items()):
            if key.startswith("_") or (is_told(layer) and key not in COUNTED):
                continue
            where = f"{path}.{key}" if path else key
            if _is_size(value):
                vars(layer)[key] = notes.numbers[where] = Number.of(notes.labels.atoms, notes.labels.atoms.new(value))
            elif type(value) is tuple and value and all(map(_is_size, value)):
                listed = [Number.of(notes.labels.atoms, notes.labels.atoms.new(each)) for each in value]
                vars(layer)[key] = tuple(listed)
                notes.numbers.update({f"{where}.{i}": number for i, number in enumerate(listed)})


def _is_size(value: object) -> bool:
    return type(value) is int and 1 < value < LARGEST_NUMBER


def _note_output(notes: Notes, path: str, out: Any) -> None:
    with notes.labels.atoms.aside():
        if isinstance(out, Tensor):
            notes.outputs.append((path, out.shape, notes.labels.of(out)))
