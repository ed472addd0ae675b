"""Constraints from the sizes in a module's code: a size that the code names limits what can be cut.

Every constraint receives the labels, the positional and named arguments of a call, and its result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.submodels.tracing.symbolic_sizes import TrackedInt
from fedcover.submodels.tracing.unit_labels import UnitLabels, field_along, varying_axes

SizeConstraint = Callable[[UnitLabels, Sequence[Any], Mapping[str, Any], Any], None]
Size = int | None
"""A size as the code gives it; None if torch infers it."""


def constrain_shape(labels: UnitLabels, out: Tensor, sizes: Sequence[Size]) -> None:
    """Constrain the axes of a tensor to the sizes in the code.

    A length that is an ordinary int cannot change. If several axes share their units, the outermost
    axis that may change is cut, and the others stay whole inside it.
    """
    tied_axes: set[int] = set()
    for field in labels.of(out):
        axes = sorted(varying_axes(field))
        variable_axes = [axis for axis in axes if _is_variable(sizes[axis])]
        if not variable_axes:
            labels.atoms.fix(field)
            continue
        cut_axis = variable_axes[0]
        labels.collapse(field, [axis for axis in axes if axis != cut_axis])
        size = sizes[cut_axis]
        if isinstance(size, TrackedInt):
            labels.atoms.tie(field, field_along(size.counted_atoms, cut_axis, out.ndim))
            tied_axes.add(cut_axis)
    for axis, size in enumerate(sizes):
        if isinstance(size, TrackedInt) and axis not in tied_axes:
            size.fix()


def _is_variable(size: Size) -> bool:
    return size is None or (isinstance(size, TrackedInt) and not size.constant)


def parse_sizes(values: Sequence[Any]) -> list[Size]:
    """Return sizes that are given one by one or as one list; -1 becomes None."""
    is_one_list = len(values) == 1 and isinstance(values[0], list | tuple)
    sizes = values[0] if is_one_list else values
    return [None if size is None or int(size) == -1 else size for size in sizes]


def constrain_view(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain `view`, `reshape` and `expand`, which take a size for every axis."""
    values = args[1:] or [kwargs.get("size", kwargs.get("shape", ()))]
    if values and not isinstance(values[0], torch.dtype):
        constrain_shape(labels, out, parse_sizes(values))


