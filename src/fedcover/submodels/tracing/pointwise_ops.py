"""Rules for operations without weights: moving, combining, reducing and pooling elements.

A rule receives the labels and one operation. It couples units and sets the fields of the results.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fedcover.submodels.tracing.calls import OpCall, tensors_in
from fedcover.submodels.tracing.unit_labels import (
    Field,
    UnitLabels,
    field_along,
    thin,
    varying_axes,
    with_leading_axes,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVEMENT_OPS = _names(
    "view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten permute "
    "transpose t numpy_T mT adjoint movedim swapaxes swapdims squeeze unsqueeze expand "
    "expand_as broadcast_to select slice narrow split split_with_sizes chunk tensor_split "
    "unbind repeat repeat_interleave tile roll flip rot90 pixel_shuffle pixel_unshuffle "
    "channel_shuffle unfold diagonal"
)
"""Operations that only move elements; the operation itself moves the fields."""

IDENTITY_OPS = _names(
    "to _to_copy contiguous clone detach alias lift lift_fresh type_as dropout feature_dropout "
    "alpha_dropout feature_alpha_dropout native_dropout tril triu fill zero bernoulli uniform "
    "normal zeros_like ones_like full_like empty_like rand_like randn_like requires_grad"
)
"""Operations whose result has the fields of their first tensor."""

AXIS_MIXING_OPS = _names(
    "softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk"
)
"""Operations that mix the elements along `dim`, so that no unit along it can be cut."""

REDUCTION_OPS = _names(
    "mean amax amin max min var std var_mean std_mean prod logsumexp argmax argmin all any median"
)
AVERAGING_OPS = _names("mean var std")
"""Reductions with a masked form; the sliced model reduces over the units that are kept."""

SUM_OPS = _names("sum linalg_vector_norm norm frobenius_norm")
"""Reductions that zeros do not change, so they may run over units that are cut."""

POOL_KINDS = _names("max_pool avg_pool adaptive_avg_pool adaptive_max_pool _adaptive_avg_pool")
POOLING_OPS = {
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in POOL_KINDS},
    **{f"{kind}{n}d_with_indices": n for n in (1, 2, 3) for kind in POOL_KINDS},
    **{f"upsample_nearest{n}d": n for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": n for n in (1, 2, 3)},
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "_upsample_bilinear2d_aa": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "grid_sampler_2d": 2,
}
"""Operations over the spatial axes (the last ones) of each channel, and how many these are."""


def elementwise(labels: UnitLabels, call: OpCall) -> None:
    """Couple the elements that are combined: they belong to the same unit."""
    fields = labels.broadcast_fields([(tensor.shape, labels.of(tensor)) for tensor in call.tensors])
    for out in call.outputs:
        labels.set_fields(out, [with_leading_axes(field, out.ndim) for field in fields])


def first_elementwise(labels: UnitLabels, call: OpCall) -> None:
    """Handle an element-wise function whose other results only serve its gradient."""
    labels.set_fields(call.outputs[0], labels.of(call.tensors[0]))


def identity(labels: UnitLabels, call: OpCall) -> None:
    """Give the result the fields of the first tensor."""
    for out in call.outputs:
        labels.set_fields(out, labels.of(call.tensors[0]) if call.tensors else [])


def movement(labels: UnitLabels, call: OpCall) -> None:
    """Move the fields with the elements, by applying the operation to every field."""
    name = next(key for key, value in call.arguments.items() if isinstance(value, Tensor))
    source: Tensor = call.arguments[name]
    fields_by_source: list[list[Tensor]] = []
    for field in labels.of(source):
        arguments = {**call.arguments, name: field.expand(source.shape).contiguous()}
        fields_by_source.append(tensors_in(call.func(**arguments)))
    for i, out in enumerate(call.outputs):
        labels.set_fields(out, [fields[i] for fields in fields_by_source])


def concatenation(labels: UnitLabels, call: OpCall) -> None:
    """Join tensors along an axis.

    Fields along the joined axis are concatenated. Along the other axes the tensors have the same
    units.
    """
    parts: list[Tensor] = [t for t in call.arguments["tensors"] if t.ndim > 1 or t.numel()]
    out: Tensor = call.out
    axis = call.get("dim", 0) % out.ndim
    shapes = [tuple(part.shape) for part in parts]
    fields_by_part = [labels.of(part) for part in parts]
    if call.name == "stack":
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
        fields_by_part = [[field.unsqueeze(axis) for field in fields] for fields in fields_by_part]

    # without the joined axis the tensors are combined element by element
    operands = [
        ((*shape[:axis], 1, *shape[axis + 1 :]), [f for f in fields if axis not in varying_axes(f)])
        for shape, fields in zip(shapes, fields_by_part, strict=True)
    ]
    result = labels.broadcast_fields(operands)

    joined_fields = [
        labels.simplify(field for field in fields if axis in varying_axes(field))
        for fields in fields_by_part
    ]
    fixed = torch.zeros((1,) * out.ndim, dtype=torch.int64)
    for i in range(max(map(len, joined_fields))):
        pieces: list[Field] = []
        for shape, fields in zip(shapes, joined_fields, strict=True):
            piece = fields[i] if i < len(fields) else fixed
            pieces.append(piece.expand(shape))
        result.append(thin(torch.cat(pieces, axis)))
    labels.set_fields(out, result)


def axis_mixing(labels: UnitLabels, call: OpCall) -> None:
    """Refuse to cut the axis along which elements are mixed."""
    axis = call.get("dim", -1)
    source = call.tensors[0]
    for out in call.outputs:
        labels.set_fields(out, labels.of(source))
    mixed_axis = axis % max(1, source.ndim)
    mixed = [field for field in labels.of(source) if mixed_axis in varying_axes(field)]
    labels.add_uncuttable(call.explain("it mixes units along an axis that is cut"), mixed)


def _reduced_axes(call: OpCall, source: Tensor) -> set[int]:
    if not source.ndim:
        return set()
    dim = call.get("dim")
    axes = [dim] if isinstance(dim, int) else dim or range(source.ndim)
    return {axis % source.ndim for axis in axes}


def _set_reduced_fields(
    labels: UnitLabels, call: OpCall, source: Tensor, fields: list[Field]
) -> None:
    """Set the fields of a reduction's results, with or without the reduced axes."""
    axes = tuple(_reduced_axes(call, source))
    for out in call.outputs:
        shown = fields
        if out.ndim != source.ndim:
            shown = [field.squeeze(axes) for field in fields]
        labels.set_fields(out, [field for field in shown if field.ndim == out.ndim])


