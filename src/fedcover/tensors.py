"""Dicts of named tensors, also as views of one flat tensor, and trees of tensors.

On a GPU, launching a kernel for each of a model's many small tensors takes longer than the work
itself. With one flat tensor (`FlatParams`), an element-wise operation is a single kernel. A CPU
gains nothing.

A tree is made of dicts, tuples and lists, nested at will. Its functions are torch's own: their
module is private by name, but `torch.func` is built on it. Import them from here only.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_leaves_with_path as tree_leaves_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_ as tree_map_
from torch.utils._pytree import tree_structure as tree_structure

from fedcover.types import Params

NamedShapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors, in their order."""

PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries that an element-wise function processes at once: nearly a CPU cache, or a full GPU."""


class FlatParams(Params):
    """Named tensors that are views of one tensor, `flat`. Fill them, but do not replace them.

    >>> params = FlatParams(torch.arange(5), [("w", (2, 2)), ("b", (1,))])
    >>> params["w"].tolist(), params["b"].tolist()
    ([[0, 1], [2, 3]], [4])
    """

    def __init__(self, flat: Tensor, shapes: NamedShapes) -> None:
        super().__init__(unflatten(flat, shapes))
        self.flat = flat

    def __reduce__(self) -> tuple[type["FlatParams"], tuple[Tensor, NamedShapes]]:
        """Pickle and copy the flat tensor only; each view would bring a copy of all of it."""
        return FlatParams, (self.flat.clone(), named_shapes(self))

    def like(self, flat: Tensor) -> "FlatParams":
        """Return another flat tensor with the same names and shapes."""
        return FlatParams(flat, named_shapes(self))

    def _raise_read_only(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "the tensors of FlatParams are views of one tensor; copy to a dict to replace them"
        )

    __setitem__ = __delitem__ = __ior__ = pop = popitem = setdefault = update = clear = (
        _raise_read_only
    )


def named_shapes(tensors: Mapping[str, Tensor]) -> NamedShapes:
    """Return the names and shapes of tensors."""
    return [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]


# ── one tensor after another ────────────────────────────────────────────────────────────────────


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first tensor; all are expected to be on the same one."""
    return next(iter(tensors.values())).device


def to_device(tensors: Mapping[str, Tensor], device: torch.device | str) -> Params:
    """Return the tensors on a device; `FlatParams` move as the one tensor behind them."""
    if isinstance(tensors, FlatParams):
        return tensors.like(tensors.flat.to(device))
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> Params:
    """Copy each tensor by itself, so that no copy is a view of another's memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def zeros_like(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Params:
    """Allocate zeros in the shapes of other tensors, and in their dtypes unless one is given."""
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Return the squared length of all tensors together, summed in float64.

    The tensors' sums are added in the given order, so equal tensors have equal norms, bit for bit,
    whether they are views of one flat tensor or not.

    >>> squared_norm([torch.tensor([1.0, 2.0]), torch.tensor(2.0)])
    9.0
    """
    return float(sum(tensor.detach().double().square().sum() for tensor in tensors))


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean length of all tensors together, summed in float64."""
    return math.sqrt(squared_norm(tensors))


# ── one flat tensor ─────────────────────────────────────────────────────────────────────────────


def concat(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten tensors and concatenate them."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all entries as one tensor, without a copy for `FlatParams`."""
    return tensors.flat if isinstance(tensors, FlatParams) else concat(tensors.values())


