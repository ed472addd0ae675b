"""A client's part of the model: structured `Slices` (really smaller) and unstructured `Masks`.

A unit that is cut disappears from every tensor in which it appears. What no group cuts, every client holds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.groups import cuts_by_tensor, positions, units_kept
from fedcover.rng import generator
from fedcover.slabs import Slab, joined, zeros
from fedcover.types import Params, Reduction, UnitGroup

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Slices:
    """The units that are kept of each group (sorted), and the tensors cut down to them.

    `draw` names the (share, key) of a random draw, so that it can travel as two numbers.
    """

    groups: tuple[UnitGroup, ...]
    kept: Mapping[str, Tensor]
    draw: tuple[float, int] | None = None

    @cached_property
    def _cuts(self) -> dict[str, list[tuple[int, Tensor, int, int]]]:
        """Per tensor: (axis, kept positions, start and end of the range that the group owns)."""
        return {
            tensor: [
                (
                    cut.axis,
                    positions(cut, self.kept[group.name]),
                    cut.start,
                    cut.start + group.size * cut.per_unit,
                )
                for group, cut in meeting
                if cut.axis is not None
            ]
            for tensor, meeting in cuts_by_tensor(self.groups).items()
        }

    @cached_property
    def _indices(self) -> dict[tuple[object, ...], tuple[Index, ...]]:
        return {}

    @cached_property
    def absent(self) -> frozenset[str]:
        """The tensors that go with a unit that is cut: the client has nothing of them."""
        return frozenset(
            cut.tensor
            for group in self.groups
            for cut in group.cuts
            if cut.axis is None and cut.unit not in self.kept[group.name].tolist()
        )

    def region(self, name: str, shape: Sequence[int], device: torch.device | None = None) -> tuple[Index, ...]:
        """What is kept along each axis of a tensor: a plain slice where it can be one, else positions."""
        key = (name, tuple(shape), device)
        if device is not None and key not in self._indices:  # sent there once, not for every use
            here = self.region(name, shape)
            self._indices[key] = tuple(part.to(device) if isinstance(part, Tensor) else part for part in here)
        elif key not in self._indices:
            kept_by_axis = [torch.ones(length, dtype=torch.bool) for length in shape]
            for axis, kept, start, end in self._cuts.get(name, ()):
                kept_by_axis[axis][start:end] = False
                kept_by_axis[axis][kept] = True
            self._indices[key] = tuple(_as_slice(kept.nonzero().flatten()) for kept in kept_by_axis)
        return self._indices[key]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The kept slices of each tensor, as tensors of the client's own size."""
        return {
            name: _take(tensor, self.region(name, tensor.shape, tensor.device))
            for name, tensor in params.items()
            if name not in self.absent
        }

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the kept entries of `target`, in place."""
        own = target.keys() - self.absent
        if isinstance(target, Slab) and own and (values is None or values.keys() == own):
            places = self._places(target)
            added = target.flat.new_ones(()) if values is None else joined(values[n] for n in target if n in values)
            target.flat.index_add_(0, places, added.to(target.flat.dtype).expand(len(places)), alpha=scale)
            return
        for name in target if values is None else values:
            if name in self.absent:
                continue
            whole = target[name]
            region = self.region(name, whole.shape, whole.device)
            view = whole[tuple(part if isinstance(part, slice) else slice(None) for part in region)]
            listed = [(axis, part) for axis, part in enumerate(region) if isinstance(part, Tensor)]
            if not listed:
                view.add_(1 if values is None else values[name], alpha=scale)
            elif values is None:
                view[_grid(listed, view)] += scale
            elif len(listed) == 1:
                [(axis, kept)] = listed
                view.index_add_(axis, kept, values[name].to(view.dtype), alpha=scale)
            else:
                view[_grid(listed, view)] += values[name].to(view.dtype) * scale

    def _places(self, slab: Slab) -> Tensor:
        """Where the kept entries lie in a slab of all tensors."""
        key = ("places", slab.flat.device, *slab)
        if key not in self._indices:
            kind = torch.int32 if slab.flat.numel() < 2**31 else torch.int64
            numbers = torch.arange(slab.flat.numel(), dtype=kind, device=slab.flat.device)
            self._indices[key] = (joined(self.extract(slab.like(numbers)).values()),)
        return self._indices[key][0]  # type: ignore[return-value]

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """True where the client holds the entry, in the full shapes."""
        held = zeros(params, torch.uint8)
        self.add_into(held, None, 1)
        return {name: tensor.bool() for name, tensor in held.items()}

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Nothing: what is cut is not there."""
        return {}

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many entries of each tensor the client holds."""
        held = {name: t.shape for name, t in params.items() if name not in self.absent}
        sizes = {
            name: prod(_length(part, full) for part, full in zip(self.region(name, shape), shape, strict=True))
            for name, shape in held.items()
        }
        return {name: sizes.get(name, 0) for name in params}


@dataclass(frozen=True, eq=False)
class Masks:
    """The weights that are kept, one bit each; tensors without a bit mask are kept whole."""

    bits: Mapping[str, Tensor] = field(default_factory=dict)

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The tensors in full shape with zeros where weights are cut."""
        return {name: self._cut(name, tensor) for name, tensor in params.items()}

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        # where, not a product: whatever stands outside the mask, even NaN, must not be read
        return torch.where(self.bits[name].to(tensor.device), tensor, 0) if name in self.bits else tensor

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the kept entries of `target`, in place."""
        if isinstance(target, Slab) and not self.bits and (values is None or values.keys() == target.keys()):
            target.flat.add_(1 if values is None else joined(values[name] for name in target), alpha=scale)
            return
        for name in target if values is None else values:
            if values is not None:
                target[name].add_(self._cut(name, values[name]), alpha=scale)
            elif name in self.bits:
                target[name].add_(self.bits[name], alpha=scale)
            else:
                target[name].add_(scale)

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """True where the client holds the entry."""
        return {
            name: self.bits[name] if name in self.bits else torch.ones_like(tensor, dtype=torch.bool)
            for name, tensor in params.items()
        }

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """The bits: a cut weight must stay cut through momentum and decay."""
        return self.bits

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many entries of each tensor the client holds."""
        return {
            name: int(self.bits[name].sum()) if name in self.bits else tensor.numel() for name, tensor in params.items()
        }


