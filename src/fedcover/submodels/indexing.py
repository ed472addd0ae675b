"""Index regions of tensors: the kept positions along each axis, also in flattened parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedcover.tensors import (
    FlatParams,
    NamedShapes,
    add_scaled,
    concat,
    flatten,
    named_shapes,
)
from fedcover.types import Params

Index = slice | Tensor
"""The kept positions along one axis: a slice if they are contiguous, otherwise a tensor."""

Region = tuple[Index, ...]
"""The kept positions along each axis of a tensor."""


@dataclass(frozen=True, slots=True)
class FlatIndex:
    """Describe a part of flattened parameters.

    Attributes:
        shapes: The names and shapes of the tensors in the part.
        offsets: The positions of their entries in the flat tensor; None if the part is everything.
    """

    shapes: NamedShapes
    offsets: Tensor | None


def as_slice(positions: Tensor) -> Index:
    """Convert sorted positions to a slice if they are contiguous; views cost less than gathers."""
    if len(positions) and int(positions[-1]) - int(positions[0]) + 1 == len(positions):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions


def num_positions(index: Index, axis_length: int) -> int:
    """Return how many positions an index keeps along an axis."""
    return len(index) if isinstance(index, Tensor) else len(range(*index.indices(axis_length)))


def take_region(tensor: Tensor, region: Region) -> Tensor:
    """Return a region of a tensor as a contiguous tensor."""
    view = _slice_axes(tensor, region)
    for axis, index in enumerate(region):
        if isinstance(index, Tensor):
            view = view.index_select(axis, index.to(tensor.device))
    return view.contiguous()


def add_to_region(whole: Tensor, region: Region, values: Tensor | None, scale: float) -> None:
    """Add `scale * values` (or just `scale`) to a region of a tensor, in place."""
    view = _slice_axes(whole, region)
    positions_by_axis = {
        axis: index for axis, index in enumerate(region) if isinstance(index, Tensor)
    }
    if not positions_by_axis:
        if values is None:
            view.add_(scale)
        else:
            add_scaled(view, values, scale)
    elif values is None:
        view[_open_grid(positions_by_axis, view)] += scale
    elif len(positions_by_axis) == 1:
        [(axis, positions)] = positions_by_axis.items()
        view.index_add_(axis, positions, values.to(view.dtype), alpha=scale)
    else:
        view[_open_grid(positions_by_axis, view)] += values.to(view.dtype) * scale


def overlap_mask(outer: Region, inner: Region, shape: Sequence[int]) -> Tensor:
    """Return a mask in the shape of the outer region, true where the inner region overlaps it.

    >>> overlap_mask((slice(1, 4),), (slice(0, 3),), (5,)).tolist()
    [True, True, False]
    """
    mask = torch.ones((), dtype=torch.bool)
    for axis_length, outer_index, inner_index in zip(shape, outer, inner, strict=True):
        positions = torch.arange(axis_length)
        overlap = torch.isin(positions[outer_index], positions[inner_index])
        mask = mask.unsqueeze(-1) & overlap
    return mask


def flat_index(params: FlatParams, regions: Mapping[str, Region]) -> FlatIndex:
    """Compute where the regions of some tensors are in flattened parameters.

    >>> params = FlatParams(torch.arange(6), [("w", (2, 2)), ("b", (2,))])
    >>> flat_index(params, {"w": (slice(0, 2), slice(1, 2)), "b": (slice(0, 2),)}).offsets.tolist()
    [1, 3, 4, 5]
    """
    tensors = named_shapes(params)
    shapes = [
        (name, tuple(map(num_positions, regions[name], shape)))
        for name, shape in tensors
        if name in regions
    ]
    if shapes == tensors:
        return FlatIndex(shapes, None)
    dtype = np.dtype(np.int32 if params.flat.numel() < 2**31 else np.int64)
    offsets = [np.zeros(0, dtype)]
    tensor_start = 0
    # Layers of equal shape are often cut alike.
    offsets_by_region: dict[tuple[object, ...], np.ndarray] = {}
    for name, shape in tensors:
        if name in regions:
            key = (shape, *map(_hashable, regions[name]))
            if key not in offsets_by_region:
                offsets_by_region[key] = _flat_offsets(shape, regions[name], dtype)
            offsets.append(tensor_start + offsets_by_region[key])
        tensor_start += prod(shape)
    return FlatIndex(shapes, torch.from_numpy(np.concatenate(offsets)).to(params.flat.device))


def flatten_in_order(values: Params, target: Params) -> Tensor:
    """Flatten values in the order in which a target names them."""
    names = [name for name in target if name in values]
    if list(values) == names:
        return flatten(values)
    return concat(values[name] for name in names)


def _slice_axes(tensor: Tensor, region: Region) -> Tensor:
    """Return a view of a tensor, cut along those axes of the region that are slices."""
    return tensor[tuple(index if isinstance(index, slice) else slice(None) for index in region)]


def _hashable(index: Index) -> object:
    """Convert an index to a dictionary key."""
    return index.numpy().tobytes() if isinstance(index, Tensor) else (index.start, index.stop)


def _flat_offsets(shape: Sequence[int], region: Region, dtype: np.dtype) -> np.ndarray:
    """Compute the positions of a region's entries in the flattened tensor."""
    offsets = np.zeros(1, dtype)
    for axis_length, index in zip(shape, region, strict=True):
        selector = index if isinstance(index, slice) else index.numpy()
        positions = np.arange(axis_length, dtype=dtype)[selector]
        offsets = (offsets[:, None] * axis_length + positions).ravel()
    return offsets


def _open_grid(positions_by_axis: Mapping[int, Tensor], view: Tensor) -> Region:
    """Build index tensors that broadcast over the axes from the first indexed one to the last.

    Axes between two indexed ones get index tensors too: with a slice there, indexing would
    reorder the axes.
    """
    first, last = min(positions_by_axis), max(positions_by_axis)
    grid: list[Index] = [slice(None)] * view.ndim
    for axis in range(first, last + 1):
        positions = positions_by_axis.get(axis)
        if positions is None:
            positions = torch.arange(view.shape[axis], device=view.device)
        broadcast_shape = [-1 if other == axis else 1 for other in range(first, last + 1)]
        grid[axis] = positions.to(view.device).view(broadcast_shape)
    return tuple(grid)
