"""Rules for operations without weights: data that moves, elements that meet, axes that are summed or pooled."""

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
    "view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten permute transpose t numpy_T mT "
    "adjoint movedim swapaxes swapdims squeeze unsqueeze expand expand_as broadcast_to select slice narrow split "
    "split_with_sizes chunk tensor_split unbind repeat repeat_interleave tile roll flip rot90 pixel_shuffle "
    "pixel_unshuffle channel_shuffle unfold diagonal"
)
"""Operations that only move elements: their fields are moved by the operation itself."""

IDENTITY_OPS = _names(
    "to _to_copy contiguous clone detach alias lift lift_fresh type_as dropout feature_dropout alpha_dropout "
    "feature_alpha_dropout native_dropout tril triu fill zero bernoulli uniform normal zeros_like ones_like full_like "
    "empty_like rand_like randn_like requires_grad"
)
"""Operations whose result has the elements of their first tensor."""

AXIS_MIXING_OPS = _names(
    "softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk"
)
"""Operations that mix the elements along `dim`, so that no unit along it can be cut."""

REDUCTION_OPS = _names(
    "mean amax amin max min var std var_mean std_mean prod logsumexp argmax argmin all any median"
)
AVERAGING_OPS = _names("mean var std")
"""Reductions that have a masked twin: over units that are cut, they run over those that are kept."""

SUM_OPS = _names("sum linalg_vector_norm norm frobenius_norm")
"""Reductions to which a zero adds nothing: they may run over units that are cut."""

POOLING_OPS = {
    f"{kind}{n}d{suffix}": n
    for n in (1, 2, 3)
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "_adaptive_avg_pool")
    for suffix in ("", "_with_indices")
} | {f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")} | {
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "_upsample_bilinear2d_aa": 2, "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3, "grid_sampler_2d": 2,
}  # fmt: skip
"""Operations over the last axes (space) of each channel, and how many axes those are."""


def elementwise(labels: UnitLabels, call: OpCall) -> None:
    """Elements that meet belong to the same unit."""
    fields = labels.broadcast_fields([(t.shape, labels.of(t)) for t in call.tensors])
    for out in call.outputs:
        labels.set_fields(out, [with_leading_axes(field, out.ndim) for field in fields])


def first_elementwise(labels: UnitLabels, call: OpCall) -> None:
    """Follow a function of each element whose other results only serve its gradient."""
    labels.set_fields(call.outputs[0], labels.of(call.tensors[0]))


def identity(labels: UnitLabels, call: OpCall) -> None:
    """Every element stays what it is."""
    for out in call.outputs:
        labels.set_fields(out, labels.of(call.tensors[0]) if call.tensors else [])


def movement(labels: UnitLabels, call: OpCall) -> None:
    """Elements take their units with them."""
    name = next(key for key, value in call.arguments.items() if isinstance(value, Tensor))
    source: Tensor = call.arguments[name]
    results = [
        tensors_in(call.func(**{**call.arguments, name: field.expand(source.shape).contiguous()}))
        for field in labels.of(source)
    ]
    for i, out in enumerate(call.outputs):
        labels.set_fields(out, [result[i] for result in results])


def concatenation(labels: UnitLabels, call: OpCall) -> None:
    """Tensors laid end to end: along another axis than the joined one, their units are the same units."""
    parts: list[Tensor] = [t for t in call.arguments["tensors"] if t.ndim > 1 or t.numel()]
    out: Tensor = call.out
    axis = call.get("dim", 0) % out.ndim
    stacked = call.name == "stack"
    shapes = [(*t.shape[:axis], 1, *t.shape[axis:]) if stacked else tuple(t.shape) for t in parts]
    fields = [[f.unsqueeze(axis) if stacked else f for f in labels.of(t)] for t in parts]
    across = [[f for f in each if axis not in varying_axes(f)] for each in fields]
    # without the joined axis they meet element by element
    found = labels.broadcast_fields(
        [((*s[:axis], 1, *s[axis + 1 :]), each) for s, each in zip(shapes, across, strict=True)]
    )
    on_axis = [labels.simplify(f for f in each if axis in varying_axes(f)) for each in fields]
    for i in range(max(map(len, on_axis))):
        pieces = [
            each[i] if i < len(each) else torch.zeros((1,) * out.ndim, dtype=torch.int64)
            for each in on_axis
        ]
        whole = [p.expand(s) for p, s in zip(pieces, shapes, strict=True)]
        found.append(thin(torch.cat(whole, axis)))
    labels.set_fields(out, found)


def axis_mixing(labels: UnitLabels, call: OpCall) -> None:
    """What is mixed along an axis needs all of that axis."""
    axis = call.get("dim", -1)
    source = call.tensors[0]
    for out in call.outputs:
        labels.set_fields(out, labels.of(source))
    across = [f for f in labels.of(source) if axis % max(1, source.ndim) in varying_axes(f)]
    labels.add_uncuttable(call.explain("it mixes units along an axis that is cut"), across)


def _axes(call: OpCall, source: Tensor) -> set[int]:
    dim = call.get("dim")
    listed = [dim] if isinstance(dim, int) else dim or range(source.ndim)
    return {axis % source.ndim for axis in listed} if source.ndim else set()


def _project(labels: UnitLabels, call: OpCall, source: Tensor, fields: list[Field]) -> None:
    """Give the result of a reduction its fields, with or without the reduced axes."""
    axes = _axes(call, source)
    for out in call.outputs:
        shown = fields if out.ndim == source.ndim else [f.squeeze(tuple(axes)) for f in fields]
        labels.set_fields(out, [f for f in shown if f.ndim == out.ndim])


