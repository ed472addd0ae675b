"""What the code of a module promises about sizes, each time it names one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.submodels.tracing.symbolic_sizes import TrackedInt
from fedcover.submodels.tracing.unit_labels import UnitLabels, field_along, varying_axes

SizeConstraint = Callable[[UnitLabels, Sequence[Any], Mapping[str, Any], Any], None]
Size = int | None
"""A size as the code writes it; None where it leaves the length to torch."""


def constrain_shape(labels: UnitLabels, out: Tensor, sizes: Sequence[Size]) -> None:
    """Let the axes of a tensor be as long as the code says.

    A length that is written as a plain number cannot change. Where several axes share their units, the outermost that
    may change is the one that is cut, and the others stay whole inside it.
    """
    seen: set[int] = set()
    for field in labels.of(out):
        axes = sorted(varying_axes(field))
        free = [axis for axis in axes if _is_variable(sizes[axis])]
        if not free:
            labels.atoms.fix(field)
            continue
        labels.collapse(field, [axis for axis in axes if axis != free[0]])
        number = sizes[free[0]]
        if isinstance(number, TrackedInt):
            labels.atoms.tie(field, field_along(number.counted_atoms, free[0], out.ndim))
            seen.add(free[0])
    for axis, number in enumerate(sizes):
        if isinstance(number, TrackedInt) and axis not in seen:
            number.fix()


def _is_variable(size: Size) -> bool:
    return size is None or (isinstance(size, TrackedInt) and not size.constant)


def parse_sizes(values: Sequence[Any]) -> list[Size]:
    """Sizes given one by one or as one list, -1 as "whatever it takes"."""
    listed = values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values
    return [None if size is None or int(size) == -1 else size for size in listed]


def constrain_view(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`view`, `reshape`, `expand`: sizes for every axis."""
    given = args[1:] or [kwargs.get("size", kwargs.get("shape", ()))]
    if given and not isinstance(given[0], torch.dtype):
        constrain_shape(labels, out, parse_sizes(given))