def flat_copy(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Copy all entries into one new tensor of a given dtype, without an intermediate copy."""
    if isinstance(tensors, FlatParams):
        return tensors.flat.to(dtype, copy=True)
    sizes = [tensor.numel() for tensor in tensors.values()]
    device = next((tensor.device for tensor in tensors.values()), None)
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    for target, tensor in zip(torch.split(flat, sizes), tensors.values(), strict=True):
        target.copy_(tensor.reshape(-1))
    return flat


def flatten_if_cuda(tensors: Params) -> Params:
    """Return `FlatParams` for tensors of one dtype on a GPU, otherwise the tensors unchanged."""
    if isinstance(tensors, FlatParams) or not _on_gpu(tensors):
        return tensors
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        return tensors
    return FlatParams(concat(tensors.values()), named_shapes(tensors))


def map_elementwise(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply an element-wise function to dicts of tensors with the same names and shapes.

    >>> map_elementwise(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return map_elementwise_named(in_pieces(lambda *tensors: {"": function(*tensors)}), *trees)[""]


def map_elementwise_named(
    function: Callable[..., Mapping[str, Tensor]], *trees: Params
) -> dict[str, Params]:
    """Apply an element-wise function with several named results.

    Args:
        function: It gets one whole tensor of each dict, unless it is wrapped by `in_pieces`.
        *trees: Dicts of tensors with the same names and shapes.

    Returns:
        A dict of tensors for each named result.
    """
    flat_trees = [tree for tree in trees if isinstance(tree, FlatParams)]
    if len(flat_trees) == len(trees):
        first = flat_trees[0]
        if all(list(tree) == list(first) for tree in flat_trees):
            flat_results = function(*(tree.flat for tree in flat_trees))
            return {key: first.like(flat) for key, flat in flat_results.items()}
    results: dict[str, Params] = {}
    for name in trees[0]:
        for key, tensor in function(*(tree[name] for tree in trees)).items():
            results.setdefault(key, {})[name] = tensor
    return results


def in_pieces(function: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
    """Make an element-wise function process large tensors piece by piece.

    Its intermediate results are then as large as a piece, not as the tensors. A mean in float64,
    for instance, has many of them.
    """

    def piecewise(*tensors: Tensor) -> Mapping[str, Tensor]:
        first = tensors[0]
        piece_size = PIECE[first.device.type]
        if first.numel() <= piece_size:
            return function(*tensors)
        if any(t.shape != first.shape or not t.is_contiguous() for t in tensors):
            return function(*tensors)
        results: dict[str, Tensor] = {}
        for start in range(0, first.numel(), piece_size):
            piece = slice(start, start + piece_size)
            pieces = [tensor.view(-1)[piece] for tensor in tensors]
            for key, values in function(*pieces).items():
                if key not in results:
                    results[key] = values.new_empty(first.numel())
                results[key][piece] = values
        return {key: result.view(first.shape) for key, result in results.items()}

    return piecewise


def add_scaled(target: Tensor, values: Tensor, scale: float) -> None:
    """Add `scale * values` to a tensor in place; convert a large one piece by piece."""
    same_dtype = values.dtype == target.dtype
    if same_dtype or target.is_cuda or target.numel() <= PIECE["cpu"] or not target.ndim:
        target.add_(values, alpha=scale)
        return
    rows = max(1, PIECE["cpu"] * len(target) // max(1, target.numel()))
    pieces = zip(torch.split(target, rows), torch.split(values, rows), strict=True)
    for target_piece, values_piece in pieces:
        target_piece.add_(values_piece, alpha=scale)


def zeros(like: Mapping[str, Tensor], dtype: torch.dtype) -> Params:
    """Allocate zeros in the shapes of other tensors; on a GPU as `FlatParams`."""
    if not _on_gpu(like):
        return zeros_like(like, dtype)
    entries = sum(tensor.numel() for tensor in like.values())
    flat = torch.zeros(entries, dtype=dtype, device=device_of(like))
    return FlatParams(flat, named_shapes(like))


def unflatten(flat: Tensor, shapes: NamedShapes, channels_last: bool = False) -> Params:
    """Split the last axis of a tensor into named views.

    Args:
        flat: The tensor; its other axes become leading axes of every view.
        shapes: Names and shapes of the views.
        channels_last: Whether views with four axes are in torch's channels-last format.

    >>> unflatten(torch.arange(5), [("w", (2, 2)), ("b", (1,))])["w"].tolist()
    [[0, 1], [2, 3]]
    """
    parts = torch.split(flat, [prod(shape) for _, shape in shapes], dim=-1)
    leading_axes = flat.shape[:-1]
    views = {}
    for (name, shape), part in zip(shapes, parts, strict=True):
        if channels_last and len(shape) == 4:
            outputs, inputs, height, width = shape
            views[name] = part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
        else:
            views[name] = part.view((*leading_axes, *shape))
    return views


def _on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors.values())