def constrain_new(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain `zeros` and similar functions, which take a size for every axis of a new tensor."""
    arguments = args or [kwargs.get("size", ())]
    values = [value for value in arguments if not isinstance(value, Tensor)]
    if values and isinstance(values[0], list | tuple):
        values = values[:1]
    sizes = parse_sizes(values)
    if len(sizes) >= out.ndim:
        constrain_shape(labels, out, sizes[: out.ndim])


def constrain_unflatten(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain `unflatten`, which splits one axis into several."""
    axis = int(_argument(args, kwargs, 1, "dim")) % args[0].ndim
    sizes = parse_sizes([_argument(args, kwargs, 2, "sizes")])
    num_after = out.ndim - axis - len(sizes)
    constrain_shape(labels, out, [None] * axis + sizes + [None] * num_after)


def constrain_chunk(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Keep equal parts equal: the first unit of each part is tied to the first of the others."""
    axis = int(_argument(args, kwargs, 2, "dim", 0)) % args[0].ndim
    for part in out[1:]:
        for first, field in zip(labels.of(out[0]), labels.of(part), strict=False):
            if axis in varying_axes(field) | varying_axes(first):
                if part.shape == out[0].shape:
                    labels.atoms.tie(field, first)
                else:
                    labels.atoms.fix(field)
    if any(part.shape != out[0].shape for part in out):
        for field in labels.of(out[0]):
            if axis in varying_axes(field):
                labels.atoms.fix(field)


def constrain_split(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain `split`, which takes the sizes of the parts."""
    named_sizes = [
        kwargs[name] for name in ("split_size_or_sections", "split_size") if name in kwargs
    ]
    sizes = named_sizes[0] if named_sizes else args[1]
    axis = int(_argument(args, kwargs, 2, "dim", 0)) % args[0].ndim
    size_by_part = sizes if isinstance(sizes, list | tuple) else [sizes] * len(out)
    for part, size in zip(out, size_by_part, strict=True):
        if isinstance(size, TrackedInt):  # the last part may be shorter
            size = TrackedInt.of(size.atoms, size.counted_atoms[: part.shape[axis]])
        constrain_shape(labels, part, [None] * axis + [size] + [None] * (part.ndim - axis - 1))


def constrain_unbind(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Keep the axis of `unbind` whole: the code relies on the number of tensors."""
    axis = int(_argument(args, kwargs, 1, "dim", 0)) % args[0].ndim
    fix_range(labels, args[0], axis, slice(None))


def constrain_getitem(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain indices and ranges in square brackets."""
    source = args[0]
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    num_indexed_axes = sum(_num_axes_of_index(index) for index in indices)
    axis = 0
    for index in indices:
        if index is Ellipsis:
            axis += source.ndim - num_indexed_axes
            continue
        if isinstance(index, int | slice):
            _constrain_index(labels, source, axis, index)
        axis += _num_axes_of_index(index)


def _num_axes_of_index(index: Any) -> int:
    """Return how many axes of the source an index refers to."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return index.ndim
    return 1


def _constrain_index(labels: UnitLabels, source: Tensor, axis: int, index: int | slice) -> None:
    length = source.shape[axis]
    if labels.is_registered(source) and index != slice(None):
        fix_range(labels, source, axis, slice(None))  # another input may need the rest of a table
    elif isinstance(index, int):
        fixed = slice(0, index + 1) if index >= 0 else slice(length + index, length)
        fix_range(labels, source, axis, fixed)
    elif index.step not in (None, 1):
        fix_range(labels, source, axis, slice(None))
    else:
        _constrain_bound(labels, source, axis, index.start)
        _constrain_bound(labels, source, axis, index.stop)


def _constrain_bound(labels: UnitLabels, source: Tensor, axis: int, bound: Size) -> None:
    """Constrain one bound of a range: it counts the units before it, or these must stay."""
    length = source.shape[axis]
    if isinstance(bound, TrackedInt) and not bound.constant and int(bound) <= length:
        counted_field = field_along(bound.counted_atoms, axis, source.ndim)
        for field in labels.of(source):
            if axis in varying_axes(field):
                labels.atoms.tie(field.narrow(axis, 0, int(bound)), counted_field)
    elif bound:
        fixed = slice(0, int(bound)) if bound > 0 else slice(length + int(bound), length)
        fix_range(labels, source, axis, fixed)


def fix_range(labels: UnitLabels, source: Tensor, axis: int, indices: slice) -> None:
    """Mark a range of indices of an axis that must always be present."""
    for field in labels.of(source):
        if axis in varying_axes(field):
            labels.atoms.fix(field.transpose(0, axis)[indices])


def constrain_narrow(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain `narrow`, which takes a range by its start and length."""
    axis = int(_argument(args, kwargs, 1, "dim")) % args[0].ndim
    start = _argument(args, kwargs, 2, "start")
    length = _argument(args, kwargs, 3, "length")
    if args[0].shape[axis] != int(length):
        _constrain_index(labels, args[0], axis, slice(start, start + length))


def constrain_group_norm(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain the function `group_norm`: its number of groups counts units."""
    _constrain_groups(labels, args[0], 1, _argument(args, kwargs, 1, "num_groups"))


def constrain_conv_groups(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain the groups of a convolution, which are units if there are several."""
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    if int(groups) > 1:
        channel_axis = out.ndim - args[1].ndim + 1
        _constrain_groups(labels, out, channel_axis, groups)


def _constrain_groups(labels: UnitLabels, tensor: Tensor, axis: int, groups: int) -> None:
    for field in labels.of(tensor):
        if varying_axes(field) != {axis}:
            continue
        parts = field.view(int(groups), -1)
        if isinstance(groups, TrackedInt):
            labels.atoms.tie(parts, groups.counted_atoms[:, None])
        else:
            labels.atoms.fix(parts)
    if isinstance(groups, TrackedInt) and not labels.of(tensor):
        groups.fix()


def constrain_channel_shuffle(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Tie the first units of all parts of `channel_shuffle`, whose number of parts is constant."""
    for field in labels.of(args[0]):
        parts = field.view(int(_argument(args, kwargs, 1, "groups")), -1)
        labels.atoms.tie(parts, parts[:1])


def constrain_pixel_shuffle(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Tie the channels that `pixel_shuffle` turns into one channel."""
    for field in labels.of(args[0]):
        if varying_axes(field) == {args[0].ndim - 3}:
            parts = field.view(-1, int(_argument(args, kwargs, 1, "upscale_factor")) ** 2)
            labels.atoms.tie(parts, parts[:, :1])


def constrain_layer_norm(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Constrain the last axes of `layer_norm`, whose lengths are in the code."""
    sizes = parse_sizes([_argument(args, kwargs, 1, "normalized_shape")])
    constrain_shape(labels, out, [None] * (out.ndim - len(sizes)) + sizes)


def constrain_attention_heads(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Tie each head of `multi_head_attention_forward` to a block of the embedding.

    torch requires that all heads together are as wide as the embedding.
    """
    query, num_heads = args[0], int(args[4])
    width = query.shape[-1]
    feature_fields = [f for f in labels.of(query) if varying_axes(f) == {query.ndim - 1}]
    if feature_fields:
        heads = feature_fields[0].view(num_heads, -1)
    else:
        heads = torch.zeros((num_heads, width // num_heads), dtype=torch.int64)
    labels.atoms.tie(heads, heads[:, :1])
    projections = [kwargs.get(f"{name}_proj_weight") for name in "qkv"] + [args[5], args[6]]
    for tensor in projections:
        if tensor is None:
            continue
        for field in labels.of(tensor):
            if varying_axes(field) == {0}:
                labels.atoms.tie(field.view(-1, num_heads, width // num_heads), heads)


def constrain_one_hot(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Fix the length of the last axis of `one_hot`, the number of classes in the code."""
    num_classes = int(_argument(args, kwargs, 1, "num_classes", -1))
    constrain_shape(labels, out, [None] * (out.ndim - 1) + [num_classes])
    size = _argument(args, kwargs, 1, "num_classes")
    if isinstance(size, TrackedInt):
        size.fix()


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None
) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


SIZE_CONSTRAINTS: dict[str, SizeConstraint] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), constrain_view),
    **dict.fromkeys(("zeros", "ones", "empty", "full", "rand", "randn"), constrain_new),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "arange"), constrain_new),
    "unflatten": constrain_unflatten,
    "chunk": constrain_chunk,
    **dict.fromkeys(("split", "split_with_sizes"), constrain_split),
    "unbind": constrain_unbind,
    **dict.fromkeys(("__getitem__", "__setitem__"), constrain_getitem),
    "narrow": constrain_narrow,
    "one_hot": constrain_one_hot,
    "group_norm": constrain_group_norm,
    "channel_shuffle": constrain_channel_shuffle,
    "pixel_shuffle": constrain_pixel_shuffle,
    **dict.fromkeys(("layer_norm", "rms_norm"), constrain_layer_norm),
}
"""Constraints of functions that a module's own code calls.

A layer whose sizes follow its tensors needs none of these.
"""

BUILTIN_LAYER_CONSTRAINTS: dict[str, SizeConstraint] = {
    "multi_head_attention_forward": constrain_attention_heads,
    **{f"conv{n}d": constrain_conv_groups for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": constrain_conv_groups for n in (1, 2, 3)},
}
"""Constraints that torch's own layers need too.

Their tensors do not show how many heads, or groups of channels, they have.
"""
