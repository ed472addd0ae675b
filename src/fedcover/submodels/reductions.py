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
from fedcover.rng import generator
from fedcover.submodels.indexing import (
    FlatIndex,
    Index,
    Region,
    add_to_region,
    as_slice,
    flat_index,
    length,
    take_region,
)
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.unit_groups import cuts_by_tensor, num_units_kept, unit_positions
from fedcover.tensors import FlatParams, add_scaled, concat, flatten, named_shapes, zeros
from fedcover.types import Cut, Params, Reduction, UnitGroup


@dataclass(frozen=True, eq=False)
class Slices:
    """The units that are kept of each group (sorted), and the tensors cut down to them.

    `draw` names the (share, key) of a random draw, so that it can travel as two numbers.
    """

    groups: tuple[UnitGroup, ...]
    kept: Mapping[str, Tensor]
    draw: tuple[float, int] | None = None

    @cached_property
    def _cuts(self) -> dict[str, list[tuple[UnitGroup, Cut]]]:
        return cuts_by_tensor(self.groups)

    @cached_property
    def _index_cache(self) -> dict[tuple[object, ...], Index]:
        """What is kept along an axis, by the cuts that lie on it: many tensors share them."""
        return {}

    @cached_property
    def _region_cache(self) -> dict[tuple[object, ...], Region]:
        """What was made, and sent to a device, once, not for every use."""
        return {}

    @cached_property
    def _flat_cache(self) -> dict[tuple[object, ...], FlatIndex]:
        return {}

    @cached_property
    def absent(self) -> frozenset[str]:
        """The tensors that go with a unit that is cut: the client has nothing of them."""
        return frozenset(
            cut.tensor
            for group in self.groups
            for cut in (*group.cuts, *group.buffers)
            if cut.axis is None and cut.unit not in self.kept[group.name].tolist()
        )

    def region(self, name: str, shape: Sequence[int], device: torch.device | None = None) -> Region:
        """What is kept along each axis of a tensor: a plain slice where it can be one, else positions."""
        key = (name, tuple(shape), device)
        if key not in self._region_cache:
            if device is None:
                meeting = self._cuts.get(name, ())
                cuts = [
                    [(group, cut) for group, cut in meeting if cut.axis == axis]
                    for axis in range(len(shape))
                ]
                self._region_cache[key] = tuple(map(self._kept_index, cuts, shape))
            else:
                here = self.region(name, shape)
                self._region_cache[key] = tuple(
                    part.to(device) if isinstance(part, Tensor) else part for part in here
                )
        return self._region_cache[key]

    def _kept_index(self, cuts: Sequence[tuple[UnitGroup, Cut]], length: int) -> Index:
        if not cuts:
            return slice(0, length)
        key = (length, *((group.name, cut.start, cut.per_unit) for group, cut in cuts))
        if key not in self._index_cache:
            held = torch.ones(length, dtype=torch.bool)
            for group, cut in cuts:
                held[cut.start : cut.start + group.size * cut.per_unit] = False
                held[unit_positions(cut, self.kept[group.name])] = True
            self._index_cache[key] = as_slice(held.nonzero().flatten())
        return self._index_cache[key]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The kept slices of each tensor, as tensors of the client's own size."""
        if isinstance(params, PartialParams):
            return params.extract_for(self)
        if isinstance(params, FlatParams):
            there = self._flat_index(params)
            return (
                params
                if there.offsets is None
                else FlatParams(params.flat[there.offsets], there.shapes)
            )
        return {
            name: take_region(tensor, self.region(name, tensor.shape, tensor.device))
            for name, tensor in params.items()
            if name not in self.absent
        }

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the kept entries of `target`, in place."""
        own = target.keys() - self.absent
        if isinstance(target, FlatParams) and own and (values is None or values.keys() == own):
            offsets = self._flat_index(target).offsets
            added = (
                target.flat.new_ones(()) if values is None else _flatten_in_order(values, target)
            )
            if offsets is None:
                target.flat.add_(added, alpha=scale)
            else:
                target.flat.index_add_(
                    0, offsets, added.to(target.flat.dtype).expand(len(offsets)), alpha=scale
                )
            return
        for name in target if values is None else values:
            if name in self.absent:
                continue
            whole = target[name]
            add_to_region(
                whole,
                self.region(name, whole.shape, whole.device),
                None if values is None else values[name],
                scale,
            )

    def _flat_index(self, slab: FlatParams) -> FlatIndex:
        """Where this part lies in a slab of all tensors."""
        key = (slab.flat.device, *slab)
        if key not in self._flat_cache:
            regions = {
                n: self.region(n, shape) for n, shape in named_shapes(slab) if n not in self.absent
            }
            self._flat_cache[key] = flat_index(slab, regions)
        return self._flat_cache[key]

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
            name: prod(
                length(part, full)
                for part, full in zip(self.region(name, shape), shape, strict=True)
            )
            for name, shape in held.items()
        }
        return {name: sizes.get(name, 0) for name in params}


@dataclass(frozen=True, eq=False)
class Masks:
    """The weights that are kept, one bit each; tensors without a bit mask are kept whole."""

    bits: Mapping[str, Tensor] = field(default_factory=dict)

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The tensors in full shape with zeros where weights are cut."""
        return {name: self._apply_mask(name, tensor) for name, tensor in params.items()}

    def _apply_mask(self, name: str, tensor: Tensor) -> Tensor:
        # where, not a product: whatever stands outside the mask, even NaN, must not be read
        return (
            torch.where(self.bits[name].to(tensor.device), tensor, 0)
            if name in self.bits
            else tensor
        )

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the kept entries of `target`, in place."""
        if (
            isinstance(target, FlatParams)
            and not self.bits
            and (values is None or values.keys() == target.keys())
        ):
            target.flat.add_(
                1 if values is None else _flatten_in_order(values, target), alpha=scale
            )
            return
        for name in target if values is None else values:
            if values is not None:
                add_scaled(target[name], self._apply_mask(name, values[name]), scale)
            elif name in self.bits:
                target[name].add_(self.bits[name], alpha=scale)
            else:
                target[name].add_(scale)

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """True where the client holds the entry."""
        return {
            name: self.bits[name]
            if name in self.bits
            else torch.ones_like(tensor, dtype=torch.bool)
            for name, tensor in params.items()
        }

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """The bits: a cut weight must stay cut through momentum and decay."""
        return self.bits

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many entries of each tensor the client holds."""
        return {
            name: int(self.bits[name].sum()) if name in self.bits else tensor.numel()
            for name, tensor in params.items()
        }