@dataclass(frozen=True, eq=False)
class Within:
    """The entries of a client's part that it counts as trained: `bits`, in the shapes of that part."""

    base: Reduction
    bits: Mapping[str, Tensor]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The client's part with zeros where it trained nothing."""
        return {name: self._cut(name, tensor) for name, tensor in self.base.extract(params).items()}

    def _cut(self, name: str, part: Tensor) -> Tensor:
        return torch.where(self.bits[name].to(part.device), part, 0) if name in self.bits else part

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the trained entries of `target`, in place."""
        if values is not None:
            return self.base.add_into(target, {name: self._cut(name, part) for name, part in values.items()}, scale)
        named = {name: self.bits[name].to(target[name].dtype) for name in target if name in self.bits}
        self.base.add_into(target, named, scale)
        self.base.add_into({name: tensor for name, tensor in target.items() if name not in named}, None, scale)
        return None

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """True where the client trained the entry, in the full shapes."""
        held = zeros(params, torch.uint8)
        self.add_into(held, None, 1)
        return {name: tensor.bool() for name, tensor in held.items()}

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """The base's: what is not counted may still move."""
        return self.base.gradient_mask()

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many entries of each tensor the client trained."""
        held = self.base.sizes(params)
        return {name: int(self.bits[name].sum()) if name in self.bits else size for name, size in held.items()}


def distinct(reductions: Iterable[Reduction]) -> list[tuple[Reduction, int]]:
    """Every reduction once, and how often it comes: clients of one capacity often share one object.

    >>> all_of_it = Masks({})
    >>> [number for _, number in distinct([all_of_it, Masks({}), all_of_it])]
    [2, 1]
    """
    listed = list(reductions)
    numbers = Counter(map(id, listed))
    return [(reduction, numbers[key]) for key, reduction in {id(r): r for r in listed}.items()]


def dense(reduction: Reduction) -> Reduction:
    """The same part without unstructured holes: what a client has the tensors for, even if it may not train all."""
    return reduction if isinstance(reduction, Slices) else Masks({})


def windows(groups: tuple[UnitGroup, ...], share: float, start: Mapping[str, int] | None = None) -> Slices:
    """A run of neighbouring units of each group, from `start` on and round the end; from 0 without it.

    >>> g = (UnitGroup("hidden", 4, ()),)
    >>> windows(g, 0.5, {"hidden": 3}).kept["hidden"].tolist()
    [0, 3]
    """
    first = {} if start is None else start

    def kept(group: UnitGroup) -> Tensor:
        offset = 0 if group.nested else first.get(group.name, 0)
        return ((torch.arange(units_kept(group.size, share)) + offset) % group.size).sort().values

    return Slices(groups, {group.name: kept(group) for group in groups})


def drawn(groups: tuple[UnitGroup, ...], share: float, key: int) -> Slices:
    """A uniform random set of each group's units, one draw per coupled group, reproducible from the key.

    >>> g = (UnitGroup("hidden", 100, ()),)
    >>> drawn(g, 0.25, key=7).kept["hidden"].tolist() == drawn(g, 0.25, key=7).kept["hidden"].tolist()
    True
    """
    if not 0 <= key < 2**64:
        raise InvalidValue(f"key must be in 0..2**64 - 1; got {key}")

    def kept(group: UnitGroup) -> Tensor:
        number = units_kept(group.size, share)
        if group.nested:
            return torch.arange(number)
        return torch.randperm(group.size, generator=generator(key, "units", group.name))[:number].sort().values

    return Slices(groups, {group.name: kept(group) for group in groups}, draw=(share, key))


def parameters_at(groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], share: float) -> int:
    """How many parameters a model has when every group keeps `share` of its units."""
    lost: dict[tuple[str, int], int] = {}
    absent = windows(groups, share).absent
    for group in groups:
        for cut in group.cuts:
            if cut.axis is None:
                continue
            place = (cut.tensor, cut.axis)
            gone = (group.size - units_kept(group.size, share)) * cut.per_unit
            lost[place] = lost.get(place, 0) + gone
    return sum(
        prod(length - lost.get((name, axis), 0) for axis, length in enumerate(tensor.shape))
        for name, tensor in params.items()
        if name not in absent
    )


def width_within(groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], budget: float) -> float:
    """The largest width share, common to all groups, whose sub-model has at most `budget` of the parameters.

    >>> from fedcover.types import Cut
    >>> g = (UnitGroup("hidden", 200, (Cut("w", 0), Cut("v", 1))),)
    >>> width_within(g, {"w": torch.empty(200, 784), "v": torch.empty(10, 200)}, 0.5)
    0.5
    """
    allowed = budget * parameters_at(groups, params, 1.0)
    shares = sorted({1.0} | {units / group.size for group in groups for units in range(1, group.size + 1)})
    low, high = 0, len(shares)
    while low < high:  # the first share that does not fit; size grows with the share
        middle = (low + high) // 2
        fits = parameters_at(groups, params, shares[middle]) <= allowed + 1e-6
        low, high = (middle + 1, high) if fits else (low, middle)
    if low == 0:
        least = parameters_at(groups, params, 0) / parameters_at(groups, params, 1.0)
        least = ceil(10_000 * least) / 10_000  # rounded up, so that the advice can be followed
        raise InvalidValue(f"capacity must be at least {least:.4f} for this model (one unit per group); got {budget:g}")
    return shares[low - 1]


def _as_slice(kept: Tensor) -> Index:
    """A plain slice where the positions are neighbours: views are far cheaper than gathers."""
    if len(kept) and int(kept[-1]) - int(kept[0]) + 1 == len(kept):
        return slice(int(kept[0]), int(kept[-1]) + 1)
    return kept


def _length(part: Index, full: int) -> int:
    return len(part) if isinstance(part, Tensor) else len(range(*part.indices(full)))


def _take(tensor: Tensor, region: tuple[Index, ...]) -> Tensor:
    view = tensor[tuple(part if isinstance(part, slice) else slice(None) for part in region)]
    for axis, part in enumerate(region):
        if isinstance(part, Tensor):
            view = view.index_select(axis, part.to(tensor.device))
    return view.contiguous()


def _grid(listed: Sequence[tuple[int, Tensor]], view: Tensor) -> tuple[Index, ...]:
    """Index tensors that broadcast to an open grid from the first listed axis to the last.

    The axes between two listed ones are listed too: with a plain slice there, indexing would move axes.
    """
    named = dict(listed)
    first, last = listed[0][0], listed[-1][0]
    grid: list[Index] = [slice(None)] * view.ndim
    for axis in range(first, last + 1):
        part = named.get(axis, torch.arange(view.shape[axis], device=view.device))
        grid[axis] = part.to(view.device).view([-1 if a == axis else 1 for a in range(first, last + 1)])
    return tuple(grid)
