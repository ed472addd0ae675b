"""Rules for operations with weights: products, convolutions, attention, embeddings and norms."""

from collections.abc import Callable, Sequence
from string import ascii_uppercase

import torch
from torch import Tensor
from torch._ops import OpOverload

from fedcover.submodels.tracing import pointwise_ops, recurrent_ops
from fedcover.submodels.tracing.calls import OpCall, op_name
from fedcover.submodels.tracing.unit_labels import (
    Field,
    Shape,
    UnitLabels,
    field_along,
    varying_axes,
    with_leading_axes,
)

Operand = tuple[Shape, Sequence[Field]]


def contract(labels: UnitLabels, operands: Sequence[tuple[Operand, str]], out: str) -> list[Field]:
    """The fields of a sum of products over the axes whose letters the result lacks, as in `einsum`."""
    letters = "".join(dict.fromkeys("".join(names for _, names in operands)))

    def spread(tensor: Tensor, names: str) -> Tensor:
        order = [names.index(letter) for letter in letters if letter in names]
        index = tuple(slice(None) if letter in names else None for letter in letters)
        return tensor.permute(order)[index]

    joint: list[Operand] = []
    for (shape, fields), names in operands:
        sizes = dict(zip(names, shape, strict=True))
        joint.append(
            (
                [sizes.get(letter, 1) for letter in letters],
                [spread(field, names) for field in fields],
            )
        )
    gone = [axis for axis, letter in enumerate(letters) if letter not in out]
    kept = labels.reduce_sum(labels.broadcast_fields(joint), gone)
    order = [letters.index(letter) for letter in out] + gone
    return [
        field.permute(order).flatten(len(out)).squeeze(-1) if gone else field.permute(order)
        for field in kept
    ]


def _operand(labels: UnitLabels, tensor: Tensor) -> Operand:
    return tensor.shape, labels.of(tensor)


def _add_bias(
    labels: UnitLabels, call: OpCall, fields: list[Field], bias: Tensor | None, axis: int = -1
) -> None:
    """Give the result its fields after adding what shifts each unit."""
    out: Tensor = call.out
    operands: list[Operand] = [(out.shape, fields)]
    if bias is not None:
        operands.append(_along_axis(labels, bias, axis % out.ndim, out.ndim))
    labels.set_fields(out, labels.broadcast_fields(operands))


def _along_axis(labels: UnitLabels, vector: Tensor, axis: int, rank: int) -> Operand:
    """A vector with one entry per channel, as it meets a tensor whose channels lie along an axis."""
    shape = [1] * rank
    shape[axis] = len(vector)
    return shape, [field_along(field, axis, rank) for field in labels.of(vector)]


def linear(labels: UnitLabels, call: OpCall) -> None:
    """Units of the input meet the weight's columns; its rows are new units."""
    source, weight = call.arguments["input"], call.arguments["weight"]
    lead = ascii_uppercase[: source.ndim - 1]
    fields = contract(
        labels,
        [(_operand(labels, source), f"{lead}i"), (_operand(labels, weight), "oi")],
        f"{lead}o",
    )
    _add_bias(labels, call, fields, call.get("bias"))


def matmul(labels: UnitLabels, call: OpCall) -> None:
    """Matrix products of any rank; leading axes meet element by element."""
    left, right = call.tensors[-2:]
    rank = max(left.ndim, right.ndim) - 2
    lead = ascii_uppercase[: max(0, rank)]

    def names(tensor: Tensor, last: str) -> str:
        return lead[max(0, rank) - (tensor.ndim - 2) :] + last if tensor.ndim > 1 else "k"

    a, b = names(left, "ik"), names(right, "kj")
    out = lead + ("i" if "i" in a else "") + ("j" if "j" in b else "")
    fields = contract(labels, [(_operand(labels, left), a), (_operand(labels, right), b)], out)
    operands: list[Operand] = [(call.out.shape, fields)]
    operands += [
        _operand(labels, t) for t in call.tensors[:-2]
    ]  # addmm and baddbmm add a first tensor
    labels.set_fields(call.out, labels.broadcast_fields(operands))


