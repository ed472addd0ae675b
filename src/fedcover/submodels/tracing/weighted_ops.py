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
"""The shape and the fields of a tensor."""


def contract(labels: UnitLabels, operands: Sequence[tuple[Operand, str]], out: str) -> list[Field]:
    """Return the fields of a sum of products, as in `einsum`.

    Every operand has one letter per axis. The sum is over the letters that `out` does not contain.
    """
    letters = "".join(dict.fromkeys("".join(names for _, names in operands)))

    def align(field: Field, names: str) -> Field:
        """Reorder the axes of a field as in `letters`, with length 1 for the letters it lacks."""
        order = [names.index(letter) for letter in letters if letter in names]
        index = tuple(slice(None) if letter in names else None for letter in letters)
        return field.permute(order)[index]

    aligned: list[Operand] = []
    for (shape, fields), names in operands:
        length_of = dict(zip(names, shape, strict=True))
        aligned_shape = [length_of.get(letter, 1) for letter in letters]
        aligned.append((aligned_shape, [align(field, names) for field in fields]))
    summed_axes = [axis for axis, letter in enumerate(letters) if letter not in out]
    sums = labels.reduce_sum(labels.broadcast_fields(aligned), summed_axes)
    out_axes = [letters.index(letter) for letter in out]
    result = [field.permute(out_axes + summed_axes) for field in sums]
    if summed_axes:  # these have length 1 by now
        result = [field.flatten(len(out)).squeeze(-1) for field in result]
    return result


def _operand(labels: UnitLabels, tensor: Tensor) -> Operand:
    return tensor.shape, labels.of(tensor)


def _add_bias(
    labels: UnitLabels, call: OpCall, fields: list[Field], bias: Tensor | None, axis: int = -1
) -> None:
    """Set the fields of the result after a bias, one number per unit, is added."""
    out: Tensor = call.out
    operands: list[Operand] = [(out.shape, fields)]
    if bias is not None:
        operands.append(_along_axis(labels, bias, axis % out.ndim, out.ndim))
    labels.set_fields(out, labels.broadcast_fields(operands))


def _along_axis(labels: UnitLabels, vector: Tensor, axis: int, rank: int) -> Operand:
    """Return a vector with one entry per channel as an operand along the channel axis."""
    shape = [1] * rank
    shape[axis] = len(vector)
    return shape, [field_along(field, axis, rank) for field in labels.of(vector)]


def linear(labels: UnitLabels, call: OpCall) -> None:
    """Tie the units of the input to the weight's columns; its rows are new units."""
    source, weight = call.arguments["input"], call.arguments["weight"]
    lead = ascii_uppercase[: source.ndim - 1]
    operands = [(_operand(labels, source), f"{lead}i"), (_operand(labels, weight), "oi")]
    fields = contract(labels, operands, f"{lead}o")
    _add_bias(labels, call, fields, call.get("bias"))


def matmul(labels: UnitLabels, call: OpCall) -> None:
    """Multiply matrices of any rank; leading axes are combined element by element."""
    left, right = call.tensors[-2:]
    num_lead = max(0, max(left.ndim, right.ndim) - 2)
    lead = ascii_uppercase[:num_lead]

    def letters(tensor: Tensor, matrix_letters: str) -> str:
        if tensor.ndim < 2:
            return "k"
        return lead[num_lead - (tensor.ndim - 2) :] + matrix_letters

    left_letters, right_letters = letters(left, "ik"), letters(right, "kj")
    out_letters = lead
    out_letters += "i" if "i" in left_letters else ""
    out_letters += "j" if "j" in right_letters else ""
    operands = [(_operand(labels, left), left_letters), (_operand(labels, right), right_letters)]
    fields = contract(labels, operands, out_letters)
    # addmm and baddbmm add a first tensor
    addends = [_operand(labels, tensor) for tensor in call.tensors[:-2]]
    labels.set_fields(call.out, labels.broadcast_fields([(call.out.shape, fields), *addends]))


