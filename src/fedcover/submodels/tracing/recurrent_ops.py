"""Rules for recurrent layers: a hidden unit is a row of every gate, in all layers and directions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.submodels.tracing.calls import OpCall, tensors_in
from fedcover.submodels.tracing.unit_labels import UnitLabels, field_along, varying_axes

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""How many blocks of rows, one below the other, the weights of a layer have for each hidden unit."""


@dataclass(frozen=True)
class DirectionWeights:
    """What one direction of one layer has: the matrices for its input and its past, biases, perhaps a projection."""

    weight_ih: Tensor
    weight_hh: Tensor
    biases: Sequence[Tensor]
    weight_hr: Tensor | None


def recurrent_layer(labels: UnitLabels, call: OpCall) -> None:
    """Tie the rows of all gates of a hidden unit, its column in what it says next, and its place in the result.

    A layer of torch has one size for all of its layers and directions, so a unit is cut from all of them.
    """
    directions = 2 if call.arguments["bidirectional"] else 1
    hidden, said = _hidden_and_output_units(labels, call)
    data = call.arguments["data"] if "data" in call.arguments else call.arguments["input"]
    reads = _feature_atoms(labels, call, data)
    for number, weights in enumerate(_weights(call)):
        if number and number % directions == 0:
            reads = said.repeat(directions)
        _tie(labels, call, weights, reads, hidden, said)
    _tie_initial_state(labels, call, hidden, said)
    out, *states = call.outputs
    for tensor, units in zip((out, *states), (said.repeat(directions), said, hidden), strict=False):
        labels.set_fields(tensor, [field_along(units, tensor.ndim - 1, tensor.ndim)])


def recurrent_cell(labels: UnitLabels, call: OpCall) -> None:
    """One step of a layer with one direction: its units are those of the state, before and after."""
    arguments = call.arguments
    biases = [arguments[name] for name in ("b_ih", "b_hh") if arguments[name] is not None]
    weights = DirectionWeights(arguments["w_ih"], arguments["w_hh"], biases, None)
    hidden = _axis_atoms(labels, call, weights.weight_hh, 0).view(
        GATES[call.name.removesuffix("_cell")], -1
    )[0]
    _tie(labels, call, weights, _feature_atoms(labels, call, arguments["input"]), hidden, hidden)
    _tie_initial_state(labels, call, hidden, hidden)
    for out in call.outputs:
        labels.set_fields(out, [field_along(hidden, out.ndim - 1, out.ndim)])


def _tie(
    labels: UnitLabels,
    call: OpCall,
    weights: DirectionWeights,
    reads: Tensor,
    hidden: Tensor,
    said: Tensor,
) -> None:
    """Tie the weights of one direction of one layer to what it reads, to its hidden units and to what it says."""
    for rows in (weights.weight_ih, weights.weight_hh, *weights.biases):
        labels.atoms.tie(_axis_atoms(labels, call, rows, 0).view(-1, len(hidden)), hidden)
    labels.atoms.tie(_axis_atoms(labels, call, weights.weight_ih, 1), reads)
    labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hh, 1), said)
    if weights.weight_hr is not None:
        labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hr, 0), said)
        labels.atoms.tie(_axis_atoms(labels, call, weights.weight_hr, 1), hidden)


def _tie_initial_state(labels: UnitLabels, call: OpCall, hidden: Tensor, said: Tensor) -> None:
    """Tie the state in which a layer starts: what it last said, and for an LSTM its memory."""
    for state, units in zip(tensors_in(call.arguments["hx"]), (said, hidden), strict=False):
        for field in labels.of(state):
            if varying_axes(field) - {state.ndim - 1}:
                labels.atoms.fix(field)  # layers and samples stay
        labels.atoms.tie(_axis_atoms(labels, call, state, state.ndim - 1), units)


def _weights(call: OpCall) -> Iterator[DirectionWeights]:
    """The weights of each direction of each layer, in the order in which torch lists them."""
    listed: list[Tensor] = call.arguments["params"]
    biases = 2 if call.arguments["has_biases"] else 0
    layers = call.arguments["num_layers"] * (2 if call.arguments["bidirectional"] else 1)
    each = len(listed) // layers
    for first in range(0, len(listed), each):
        own = listed[first : first + each]
        yield DirectionWeights(
            own[0], own[1], own[2 : 2 + biases], own[2 + biases] if each > 2 + biases else None
        )


def _hidden_and_output_units(labels: UnitLabels, call: OpCall) -> tuple[Tensor, Tensor]:
    """The hidden units, and the units of what a layer says: the same, unless a projection makes others.

    torch takes a projection only to fewer features than there are hidden units, however small the part is: so each
    feature goes with equally many hidden units of its own, and those that are left over stay.
    """
    first = next(_weights(call))
    hidden = _axis_atoms(labels, call, first.weight_hh, 0).view(GATES[call.name], -1)[0]
    if first.weight_hr is None:
        return hidden, hidden
    said = _axis_atoms(labels, call, first.weight_hr, 0)
    each = len(hidden) // len(said)
    labels.atoms.tie(hidden[: each * len(said)].view(-1, each), said[:, None])
    labels.atoms.fix(hidden[each * len(said) :])
    return hidden, said


def _axis_atoms(labels: UnitLabels, call: OpCall, tensor: Tensor, axis: int) -> Tensor:
    """The atoms along one axis of a tensor; those of the other axes stay out."""
    atoms = torch.zeros(tensor.shape[axis], dtype=torch.int64)
    for field in labels.of(tensor):
        if varying_axes(field) == {axis}:
            atoms = field.flatten()
        elif len(varying_axes(field)) > 1:
            labels.add_uncuttable(
                call.explain("its weights are cut along several axes at once"), [field]
            )
    return atoms


def _feature_atoms(labels: UnitLabels, call: OpCall, tensor: Tensor) -> Tensor:
    """The atoms of features, which lie along the last axis; units must not lie along time, batch or layers."""
    last = tensor.ndim - 1
    for field in labels.of(tensor):
        if varying_axes(field) - {last}:
            labels.add_uncuttable(
                call.explain("units lie along another axis than the features"), [field]
            )
    return _axis_atoms(labels, call, tensor, last)


def pack_sequence(labels: UnitLabels, call: OpCall) -> None:
    """Sequences of several lengths in one tensor of their steps: features stay along the last axis."""
    source: Tensor = call.arguments["input"]
    features = _feature_atoms(labels, call, source)
    data, lengths = call.outputs
    labels.set_fields(data, [field_along(features, data.ndim - 1, data.ndim)])
    labels.set_fields(lengths, [])


def pad_packed_sequence(labels: UnitLabels, call: OpCall) -> None:
    """The steps of packed sequences, padded again; padding that is not zero is no unit's."""
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