def reduce_sum(labels: UnitLabels, call: OpCall) -> None:
    """Sum over units: if some are cut, the sum is over those that are kept."""
    source = call.tensors[0]
    fields = labels.reduce_sum(labels.of(source), _reduced_axes(call, source))
    _set_reduced_fields(labels, call, source, fields)


def reduction(labels: UnitLabels, call: OpCall) -> None:
    """Average over the units that are kept; other reductions have no cut version."""
    if "other" in call.arguments:  # max(a, b) is element-wise
        return elementwise(labels, call)
    source = call.tensors[0]
    axes = _reduced_axes(call, source)
    fields = labels.of(source)
    reduced = [field for field in fields if varying_axes(field) & axes]
    is_partial = any(varying_axes(field) - axes for field in reduced)
    if call.name not in AVERAGING_OPS or is_partial:
        labels.add_uncuttable(call.explain("it reduces over units that are cut"), reduced)
    return _set_reduced_fields(labels, call, source, labels.reduce_sum(fields, axes))


def pooling(labels: UnitLabels, call: OpCall) -> None:
    """Pool or resize each channel by itself; its spatial axes cannot be cut."""
    source = call.tensors[0]
    spatial_axes = set(range(source.ndim - POOLING_OPS[call.name], source.ndim))
    for field in labels.of(source):
        if varying_axes(field) and varying_axes(field) <= spatial_axes:
            labels.atoms.fix(field)  # a table of positions that is resized
    fields = labels.of(source)
    spatial = [field for field in fields if varying_axes(field) & spatial_axes]
    labels.add_uncuttable(call.explain("units lie along space"), spatial)
    for out in call.outputs:
        labels.set_fields(out, [f for f in fields if not varying_axes(f) & spatial_axes])