def attention(labels: UnitLabels, call: OpCall) -> None:
    """Keep or cut whole heads: the scores of a head need all of its queries and keys."""
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    lead = ascii_uppercase[: query.ndim - 2]
    is_grouped = call.get("enable_gqa") and query.ndim > 2
    repeats = query.shape[-3] // key.shape[-3] if is_grouped else 1

    def heads(tensor: Tensor) -> Operand:
        """Return queries, keys or values with whole heads, repeated as in grouped attention."""
        for field in labels.of(tensor):
            labels.collapse(field, [field.ndim - 1])
        shape, fields = list(tensor.shape), labels.of(tensor)
        if repeats > 1 and tensor is not query:
            shape[-3] *= repeats
            fields = [
                field.repeat_interleave(repeats, field.ndim - 3) if field.shape[-3] > 1 else field
                for field in fields
            ]
        return shape, fields

    query_and_key = [(heads(query), f"{lead}qe"), (heads(key), f"{lead}ke")]
    scores = contract(labels, query_and_key, f"{lead}qk")
    score_shape = (*query.shape[:-1], key.shape[-2])
    mask = call.get("attn_mask")
    if mask is not None:
        scores = labels.broadcast_fields([(score_shape, scores), _operand(labels, mask)])
    cut_keys = [f for f in labels.simplify(scores) if f.ndim - 1 in varying_axes(f)]
    message = call.explain("keys that are cut would still take part in the softmax")
    labels.add_uncuttable(message, cut_keys)
    score_and_value = [((score_shape, scores), f"{lead}qk"), (heads(value), f"{lead}ke")]
    labels.set_fields(call.out, contract(labels, score_and_value, f"{lead}qe"))