def attention(labels: UnitLabels, call: OpCall) -> None:
    """Heads are kept or cut whole: the scores of a head need all of its queries and keys."""
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    lead = ascii_uppercase[: query.ndim - 2]
    repeats = query.shape[-3] // key.shape[-3] if call.get("enable_gqa") and query.ndim > 2 else 1

    def heads(tensor: Tensor) -> Operand:
        shape, fields = list(tensor.shape), labels.of(tensor)
        for field in fields:
            labels.collapse(field, [field.ndim - 1])
        fields = labels.of(tensor)
        if repeats > 1 and tensor is not query:
            shape[-3] *= repeats
            fields = [
                f.repeat_interleave(repeats, f.ndim - 3) if f.shape[-3] > 1 else f for f in fields
            ]
        return shape, fields

    scores = contract(labels, [(heads(query), f"{lead}qe"), (heads(key), f"{lead}ke")], f"{lead}qk")
    met: Operand = ((*query.shape[:-1], key.shape[-2]), scores)
    mask = call.get("attn_mask")
    if mask is not None:
        met = met[0], labels.broadcast_fields([met, _operand(labels, mask)])
    inner = labels.simplify(met[1])
    mixed = [f for f in inner if varying_axes(f) & {f.ndim - 1}]
    labels.add_uncuttable(
        call.explain("keys that are cut would still take part in the softmax"), mixed
    )
    labels.set_fields(
        call.out, contract(labels, [(met, f"{lead}qk"), (heads(value), f"{lead}ke")], f"{lead}qe")
    )