def padding(labels: UnitLabels, call: OpCall) -> None:
    """Pad a tensor: padding along a cut axis is fixed, other padding belongs to its unit."""
    source = call.tensors[0]
    pads = list(call.arguments["pad"] if "pad" in call.arguments else call.arguments["padding"])
    axes = [source.ndim - 1 - i for i in range(len(pads) // 2)]
    fields: list[Field] = []
    for field in labels.of(source):
        field_pads: list[int] = []
        for i, axis in enumerate(axes):
            varies = axis in varying_axes(field)
            field_pads += pads[2 * i : 2 * i + 2] if varies else [0, 0]
        if call.name != "constant_pad_nd" and any(field_pads):
            labels.add_uncuttable(call.explain("it repeats units of an axis that is cut"), [field])
        fields.append(torch.constant_pad_nd(field, field_pads, 0))
    labels.set_fields(call.out, fields)


def indexing(labels: UnitLabels, call: OpCall) -> None:
    """Keep an axis whole if elements along it are selected by index."""
    source: Tensor = call.arguments["self"]
    indices = call.get("indices")
    if indices:
        axes = {axis for axis, index in enumerate(indices) if index is not None}
    else:
        axes = {call.get("dim", 0) % source.ndim}
    for field in labels.of(source):
        if varying_axes(field) & axes:
            labels.atoms.fix(field)
    results: list[Field] = []
    for field in labels.of(source):
        arguments = {**call.arguments, "self": field.expand(source.shape).contiguous()}
        results.append(call.func(**arguments))
    labels.set_fields(call.out, results)


def gated_linear_unit(labels: UnitLabels, call: OpCall) -> None:
    """Tie each unit of the first half to its gate in the second half."""
    source = call.tensors[0]
    axis = call.get("dim", -1) % source.ndim
    halves = [field.expand(source.shape).chunk(2, axis) for field in labels.of(source)]
    for left, right in halves:
        labels.atoms.tie(left, right)
    labels.set_fields(call.out, [left for left, _ in halves])


def unfold(labels: UnitLabels, call: OpCall) -> None:
    """Extract patches: the entries of a channel's patches belong to the channel."""
    source: Tensor = call.arguments["self"]
    channel, patch_size = source.ndim - 3, prod(call.arguments["kernel_size"])
    fields = _channel_fields(labels, call, source, channel)
    result = [field.flatten(channel + 1).repeat_interleave(patch_size, channel) for field in fields]
    labels.set_fields(call.out, result)


def fold(labels: UnitLabels, call: OpCall) -> None:
    """Sum patches: the entries of one channel's patches are one unit."""
    source: Tensor = call.arguments["self"]
    channel, patch_size = source.ndim - 2, prod(call.arguments["kernel_size"])
    fields = _channel_fields(labels, call, source, channel)
    patches = [field.view(-1, patch_size) for field in fields]
    for patch in patches:
        labels.atoms.tie(patch, patch[:, :1])
    result = [field_along(patch[:, 0], channel, call.out.ndim) for patch in patches]
    labels.set_fields(call.out, result)


def _channel_fields(labels: UnitLabels, call: OpCall, source: Tensor, channel: int) -> list[Field]:
    """Return the fields along the channels; units along other axes cannot be cut."""
    fields = labels.of(source)
    others = [field for field in fields if varying_axes(field) != {channel}]
    labels.add_uncuttable(call.explain("units lie along another axis than the channels"), others)
    return [field for field in fields if varying_axes(field) == {channel}]


def unsupported(labels: UnitLabels, call: OpCall) -> None:
    """Refuse to cut the inputs of an operation that has no rule."""
    for tensor in call.tensors:
        message = call.explain("fedcover does not know how it is cut")
        labels.add_uncuttable(message, labels.of(tensor))
    for out in call.outputs:
        if not any(out is tensor for tensor in call.tensors):
            labels.set_fields(out, [])


OP_RULES: dict[str, Callable[[UnitLabels, OpCall], None]] = {
    **dict.fromkeys(MOVEMENT_OPS, movement),
    **dict.fromkeys(IDENTITY_OPS, identity),
    **dict.fromkeys(AXIS_MIXING_OPS, axis_mixing),
    **dict.fromkeys(REDUCTION_OPS, reduction),
    **dict.fromkeys(SUM_OPS, reduce_sum),
    **dict.fromkeys(POOLING_OPS, pooling),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), concatenation),
    "constant_pad_nd": padding,
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"), padding),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d", "replication_pad3d"), padding),
    **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), indexing),
    **dict.fromkeys(("copy", "_prelu_kernel", "hardswish"), elementwise),
    "log_sigmoid_forward": first_elementwise,
    "glu": gated_linear_unit,
    "im2col": unfold,
    "col2im": fold,
}