def convolution(labels: UnitLabels, call: OpCall) -> None:
    """Tie input channels to the kernel's; a grouped convolution keeps or cuts whole groups."""
    source: Tensor = call.arguments["input"]
    weight: Tensor = call.arguments["weight"]
    groups = call.get("groups", 1)
    transposed = "transpose" in call.name or bool(call.get("transposed"))
    channel = source.ndim - (weight.ndim - 2) - 1

    channel_atoms: list[Tensor] = []
    passed_through: list[Field] = []
    uncuttable: list[Field] = []
    for field in labels.of(source):
        axes = varying_axes(field)
        if axes == {channel}:
            channel_atoms.append(field.flatten())
        if axes - {channel}:
            pointwise = _is_pointwise_along(call, weight, axes, channel)
            (passed_through if pointwise else uncuttable).append(field)
    message = call.explain("units lie along another axis than the channels")
    labels.add_uncuttable(message, uncuttable)

    width, out_width = source.shape[channel], call.out.shape[channel]
    kernel_shape = (groups, weight.shape[0] // groups, weight.shape[1])
    kernel_fields = _kernel_fields(labels, weight, groups, kernel_shape)
    input_fields = [atoms.view(groups, width // groups) for atoms in channel_atoms]
    kernel_letters = "gio" if transposed else "goi"
    input_operand: Operand = ((groups, width // groups), input_fields)
    kernel_operand: Operand = (kernel_shape, kernel_fields)
    out_fields = contract(labels, [(input_operand, "gi"), (kernel_operand, kernel_letters)], "go")
    fields: list[Field] = []
    for out_field in out_fields:
        out_atoms = out_field.expand(groups, out_width // groups).reshape(-1)
        fields.append(field_along(out_atoms, channel, source.ndim))
    _add_bias(labels, call, fields + passed_through, call.get("bias"), channel)


def _kernel_fields(
    labels: UnitLabels, weight: Tensor, groups: int, shape: tuple[int, int, int]
) -> list[Field]:
    """Return a kernel's fields over (group, first axis within the group, second axis).

    The kernel's spatial axes cannot be cut. With several groups, neither can its second axis, the
    channels inside one group.
    """
    last_cut_axis = 1 if groups == 1 else 0
    atoms_by_axis: list[tuple[int, Tensor]] = []
    for field in labels.of(weight):
        if len(varying_axes(field)) == 1:
            atoms_by_axis.append((varying_axes(field).pop(), field.flatten()))
    for axis, atoms in atoms_by_axis:
        if axis > last_cut_axis:
            labels.atoms.fix(atoms)
    fields: list[Field] = []
    for axis, atoms in atoms_by_axis:
        if axis == 0:
            fields.append(atoms.view(shape[0], shape[1], 1))
        elif axis <= last_cut_axis:
            fields.append(atoms.view(1, 1, shape[2]))
    return fields


def _is_pointwise_along(call: OpCall, weight: Tensor, axes: set[int], channel: int) -> bool:
    """Return whether a convolution handles the indices along some axes one by one.

    Its kernel then has length 1 there, and it has neither a stride nor padding.
    """
    if "transpose" in call.name or any(axis <= channel for axis in axes):
        return False
    kernel_lengths = {weight.shape[2 + axis - channel - 1] for axis in axes}
    strides, paddings = _values(call.get("stride")), _values(call.get("padding"))
    return kernel_lengths == {1} and strides == {1} and paddings <= {0, "valid"}


def _values(value: object) -> set[object]:
    return set(value) if isinstance(value, list | tuple) else {value}


def embedding(labels: UnitLabels, call: OpCall) -> None:
    """Look up rows of a table: its columns are units, and its rows cannot be cut."""
    weight, out = call.arguments["weight"], call.outputs[0]
    for field in labels.of(weight):
        if 0 in varying_axes(field):
            labels.atoms.fix(field)
    message = call.explain("the numbers to look up are cut")
    labels.add_uncuttable(message, labels.of(call.arguments["indices"]))
    labels.set_fields(out, [with_leading_axes(field, out.ndim) for field in labels.of(weight)])


def channel_norm(labels: UnitLabels, call: OpCall) -> None:
    """Normalise each channel (batch, instance norm), or whole groups of channels (group norm)."""
    source = call.tensors[0]
    normalises_weights = call.name == "batch_norm" and call.get("running_mean") is None
    for field in labels.of(source):
        axes = varying_axes(field)
        if normalises_weights and 1 not in axes:
            continue  # the moments are over the units that are kept, as in a layer norm
        if axes != {1}:
            message = call.explain("units lie along another axis than the channels")
            labels.add_uncuttable(message, [field])
        elif "num_groups" in call.arguments:
            groups = field.view(call.arguments["num_groups"], -1)
            labels.atoms.tie(groups, groups[:, :1])
    operands = [_operand(labels, source)]
    operands += [_along_axis(labels, vector, 1, source.ndim) for vector in call.tensors[1:]]
    fields = labels.broadcast_fields(operands)
    for out in call.outputs:
        labels.set_fields(out, fields)


def weight_norm(labels: UnitLabels, call: OpCall) -> None:
    """Scale directions to lengths: a direction's norm sums over what is kept of it."""
    v, g = call.arguments["v"], call.arguments["g"]
    summed_axes = set(range(v.ndim)) - {call.get("dim", 0) % v.ndim}
    norm_fields = labels.reduce_sum(labels.of(v), summed_axes)
    operands = [_operand(labels, v), _operand(labels, g), (g.shape, norm_fields)]
    fields = labels.broadcast_fields(operands)
    weight, norm = call.outputs
    labels.set_fields(weight, fields)
    labels.set_fields(norm, norm_fields)


def layer_norm(labels: UnitLabels, call: OpCall) -> None:
    """Normalise over the last axes, with moments over the units that are kept.

    Units that also vary along other axes are kept or cut whole.
    """
    source = call.tensors[0]
    num_normalised = len(call.arguments["normalized_shape"])
    normalised_axes = set(range(source.ndim - num_normalised, source.ndim))
    for field in labels.of(source):
        axes = varying_axes(field)
        if axes & normalised_axes and axes - normalised_axes:
            labels.collapse(field, normalised_axes)
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
    """Apply the rule of one operation; torch marks the operations that are element-wise."""
    if torch.Tag.pointwise in call.func.tags:
        return pointwise_ops.elementwise(labels, call)
    if creates_tensor(call.func, bool(call.tensors)):
        for out in call.outputs:
            labels.new_fields(out)  # a new tensor takes the size of what it is combined with
        return None
    return OP_RULES.get(call.name, pointwise_ops.unsupported)(labels, call)


def creates_tensor(func: OpOverload, has_inputs: bool) -> bool:
    """Return whether an operation makes a tensor without using the elements of another one."""
    return not has_inputs or op_name(func).startswith("new_")


def has_rule(func: OpOverload, has_inputs: bool) -> bool:
    """Return whether an operation has a rule; otherwise it is decomposed into smaller ones."""
    if torch.Tag.pointwise in func.tags or creates_tensor(func, has_inputs):
        return True
    return op_name(func) in OP_RULES
