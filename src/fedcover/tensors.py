"""Tensors that lie side by side in one, so that what is done to all of them is done in one go.

A GPU spends longer on starting the work for each of a model's many small tensors than on the work; a CPU does not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedcover.types import Params

NamedShapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors, in their order."""

PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries that a function of single entries is given at once: what a cache nearly holds, or what fills a GPU."""


class FlatParams(Params):
    """Tensors by name that are the parts of one, `flat`; they may be filled, but not replaced.

    >>> slab = FlatParams(torch.arange(5), [("w", (2, 2)), ("b", (1,))])
    >>> slab["w"].tolist(), slab["b"].tolist()
    ([[0, 1], [2, 3]], [4])
    """

    def __init__(self, flat: Tensor, shapes: NamedShapes) -> None:
        super().__init__(unflatten(flat, shapes))
        self.flat = flat

    def __reduce__(self) -> tuple[type["FlatParams"], tuple[Tensor, NamedShapes]]:
        """A copy, or what is sent to another process, is one tensor again: each view would take all of it along."""
        return FlatParams, (self.flat.clone(), named_shapes(self))

    def like(self, flat: Tensor) -> "FlatParams":
        """Another one of the same names and shapes."""
        return FlatParams(flat, named_shapes(self))

    def _raise_read_only(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "the tensors of a slab are parts of one; make a dict of it to replace some of them"
        )

    __setitem__ = __delitem__ = __ior__ = pop = popitem = setdefault = update = clear = (
        _raise_read_only
    )


def named_shapes(tensors: Mapping[str, Tensor]) -> NamedShapes:
    """Names and shapes of some tensors."""
    return [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]


def concat(tensors: Iterable[Tensor]) -> Tensor:
    """The entries of tensors, one after another."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """The entries of all tensors, one after another; of a slab they already lie so."""
    return tensors.flat if isinstance(tensors, FlatParams) else concat(tensors.values())


def flat_copy(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The same as a tensor of its own, of some type, without another copy on the way."""
    if isinstance(tensors, FlatParams):
        return tensors.flat.to(dtype, copy=True)
    entries = [tensor.numel() for tensor in tensors.values()]
    made = torch.empty(
        sum(entries), dtype=dtype, device=next((t.device for t in tensors.values()), None)
    )
    for room, tensor in zip(torch.split(made, entries), tensors.values(), strict=True):
        room.copy_(tensor.reshape(-1))
    return made


def flatten_if_cuda(tensors: Params) -> Params:
    """The same tensors, on a GPU as a slab if they are of one type."""
    if (
        isinstance(tensors, FlatParams)
        or not _on_gpu(tensors)
        or len({tensor.dtype for tensor in tensors.values()}) > 1
    ):
        return tensors
    return FlatParams(concat(tensors.values()), named_shapes(tensors))


def map_elementwise(function: Callable[..., Tensor], *trees: Params) -> Params:
    """What a function of single entries makes of trees of tensors with the same names and shapes.

    >>> map_elementwise(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return map_elementwise_named(in_pieces(lambda *tensors: {"": function(*tensors)}), *trees)[""]


def map_elementwise_named(
    function: Callable[..., Mapping[str, Tensor]], *trees: Params
) -> dict[str, Params]:
    """The same for a function with several named results; it is given whole tensors, unless it goes `in_pieces`."""
    slabs = [tree for tree in trees if isinstance(tree, FlatParams)]
    if len(slabs) == len(trees) and all(list(slab) == list(slabs[0]) for slab in slabs):
        return {
            key: slabs[0].like(made)
            for key, made in function(*(slab.flat for slab in slabs)).items()
        }
    found: dict[str, Params] = {}
    for name in trees[0]:
        for key, made in function(*(tree[name] for tree in trees)).items():
            found.setdefault(key, {})[name] = made
    return found


def in_pieces(function: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
    """The same function of single entries, called for a piece of large tensors after the other.

    What it makes on the way is then as large as a piece, not as the tensors: a mean in float64 has many such steps.
    """

    def piecewise(*tensors: Tensor) -> Mapping[str, Tensor]:
        first = tensors[0]
        piece = PIECE[first.device.type]
        if first.numel() <= piece or any(
            t.shape != first.shape or not t.is_contiguous() for t in tensors
        ):
            return function(*tensors)
        results: dict[str, Tensor] = {}
        for start in range(0, first.numel(), piece):
            place = slice(start, start + piece)
            for key, made in function(*(tensor.view(-1)[place] for tensor in tensors)).items():
                if key not in results:
                    results[key] = made.new_empty(first.numel())
                results[key][place] = made
        return {key: result.view(first.shape) for key, result in results.items()}

    return piecewise


def add_scaled(target: Tensor, values: Tensor, scale: float) -> None:
    """Add `scale * values` to a tensor, in place; of another type they are turned into the tensor's in pieces."""
    if values.dtype == target.dtype or target.is_cuda or not target.ndim:
        target.add_(values, alpha=scale)
        return
    rows = max(1, PIECE["cpu"] * len(target) // max(1, target.numel()))
    for some, added in zip(torch.split(target, rows), torch.split(values, rows), strict=True):
        some.add_(added, alpha=scale)


def zeros(like: Mapping[str, Tensor], dtype: torch.dtype) -> Params:
    """Zeros in the shapes of some tensors; on a GPU they are a slab."""
    if _on_gpu(like):
        entries = sum(tensor.numel() for tensor in like.values())
        return FlatParams(
            torch.zeros(entries, dtype=dtype, device=next(iter(like.values())).device),
            named_shapes(like),
        )
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in like.items()}


def unflatten(flat: Tensor, shapes: NamedShapes, channels_last: bool = False) -> Params:
    """The tensors that lie side by side along the last axis of one, by name.

    >>> unflatten(torch.arange(5), [("w", (2, 2)), ("b", (1,))])["w"].tolist()
    [[0, 1], [2, 3]]
    """
    parts = torch.split(flat, [prod(shape) for _, shape in shapes], dim=-1)
    lead = flat.shape[:-1]

    def view(part: Tensor, shape: tuple[int, ...]) -> Tensor:
        if channels_last and len(shape) == 4:
            return part.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
        return part.view((*lead, *shape))

    return {name: view(part, shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def _on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors.values())
