"""Where a part lies in tensors: what is kept along each axis, and the same in tensors that lie side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedcover.tensors import FlatParams, NamedShapes, add_scaled, named_shapes

Index = slice | Tensor
Region = tuple[Index, ...]
"""What is kept along each axis of a tensor: a plain slice where it can be one, else positions."""


@dataclass(frozen=True, slots=True)
class FlatIndex:
    """A part of tensors that lie side by side: its own shapes, and where its entries lie; None if it is the whole."""

    shapes: NamedShapes
    offsets: Tensor | None


def as_slice(kept: Tensor) -> Index:
    """A plain slice where the positions are neighbours: views are far cheaper than gathers."""
    if len(kept) and int(kept[-1]) - int(kept[0]) + 1 == len(kept):
        return slice(int(kept[0]), int(kept[-1]) + 1)
    return kept


def length(part: Index, full: int) -> int:
    """How many places along an axis are kept."""
    return len(part) if isinstance(part, Tensor) else len(range(*part.indices(full)))


def take_region(tensor: Tensor, region: Region) -> Tensor:
    """A region of a tensor, as a tensor of its own size."""
    view = tensor[tuple(part if isinstance(part, slice) else slice(None) for part in region)]
    for axis, part in enumerate(region):
        if isinstance(part, Tensor):
            view = view.index_select(axis, part.to(tensor.device))
    return view.contiguous()


def add_to_region(whole: Tensor, region: Region, values: Tensor | None, scale: float) -> None:
    """Add `scale * values` (or `scale` itself) to a region of a tensor, in place."""
    view = whole[tuple(part if isinstance(part, slice) else slice(None) for part in region)]
    listed = [(axis, part) for axis, part in enumerate(region) if isinstance(part, Tensor)]
    if not listed:
        view.add_(scale) if values is None else add_scaled(view, values, scale)
    elif values is None:
        view[_grid(listed, view)] += scale
    elif len(listed) == 1:
        [(axis, kept)] = listed
        view.index_add_(axis, kept, values.to(view.dtype), alpha=scale)
    else:
        view[_grid(listed, view)] += values.to(view.dtype) * scale


def overlap_mask(outer: Region, inner: Region, shape: Sequence[int]) -> Tensor:
    """Where a region of a tensor lies in another one: true in the shape of the outer, at what the inner holds too.

    >>> overlap_mask((slice(1, 4),), (slice(0, 3),), (5,)).tolist()
    [True, True, False]
    """
    held = torch.ones((), dtype=torch.bool)
    for length, kept, wanted in zip(shape, outer, inner, strict=True):
        offsets = torch.arange(length)
        held = held.unsqueeze(-1) & torch.isin(offsets[kept], offsets[wanted])
    return held


def flat_index(slab: FlatParams, regions: Mapping[str, Region]) -> FlatIndex:
    """Where the regions of some of a slab's tensors lie in it.

    >>> slab = FlatParams(torch.arange(6), [("w", (2, 2)), ("b", (2,))])
    >>> flat_index(slab, {"w": (slice(0, 2), slice(1, 2)), "b": (slice(0, 2),)}).offsets.tolist()
    [1, 3, 4, 5]
    """
    tensors = named_shapes(slab)
    shapes = [
        (name, tuple(map(length, regions[name], shape)))
        for name, shape in tensors
        if name in regions
    ]
    if shapes == tensors:
        return FlatIndex(shapes, None)
    kind = np.dtype(np.int32 if slab.flat.numel() < 2**31 else np.int64)
    offsets, first = [np.zeros(0, kind)], 0
    known: dict[tuple[object, ...], np.ndarray] = {}  # layers of equal size are often cut alike
    for name, shape in tensors:
        if name in regions:
            key = (shape, *map(_hashable, regions[name]))
            if key not in known:
                known[key] = _flat_offsets(shape, regions[name], kind)
            offsets.append(first + known[key])
        first += prod(shape)
    return FlatIndex(shapes, torch.from_numpy(np.concatenate(offsets)).to(slab.flat.device))


def _hashable(part: Index) -> object:
    """What is kept along an axis, to be looked up."""
    return part.numpy().tobytes() if isinstance(part, Tensor) else (part.start, part.stop)


def _flat_offsets(shape: Sequence[int], region: Region, kind: np.dtype) -> np.ndarray:
    """Where the entries of a region lie when a tensor's entries are counted one after another."""
    offsets = np.zeros(1, kind)
    for length, part in zip(shape, region, strict=True):
        kept = np.arange(length, dtype=kind)[part if isinstance(part, slice) else part.numpy()]
        offsets = (offsets[:, None] * length + kept).ravel()
    return offsets


def _grid(listed: Sequence[tuple[int, Tensor]], view: Tensor) -> Region:
    """Index tensors that broadcast to an open grid from the first listed axis to the last.

    The axes between two listed ones are listed too: with a plain slice there, indexing would move axes.
    """
    named = dict(listed)
    first, last = listed[0][0], listed[-1][0]
    grid: list[Index] = [slice(None)] * view.ndim
    for axis in range(first, last + 1):
        part = named.get(axis, torch.arange(view.shape[axis], device=view.device))
        grid[axis] = part.to(view.device).view(
            [-1 if a == axis else 1 for a in range(first, last + 1)]
        )
    return tuple(grid)