def constrain_new(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`zeros` and the like: sizes for every axis of something new."""
    values = [
        value for value in (args or [kwargs.get("size", ())]) if not isinstance(value, Tensor)
    ]
    sizes = parse_sizes(values[:1] if values and isinstance(values[0], list | tuple) else values)
    if len(sizes) >= out.ndim:
        constrain_shape(labels, out, sizes[: out.ndim])


def constrain_unflatten(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """One axis laid out in several."""
    source, axis, sizes = (
        args[0],
        _argument(args, kwargs, 1, "dim"),
        _argument(args, kwargs, 2, "sizes"),
    )
    axis = int(axis) % source.ndim
    inner = parse_sizes([sizes])
    constrain_shape(labels, out, [None] * axis + inner + [None] * (out.ndim - axis - len(inner)))


def constrain_chunk(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Equal parts stay equal: the first unit of each goes with the first of the others."""
    axis = int(_argument(args, kwargs, 2, "dim", 0)) % args[0].ndim
    for part in out[1:]:
        for first, field in zip(labels.of(out[0]), labels.of(part), strict=False):
            if {axis} & (varying_axes(field) | varying_axes(first)):
                whole = torch.zeros((), dtype=torch.int64) if part.shape != out[0].shape else first
                labels.atoms.tie(field, whole)
    if any(part.shape != out[0].shape for part in out):
        for field in labels.of(out[0]):
            if axis in varying_axes(field):
                labels.atoms.fix(field)


def constrain_split(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Parts of given sizes."""
    sizes = next(
        (kwargs[key] for key in ("split_size_or_sections", "split_size") if key in kwargs), None
    )
    sizes = args[1] if sizes is None else sizes
    axis = int(_argument(args, kwargs, 2, "dim", 0)) % args[0].ndim
    listed = sizes if isinstance(sizes, list | tuple) else [sizes] * len(out)
    for part, size in zip(out, listed, strict=True):
        number = (
            TrackedInt.of(size.atoms, size.counted_atoms[: part.shape[axis]])
            if isinstance(size, TrackedInt)
            else size
        )
        constrain_shape(labels, part, [None] * axis + [number] + [None] * (part.ndim - axis - 1))


def constrain_unbind(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """One tensor for each place of an axis: the code counts on their number."""
    fix_positions(
        labels, args[0], int(_argument(args, kwargs, 1, "dim", 0)) % args[0].ndim, slice(None)
    )


def constrain_getitem(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Places and ranges named in square brackets."""
    source, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    used = sum(
        1 if not isinstance(each, Tensor) or each.dtype != torch.bool else each.ndim
        for each in index
    )
    used -= sum(each is None or each is Ellipsis for each in index)
    axis = 0
    for each in index:
        if each is None:
            continue
        if each is Ellipsis:
            axis += source.ndim - used
            continue
        if isinstance(each, int | slice):
            _constrain_index(labels, source, axis, each)
        axis += each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1


def _constrain_index(labels: UnitLabels, source: Tensor, axis: int, index: Any) -> None:
    length = source.shape[axis]
    if labels.is_registered(source) and index != slice(None):
        fix_positions(
            labels, source, axis, slice(None)
        )  # another input may need the rest of a table
    elif isinstance(index, int):
        fix_positions(
            labels,
            source,
            axis,
            slice(0, index + 1) if index >= 0 else slice(length + index, length),
        )
    elif index.step not in (None, 1):
        fix_positions(labels, source, axis, slice(None))
    else:
        for bound in (index.start, index.stop):
            if isinstance(bound, TrackedInt) and not bound.constant and int(bound) <= length:
                for field in labels.of(source):
                    if axis in varying_axes(field):
                        counted_atoms = field_along(bound.counted_atoms, axis, source.ndim)
                        labels.atoms.tie(field.narrow(axis, 0, int(bound)), counted_atoms)
            elif bound:
                places = slice(0, int(bound)) if bound > 0 else slice(length + int(bound), length)
                fix_positions(labels, source, axis, places)


def fix_positions(labels: UnitLabels, source: Tensor, axis: int, places: slice) -> None:
    """Let the named places of an axis be always there."""
    for field in labels.of(source):
        if axis in varying_axes(field):
            labels.atoms.fix(field.transpose(0, axis)[places])


def constrain_narrow(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """A range given by its start and length."""
    axis, start, length = (
        _argument(args, kwargs, i, name) for i, name in ((1, "dim"), (2, "start"), (3, "length"))
    )
    axis = int(axis) % args[0].ndim
    if args[0].shape[axis] != int(length):
        _constrain_index(labels, args[0], axis, slice(start, start + length))


def constrain_group_norm(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`group_norm` called as a function: its number of groups counts units."""
    _constrain_groups(labels, args[0], 1, _argument(args, kwargs, 1, "num_groups"))


def constrain_conv_groups(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """The groups of a convolution, if there are several, are units that are counted."""
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    if int(groups) > 1:
        _constrain_groups(labels, out, out.ndim - args[1].ndim + 1, groups)


def _constrain_groups(labels: UnitLabels, tensor: Tensor, axis: int, groups: int) -> None:
    for field in labels.of(tensor):
        if varying_axes(field) == {axis}:
            parts = field.view(int(groups), -1)
            counted_atoms = (
                groups.counted_atoms[:, None]
                if isinstance(groups, TrackedInt)
                else torch.zeros((), dtype=torch.int64)
            )
            labels.atoms.tie(parts, counted_atoms)
    if isinstance(groups, TrackedInt) and not labels.of(tensor):
        groups.fix()


def constrain_channel_shuffle(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`channel_shuffle` deals a fixed number of equal parts: the first units of all parts go together."""
    for field in labels.of(args[0]):
        parts = field.view(int(_argument(args, kwargs, 1, "groups")), -1)
        labels.atoms.tie(parts, parts[:1])


def constrain_pixel_shuffle(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`pixel_shuffle` makes one channel of many: they are one unit."""
    for field in labels.of(args[0]):
        if varying_axes(field) == {args[0].ndim - 3}:
            parts = field.view(-1, int(_argument(args, kwargs, 1, "upscale_factor")) ** 2)
            labels.atoms.tie(parts, parts[:, :1])


def constrain_layer_norm(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`layer_norm` over the last axes, whose lengths the code names."""
    sizes = parse_sizes([_argument(args, kwargs, 1, "normalized_shape")])
    constrain_shape(labels, out, [None] * (out.ndim - len(sizes)) + sizes)


def constrain_attention_heads(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`multi_head_attention_forward` is as wide inside as outside, so each head goes with a block of the embedding."""
    query, count = args[0], int(args[4])
    width = query.shape[-1]
    inside = [kwargs.get(f"{name}_proj_weight") for name in "qkv"] + [args[5], args[6]]
    fields = [f for f in labels.of(query) if varying_axes(f) == {query.ndim - 1}]
    units = (
        fields[0].view(count, -1)
        if fields
        else torch.zeros((count, width // count), dtype=torch.int64)
    )
    labels.atoms.tie(units, units[:, :1])
    for tensor in inside:
        for field in labels.of(tensor) if tensor is not None else ():
            if varying_axes(field) == {0}:
                labels.atoms.tie(field.view(-1, count, width // count), units)


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def constrain_one_hot(
    labels: UnitLabels, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """`one_hot` marks one of as many places as the code says, whatever the others are for."""
    constrain_shape(
        labels, out, [None] * (out.ndim - 1) + [int(_argument(args, kwargs, 1, "num_classes", -1))]
    )
    number = _argument(args, kwargs, 1, "num_classes")
    if isinstance(number, TrackedInt):
        number.fix()


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
"""Called by a module's own code; a layer that is told its size keeps its promises by itself."""

BUILTIN_LAYER_CONSTRAINTS: dict[str, SizeConstraint] = {
    "multi_head_attention_forward": constrain_attention_heads,
    **{f"conv{n}d": constrain_conv_groups for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": constrain_conv_groups for n in (1, 2, 3)},
}
"""Kept in torch's own layers too: their tensors do not say how many heads or groups of channels they have."""