def reduce_sum(labels: UnitLabels, call: OpCall) -> None:
    """A sum over units that are cut is the sum over those that are kept."""
    source = call.tensors[0]
    _project(labels, call, source, labels.reduce_sum(labels.of(source), _axes(call, source)))


def reduction(labels: UnitLabels, call: OpCall) -> None:
    """Averages over units that are cut run over the kept ones; other reductions have no cut version."""
    if "other" in call.arguments:  # max(a, b) is no reduction
        return elementwise(labels, call)
    source, axes = call.tensors[0], _axes(call, call.tensors[0])
    fields = labels.of(source)
    across = [f for f in fields if varying_axes(f) & axes]
    if call.name not in AVERAGING_OPS or any(varying_axes(f) - axes for f in across):
        labels.add_uncuttable(call.explain("it reduces over units that are cut"), across)
    return _project(labels, call, source, labels.reduce_sum(fields, axes))


def pooling(labels: UnitLabels, call: OpCall) -> None:
    """Pooling and resizing work on each channel by itself, and need all of its places."""
    source, space = call.tensors[0], POOLING_OPS[call.name]
    inner = set(range(source.ndim - space, source.ndim))
    for field in labels.of(source):
        if varying_axes(field) and varying_axes(field) <= inner:
            labels.atoms.fix(field)  # a table of positions that is stretched
    labels.add_uncuttable(
        call.explain("units lie along space"),
        [f for f in labels.of(source) if varying_axes(f) & inner],
    )
    for out in call.outputs:
        labels.set_fields(out, [f for f in labels.of(source) if not varying_axes(f) & inner])


def padding(labels: UnitLabels, call: OpCall) -> None:
    """Padding along a cut axis is always there; along another axis it belongs to the unit that it pads."""
    source, pads = (
        call.tensors[0],
        list(call.arguments["pad"] if "pad" in call.arguments else call.arguments["padding"]),
    )
    axes = [source.ndim - 1 - i for i in range(len(pads) // 2)]
    found = []
    for field in labels.of(source):
        own = [
            pads[2 * i + side] if axis in varying_axes(field) else 0
            for i, axis in enumerate(axes)
            for side in (0, 1)
        ]
        if call.name != "constant_pad_nd" and any(own):
            labels.add_uncuttable(call.explain("it repeats units of an axis that is cut"), [field])
        found.append(torch.constant_pad_nd(field, own, 0))
    labels.set_fields(call.out, found)


def indexing(labels: UnitLabels, call: OpCall) -> None:
    """An axis from which places are picked by number must stay whole."""
    source: Tensor = call.arguments["self"]
    listed = call.get("indices")
    axes = (
        {i for i, each in enumerate(listed) if each is not None}
        if listed
        else {call.get("dim", 0) % source.ndim}
    )
    for field in labels.of(source):
        if varying_axes(field) & axes:
            labels.atoms.fix(field)
    results = [
        call.func(**{**call.arguments, "self": field.expand(source.shape).contiguous()})
        for field in labels.of(source)
    ]
    labels.set_fields(call.out, results)


def gated_linear_unit(labels: UnitLabels, call: OpCall) -> None:
    """A gated unit is a unit of the first half and its gate in the second."""
    source, axis = call.tensors[0], call.get("dim", -1) % call.tensors[0].ndim
    halves = [f.expand(source.shape).chunk(2, axis) for f in labels.of(source)]
    for left, right in halves:
        labels.atoms.tie(left, right)
    labels.set_fields(call.out, [left for left, _ in halves])


def unfold(labels: UnitLabels, call: OpCall) -> None:
    """Each channel's patches lie one after another, and belong to it."""
    source: Tensor = call.arguments["self"]
    channel, patch = source.ndim - 3, prod(call.arguments["kernel_size"])
    fields = labels.of(source)
    labels.add_uncuttable(
        _off_channel_message(call), [field for field in fields if varying_axes(field) != {channel}]
    )
    kept = [field for field in fields if varying_axes(field) == {channel}]
    labels.set_fields(
        call.out, [field.flatten(channel + 1).repeat_interleave(patch, channel) for field in kept]
    )


def fold(labels: UnitLabels, call: OpCall) -> None:
    """Patches of one channel are summed, so they are one unit."""
    source: Tensor = call.arguments["self"]
    channel, patch = source.ndim - 2, prod(call.arguments["kernel_size"])
    fields = labels.of(source)
    labels.add_uncuttable(
        _off_channel_message(call), [field for field in fields if varying_axes(field) != {channel}]
    )
    parts = [field.view(-1, patch) for field in fields if varying_axes(field) == {channel}]
    for part in parts:
        labels.atoms.tie(part, part[:, :1])
    labels.set_fields(call.out, [field_along(part[:, 0], channel, call.out.ndim) for part in parts])


def _off_channel_message(call: OpCall) -> str:
    return call.explain("units lie along another axis than the channels")


def unsupported(labels: UnitLabels, call: OpCall) -> None:
    """What is not known cannot be cut."""
    for tensor in call.tensors:
        labels.add_uncuttable(
            call.explain("fedcover does not know how it is cut"), labels.of(tensor)
        )
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
    **dict.fromkeys(
        ("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"), padding
    ),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d", "replication_pad3d"), padding),
    **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), indexing),
    **dict.fromkeys(("copy", "_prelu_kernel", "hardswish"), elementwise),
    "log_sigmoid_forward": first_elementwise,
    "glu": gated_linear_unit,
    "im2col": unfold,
    "col2im": fold,
}