@dataclass(frozen=True, eq=False)
class TrainedSubset:
    """The entries of a client's part that it counts as trained: `bits`, in the shapes of that part."""

    base: Reduction
    bits: Mapping[str, Tensor]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The client's part with zeros where it trained nothing."""
        return {
            name: self._apply_mask(name, tensor)
            for name, tensor in self.base.extract(params).items()
        }

    def _apply_mask(self, name: str, part: Tensor) -> Tensor:
        return torch.where(self.bits[name].to(part.device), part, 0) if name in self.bits else part

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the trained entries of `target`, in place."""
        if values is not None:
            return self.base.add_into(
                target, {name: self._apply_mask(name, part) for name, part in values.items()}, scale
            )
        named = {
            name: self.bits[name].to(target[name].dtype) for name in target if name in self.bits
        }
        self.base.add_into(target, named, scale)
        self.base.add_into(
            {name: tensor for name, tensor in target.items() if name not in named}, None, scale
        )
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
        return {
            name: int(self.bits[name].sum()) if name in self.bits else size
            for name, size in held.items()
        }


def distinct(reductions: Iterable[Reduction]) -> list[tuple[Reduction, int]]:
    """Every reduction once, and how often it comes: clients of one capacity often share one object.

    >>> all_of_it = Masks({})
    >>> [number for _, number in distinct([all_of_it, Masks({}), all_of_it])]
    [2, 1]
    """
    listed = list(reductions)
    numbers = Counter(map(id, listed))
    return [(reduction, numbers[key]) for key, reduction in {id(r): r for r in listed}.items()]


def without_masks(reduction: Reduction) -> Reduction:
    """The same part without unstructured holes: what a client has the tensors for, even if it may not train all."""
    return reduction if isinstance(reduction, Slices) else Masks({})


def windows(
    groups: tuple[UnitGroup, ...], share: float, start: Mapping[str, int] | None = None
) -> Slices:
    """A run of neighbouring units of each group, from `start` on and round the end; from 0 without it.

    >>> g = (UnitGroup("hidden", 4, ()),)
    >>> windows(g, 0.5, {"hidden": 3}).kept["hidden"].tolist()
    [0, 3]
    """
    first = {} if start is None else start

    def kept(group: UnitGroup) -> Tensor:
        offset = 0 if group.nested else first.get(group.name, 0)
        return circular_range(offset % group.size, num_units_kept(group.size, share), group.size)

    return Slices(groups, {group.name: kept(group) for group in groups})


def circular_range(first: int, length: int, size: int) -> Tensor:
    """So many neighbouring units of a group, from one on and round the end, in order.

    >>> circular_range(3, 2, 4).tolist()
    [0, 3]
    """
    beyond = first + length - size
    if beyond <= 0:
        return torch.arange(first, first + length)
    return torch.cat([torch.arange(beyond), torch.arange(first, size)])


def drawn(groups: tuple[UnitGroup, ...], share: float, key: int) -> Slices:
    """A uniform random set of each group's units, one draw per coupled group, reproducible from the key.

    >>> g = (UnitGroup("hidden", 100, ()),)
    >>> drawn(g, 0.25, key=7).kept["hidden"].tolist() == drawn(g, 0.25, key=7).kept["hidden"].tolist()
    True
    """
    if not 0 <= key < 2**64:
        raise InvalidValue(f"key must be in 0..2**64 - 1; got {key}")

    def kept(group: UnitGroup) -> Tensor:
        number = num_units_kept(group.size, share)
        if group.nested:
            return torch.arange(number)
        return (
            torch.randperm(group.size, generator=generator(key, "units", group.name))[:number]
            .sort()
            .values
        )

    return Slices(groups, {group.name: kept(group) for group in groups}, draw=(share, key))


def parameters_at_width(
    groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], share: float
) -> int:
    """How many parameters a model has when every group keeps `share` of its units."""
    lost: dict[tuple[str, int], int] = {}
    absent = windows(groups, share).absent
    for group in groups:
        for cut in group.cuts:
            if cut.axis is None:
                continue
            place = (cut.tensor, cut.axis)
            gone = (group.size - num_units_kept(group.size, share)) * cut.per_unit
            lost[place] = lost.get(place, 0) + gone
    return sum(
        prod(length - lost.get((name, axis), 0) for axis, length in enumerate(tensor.shape))
        for name, tensor in params.items()
        if name not in absent
    )


def width_for_budget(
    groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], budget: float
) -> float:
    """The largest width share, common to all groups, whose sub-model has at most `budget` of the parameters.

    >>> from fedcover.types import Cut
    >>> g = (UnitGroup("hidden", 200, (Cut("w", 0), Cut("v", 1))),)
    >>> width_for_budget(g, {"w": torch.empty(200, 784), "v": torch.empty(10, 200)}, 0.5)
    0.5
    """
    allowed = budget * parameters_at_width(groups, params, 1.0)
    shares = sorted(
        {1.0} | {units / group.size for group in groups for units in range(1, group.size + 1)}
    )
    low, high = 0, len(shares)
    while low < high:  # the first share that does not fit; size grows with the share
        middle = (low + high) // 2
        fits = parameters_at_width(groups, params, shares[middle]) <= allowed + 1e-6
        low, high = (middle + 1, high) if fits else (low, middle)
    if low == 0:
        least = parameters_at_width(groups, params, 0) / parameters_at_width(groups, params, 1.0)
        least = ceil(10_000 * least) / 10_000  # rounded up, so that the advice can be followed
        raise InvalidValue(
            f"capacity must be at least {least:.4f} for this model (one unit per group); got {budget:g}"
        )
    return shares[low - 1]


def _flatten_in_order(values: Params, target: Params) -> Tensor:
    """The entries of all values in the order in which a target names them."""
    order = [name for name in target if name in values]
    return flatten(values) if list(values) == order else concat(values[name] for name in order)
