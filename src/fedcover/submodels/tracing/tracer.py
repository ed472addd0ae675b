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
from fedcover.submodels.build import is_told
from fedcover.submodels.tracing.arguments import in_places
from fedcover.submodels.tracing.calls import Call, by_name, tensors_in
from fedcover.submodels.tracing.masked_ops import TWINS
from fedcover.submodels.tracing.size_constraints import PROMISES, TOLD_PROMISES, keep
from fedcover.submodels.tracing.symbolic_sizes import Number, plain
from fedcover.submodels.tracing.unit_labels import Field, Labels
from fedcover.submodels.tracing.weighted_ops import apply, known

COUNTED = ("groups",)
"""Numbers of torch's layers that their tensors do not tell."""

LARGEST_NUMBER = 1 << 20
"""A number beyond this counts no units."""


@dataclass(frozen=True)
class Step:
    """A function that the module's code called, where, and the fields of what came out."""

    name: str
    where: str
    shape: torch.Size
    fields: list[Field]

    def __str__(self) -> str:
        return f"operation {self.name!r} in {self.where}"


@dataclass
class Notes:
    """What was seen while a module ran."""

    labels: Labels = field(default_factory=Labels)
    parameters: set[str] = field(default_factory=set)
    numbers: dict[str, Number] = field(default_factory=dict)
    moments: list[list[Field]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Place:
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
        return f"module {self.path!r} ({type(layer).__name__})" if self.path else f"the model ({type(layer).__name__})"


@contextmanager
def _own_errors(operation: str, place: Place) -> Iterator[None]:
    """Refuse a call that cannot be followed: it is not the module that failed."""
    try:
        yield
    except InvalidValue:
        raise
    except Exception as error:
        raise InvalidValue(
            f"tracing: fedcover cannot follow operation {operation!r} in {place} as it is called here "
            f"({type(error).__name__}: {error})"
        ) from error


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation below the level of the module's code."""

    def __init__(self, labels: Labels, place: Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        call = Call(func, given, out, str(self.place))
        with _own_errors(call.name, self.place):
            apply(self.labels, call)
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
        name = func.__name__
        if name in TWINS:
            with self.notes.labels.atoms.aside():
                source = in_places(name, args, given)[0][0]
                self.notes.moments.append(self.notes.labels.of(source))
        out = func(*plain(args), **plain(given))
        with self.notes.labels.atoms.aside(), _own_errors(name, self.place):
            return self._follow(name, *in_places(name, args, given), out)

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
        channels = vars(layer).get("num_features")
        if name == "instance_norm" and isinstance(channels, Number):
            keep(labels, out, [None, channels, *[None] * (out.ndim - 2)])
        if isinstance(out, Tensor):
            self.notes.steps.append(Step(name, str(self.place), out.shape, labels.of(out)))
        return out


def _length(labels: Labels, tensor: Tensor, axis: int) -> Number:
    """The length of an axis, which shrinks with the units that lie along it."""
    for found in labels.of(tensor):
        if found.shape[axis] > 1 and found.numel() == found.shape[axis]:
            return Number.of(labels.atoms, found.flatten())
    return Number.of(labels.atoms, torch.zeros(tensor.shape[axis], dtype=torch.int64))


def watch(module: nn.Module, example: tuple[Any, ...], constant: Collection[str] = ()) -> Notes:
    """Run a copy of a module on an example and note what belongs together; its inputs and outputs are fixed.

    The module's own numbers that are `constant` count nothing that could be cut.
    """
    notes = Notes()
    with torch.inference_mode(), seeded(0, "trace"):  # plain tensors that keep their identity through views
        twin = copy.deepcopy(module).train()
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            notes.labels.own(name, tensor)
        notes.parameters.update(name for name, _ in twin.named_parameters())
        _number(twin, notes, constant)
        place = Place(twin)
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


def _number(module: nn.Module, notes: Notes, constant: Collection[str]) -> None:
    """Replace the sizes that modules keep for their own code by numbers that remember what they count."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for key, value in list(vars(layer).items()):
            if not key.startswith("_") and (key in COUNTED or not is_told(layer)):
                _number_one(vars(layer), key, f"{path}.{key}" if path else key, notes, constant)
                if _is_plain_object(value) and id(value) not in seen:  # a configuration, which modules may share
                    seen.add(id(value))
                    for inner in list(vars(value)):
                        where = f"{path}.{key}.{inner}" if path else f"{key}.{inner}"
                        _number_one(vars(value), inner, where, notes, constant)


def _number_one(home: dict[str, Any], key: str, where: str, notes: Notes, constant: Collection[str]) -> None:
    atoms, value = notes.labels.atoms, home[key]
    if _is_size(value) and where not in constant:
        home[key] = notes.numbers[where] = Number.of(atoms, atoms.new(value))
    elif type(value) in (list, tuple) and value and all(map(_is_size, value)):
        sizes = {f"{where}.{i}": each for i, each in enumerate(value)}
        numbers = {name: Number.of(atoms, atoms.new(each)) for name, each in sizes.items() if name not in constant}
        home[key] = type(value)(numbers.get(name, each) for name, each in sizes.items())
        notes.numbers.update(numbers)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 < value < LARGEST_NUMBER


def _is_plain_object(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
