"""Rules for recurrent layers: a unit is a row of every gate, in all layers and directions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.submodels.tracing.calls import OpCall, tensors_in
from fedcover.submodels.tracing.unit_labels import UnitLabels, field_along, varying_axes

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""The number of gates. The weights of a layer have one block of rows per gate."""


@dataclass(frozen=True)
class DirectionWeights:
    """The weights of one direction of one layer.

    `weight_ih` reads the input, `weight_hh` the previous output. `weight_hr` is the projection of
    an LSTM, if it has one.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    biases: Sequence[Tensor]
    weight_hr: Tensor | None


def recurrent_layer(labels: UnitLabels, call: OpCall) -> None:
    """Tie the rows of all gates of a hidden unit to its columns and to its index in the output.

    A layer of torch has one size for all of its stacked layers and directions, so a unit is cut
    from all of them.
    """
    directions = 2 if call.arguments["bidirectional"] else 1
    hidden, output = _hidden_and_output_units(labels, call)
    data = call.arguments["data"] if "data" in call.arguments else call.arguments["input"]
    inputs = _feature_atoms(labels, call, data)
    for i, weights in enumerate(_weights(call)):
        if i and i % directions == 0:  # further layers read the output of the one before
            inputs = output.repeat(directions)
        _tie_weights(labels, call, weights, inputs, hidden, output)
    _tie_initial_state(labels, call, hidden, output)
    # the output, then the final output of every layer, and for an LSTM its cell state
    units_by_result = (output.repeat(directions), output, hidden)
    for tensor, units in zip(call.outputs, units_by_result, strict=False):
        labels.set_fields(tensor, [field_along(units, tensor.ndim - 1, tensor.ndim)])


def recurrent_cell(labels: UnitLabels, call: OpCall) -> None:
    """Trace one step of a layer with one direction; its units are those of the state."""
    arguments = call.arguments
    biases = [arguments[name] for name in ("b_ih", "b_hh") if arguments[name] is not None]
    weights = DirectionWeights(arguments["w_ih"], arguments["w_hh"], biases, None)
    num_gates = GATES[call.name.removesuffix("_cell")]
    hidden = _axis_atoms(labels, call, weights.weight_hh, 0).view(num_gates, -1)[0]
    inputs = _feature_atoms(labels, call, arguments["input"])
    _tie_weights(labels, call, weights, inputs, hidden, hidden)
    _tie_initial_state(labels, call, hidden, hidden)
    for out in call.outputs:
        labels.set_fields(out, [field_along(hidden, out.ndim - 1, out.ndim)])


def _tie_weights(
    labels: UnitLabels,
    call: OpCall,
    weights: DirectionWeights,
    inputs: Tensor,
    hidden: Tensor,
    output: Tensor,
) -> None:
    """Tie the weights of one direction of one layer to its input, hidden and output units."""
    for rows in (weights.weight_ih, weights.weight_hh, *weights.biases):
        labels.atoms.tie(_axis_atoms(labels, call, rows, 0).view(-1, len(hidden)), hidden)
    labels.atoms.tie(_axis_atoms(labels, call, weights.weight_ih, 1), inputs)
    labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hh, 1), output)
    if weights.weight_hr is not None:
        labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hr, 0), output)
        labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hr, 1), hidden)


def _tie_initial_state(labels: UnitLabels, call: OpCall, hidden: Tensor, output: Tensor) -> None:
    """Tie the initial state of a layer: its last output, and for an LSTM its cell state."""
    for state, units in zip(tensors_in(call.arguments["hx"]), (output, hidden), strict=False):
        for field in labels.of(state):
            if varying_axes(field) - {state.ndim - 1}:
                labels.atoms.fix(field)  # layers and samples cannot be cut
        labels.atoms.tie(_axis_atoms(labels, call, state, state.ndim - 1), units)


def _weights(call: OpCall) -> Iterator[DirectionWeights]:
    """Yield the weights of each direction of each layer, in torch's order."""
    params: list[Tensor] = call.arguments["params"]
    num_biases = 2 if call.arguments["has_biases"] else 0
    num_directions = call.arguments["num_layers"] * (2 if call.arguments["bidirectional"] else 1)
    num_tensors = len(params) // num_directions
    for first in range(0, len(params), num_tensors):
        weight_ih, weight_hh, *others = params[first : first + num_tensors]
        biases, projection = others[:num_biases], others[num_biases:]
        weight_hr = projection[0] if projection else None
        yield DirectionWeights(weight_ih, weight_hh, biases, weight_hr)


def _hidden_and_output_units(labels: UnitLabels, call: OpCall) -> tuple[Tensor, Tensor]:
    """Return the hidden and the output units of a layer; they differ only with a projection.

    torch requires that a projection has fewer features than hidden units, in a small part too. So
    each feature is tied to equally many hidden units, and the hidden units that remain are fixed.
    """
    first = next(_weights(call))
    hidden = _axis_atoms(labels, call, first.weight_hh, 0).view(GATES[call.name], -1)[0]
    if first.weight_hr is None:
        return hidden, hidden
    output = _axis_atoms(labels, call, first.weight_hr, 0)
    per_feature = len(hidden) // len(output)
    num_tied = per_feature * len(output)
    labels.atoms.tie(hidden[:num_tied].view(-1, per_feature), output[:, None])
    labels.atoms.fix(hidden[num_tied:])
    return hidden, output


def _axis_atoms(labels: UnitLabels, call: OpCall, tensor: Tensor, axis: int) -> Tensor:
    """Return the atoms along one axis of a tensor, without those of the other axes."""
    atoms = torch.zeros(tensor.shape[axis], dtype=torch.int64)
    for field in labels.of(tensor):
        if varying_axes(field) == {axis}:
            atoms = field.flatten()
        elif len(varying_axes(field)) > 1:
            message = call.explain("its weights are cut along several axes at once")
            labels.add_uncuttable(message, [field])
    return atoms


def _feature_atoms(labels: UnitLabels, call: OpCall, tensor: Tensor) -> Tensor:
    """Return the atoms of the features, the last axis; time, batch and layers cannot be cut."""
    feature_axis = tensor.ndim - 1
    for field in labels.of(tensor):
        if varying_axes(field) - {feature_axis}:
            message = call.explain("units lie along another axis than the features")
            labels.add_uncuttable(message, [field])
    return _axis_atoms(labels, call, tensor, feature_axis)


def pack_sequence(labels: UnitLabels, call: OpCall) -> None:
    """Pack sequences of several lengths into one tensor; the last axis still has the features."""
    features = _feature_atoms(labels, call, call.arguments["input"])
    data, lengths = call.outputs
    labels.set_fields(data, [field_along(features, data.ndim - 1, data.ndim)])
    labels.set_fields(lengths, [])


def pad_packed_sequence(labels: UnitLabels, call: OpCall) -> None:
    """Pad packed sequences; units cannot be cut if the padding is not zero."""
    features = _feature_atoms(labels, call, call.arguments["data"])
    out, lengths = call.outputs
    if call.arguments["padding_value"] != 0:
        labels.atoms.fix(features)
    labels.set_fields(out, [field_along(features, out.ndim - 1, out.ndim)])
    labels.set_fields(lengths, [])


OP_RULES = {
    **dict.fromkeys(GATES, recurrent_layer),
    **{f"{name}_cell": recurrent_cell for name in GATES},
    "_pack_padded_sequence": pack_sequence,
    "_pad_packed_sequence": pad_packed_sequence,
}