def convolution(labels: UnitLabels, call: OpCall) -> None:
    """Channels meet the kernel's; of a grouped convolution whole groups are kept or cut."""
    source: Tensor = call.arguments["input"]
    weight: Tensor = call.arguments["weight"]
    groups, transposed = (
        call.get("groups", 1),
        "transpose" in call.name or bool(call.get("transposed")),
    )
    space = weight.ndim - 2
    channel = source.ndim - space - 1
    fields = labels.of(source)
    stray = [f for f in fields if varying_axes(f) - {channel}]
    apart = [f for f in stray if _is_pointwise_along(call, weight, varying_axes(f), channel)]
    mixed = [f for f in stray if not any(f is other for other in apart)]
    labels.add_uncuttable(call.explain("units lie along another axis than the channels"), mixed)
    channels = [f.flatten() for f in fields if varying_axes(f) == {channel}]
    kernel = [
        (varying_axes(f).pop(), f.flatten()) for f in labels.of(weight) if len(varying_axes(f)) == 1
    ]
    for axis, field in kernel:
        if axis > (groups == 1):  # space; with several groups, also the channels inside one
            labels.atoms.fix(field)
    kernel = [(axis, field) for axis, field in kernel if axis <= (groups == 1)]
    width = source.shape[channel]
    ins, outs = ("goi", "gio")[transposed], call.out.shape[channel]
    shape = (groups, weight.shape[0] // groups, weight.shape[1])
    spread = [_kernel_field(axis, field, shape) for axis, field in kernel]
    data = [field.view(groups, width // groups) for field in channels]
    found = contract(
        labels, [(((groups, width // groups), data), "gi"), ((shape, spread), ins)], "go"
    )
    rows = [field.expand(groups, outs // groups).reshape(-1) for field in found]
    found = [field_along(row, channel, source.ndim) for row in rows] + apart
    _add_bias(labels, call, found, call.get("bias"), channel)


def _is_pointwise_along(call: OpCall, weight: Tensor, axes: set[int], channel: int) -> bool:
    """Whether a convolution takes the places along some axes one by one: its kernel has length 1 there, and no step."""
    kernel = [weight.shape[2 + axis - channel - 1] if axis > channel else 0 for axis in axes]
    arguments = {name: call.get(name) for name in ("stride", "padding")}
    step, margin = (
        {value} if not isinstance(value, list | tuple) else set(value)
        for value in arguments.values()
    )
    return (
        set(kernel) == {1}
        and step == {1}
        and margin <= {0, "valid"}
        and "transpose" not in call.name
    )


def _kernel_field(axis: int, field: Field, shape: tuple[int, int, int]) -> Field:
    """A kernel's field over (convolution group, its first axis within the group, its second axis)."""
    return field.view(shape[0], shape[1], 1) if axis == 0 else field.view(1, 1, shape[2])


def embedding(labels: UnitLabels, call: OpCall) -> None:
    """A table's columns are units; its rows are looked up by number and stay."""
    weight, out = call.arguments["weight"], call.outputs[0]
    for field in labels.of(weight):
        if 0 in varying_axes(field):
            labels.atoms.fix(field)
    labels.add_uncuttable(
        call.explain("the numbers to look up are cut"), labels.of(call.arguments["indices"])
    )
    labels.set_fields(out, [with_leading_axes(field, out.ndim) for field in labels.of(weight)])


def channel_norm(labels: UnitLabels, call: OpCall) -> None:
    """Statistics of each channel (batch, instance norm), or of whole groups of channels (group norm)."""
    source = call.tensors[0]
    of_weights = call.name == "batch_norm" and call.get("running_mean") is None
    for field in labels.of(source):
        if of_weights and 1 not in varying_axes(field):
            continue  # the moments of what is there, as in a layer norm
        if varying_axes(field) != {1}:
            labels.add_uncuttable(
                call.explain("units lie along another axis than the channels"), [field]
            )
        elif "num_groups" in call.arguments:
            groups = field.view(call.arguments["num_groups"], -1)
            labels.atoms.tie(groups, groups[:, :1])
    operands = [_operand(labels, source)]
    operands += [_along_axis(labels, vector, 1, source.ndim) for vector in call.tensors[1:]]
    fields = labels.broadcast_fields(operands)
    for out in call.outputs:
        labels.set_fields(out, fields)


def weight_norm(labels: UnitLabels, call: OpCall) -> None:
    """The length of each direction is a sum over what is there; its unit has a length of its own."""
    v, g = call.arguments["v"], call.arguments["g"]
    axes = set(range(v.ndim)) - {call.get("dim", 0) % v.ndim}
    lengths = labels.reduce_sum(labels.of(v), axes)
    fields = labels.broadcast_fields([_operand(labels, v), _operand(labels, g), (g.shape, lengths)])
    weight, length = call.outputs
    labels.set_fields(weight, fields)
    labels.set_fields(length, lengths)


def layer_norm(labels: UnitLabels, call: OpCall) -> None:
    """A norm across a cut axis takes its moments over the kept units; across part of a unit it needs it whole."""
    source = call.tensors[0]
    inner = set(range(source.ndim - len(call.arguments["normalized_shape"]), source.ndim))
    for field in labels.of(source):
        if varying_axes(field) & inner and varying_axes(field) - inner:
            labels.collapse(field, inner)
    fields = labels.broadcast_fields([_operand(labels, tensor) for tensor in call.tensors])
    for out in call.outputs:
        labels.set_fields(out, [field for field in fields if field.ndim == out.ndim])


OP_RULES: dict[str, Callable[[UnitLabels, OpCall], None]] = {
    **pointwise_ops.OP_RULES,
    **recurrent_ops.OP_RULES,
    "linear": linear,
    **dict.fromkeys(
        ("matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm"), matmul
    ),
    "scaled_dot_product_attention": attention,
    **{f"conv{n}d": convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolution for n in (1, 2, 3)},
    "convolution": convolution,
    **dict.fromkeys(("embedding", "embedding_bag"), embedding),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm"), channel_norm),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "_weight_norm_interface": weight_norm,
}


def propagate(labels: UnitLabels, call: OpCall) -> None:
    """Follow one operation; what is pointwise says so itself."""
    if torch.Tag.pointwise in call.func.tags:
        return pointwise_ops.elementwise(labels, call)
    if creates_tensor(call.func, bool(call.tensors)):
        for out in call.outputs:
            labels.new_fields(out)  # made here: it takes the size of what it meets
        return None
    return OP_RULES.get(call.name, pointwise_ops.unsupported)(labels, call)


def creates_tensor(func: OpOverload, takes: bool) -> bool:
    """Whether an operation makes a tensor of no other tensor's elements."""
    return not takes or op_name(func).startswith("new_")


def has_rule(func: OpOverload, takes: bool) -> bool:
    """Whether there is a rule for an operation; without one it is taken apart into smaller ones."""
    return (
        torch.Tag.pointwise in func.tags or creates_tensor(func, takes) or op_name(func) in OP_RULES
    )
