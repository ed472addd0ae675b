"""Rules for recurrent layers: a hidden unit is a row of every gate, in all layers and directions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.submodels.tracing.calls import Call, tensors_in
from fedcover.submodels.tracing.unit_labels import Labels, along, varying

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""How many blocks of rows, one below the other, the weights of a layer have for each hidden unit."""


@dataclass(frozen=True)
class Weights:
    """What one direction of one layer has: the matrices for its input and its past, biases, perhaps a projection."""

    inwards: Tensor
    back: Tensor
    biases: Sequence[Tensor]
    projection: Tensor | None


def recurrent(labels: Labels, call: Call) -> None:
    """Tie the rows of all gates of a hidden unit, its column in what it says next, and its place in the result.

    A layer of torch has one size for all of its layers and directions, so a unit is cut from all of them.
    """
    directions = 2 if call.given["bidirectional"] else 1
    hidden, said = _units(labels, call)
    data = call.given["data"] if "data" in call.given else call.given["input"]
    reads = _last(labels, call, data)
    for number, weights in enumerate(_weights(call)):
        if number and number % directions == 0:
            reads = said.repeat(directions)
        _tie(labels, call, weights, reads, hidden, said)
    _start(labels, call, hidden, said)
    out, *states = call.outputs
    for tensor, units in zip((out, *states), (said.repeat(directions), said, hidden), strict=False):
        labels.give(tensor, [along(units, tensor.ndim - 1, tensor.ndim)])


def cell(labels: Labels, call: Call) -> None:
    """One step of a layer with one direction: its units are those of the state, before and after."""
    given = call.given
    biases = [given[name] for name in ("b_ih", "b_hh") if given[name] is not None]
    weights = Weights(given["w_ih"], given["w_hh"], biases, None)
    hidden = _axis(labels, call, weights.back, 0).view(GATES[call.name.removesuffix("_cell")], -1)[0]
    _tie(labels, call, weights, _last(labels, call, given["input"]), hidden, hidden)
    _start(labels, call, hidden, hidden)
    for out in call.outputs:
        labels.give(out, [along(hidden, out.ndim - 1, out.ndim)])


def _tie(labels: Labels, call: Call, weights: Weights, reads: Tensor, hidden: Tensor, said: Tensor) -> None:
    """Tie the weights of one direction of one layer to what it reads, to its hidden units and to what it says."""
    for rows in (weights.inwards, weights.back, *weights.biases):
        labels.atoms.tie(_axis(labels, call, rows, 0).view(-1, len(hidden)), hidden)
    labels.atoms.tie(_axis(labels, call, weights.inwards, 1), reads)
    labels.atoms.tie(_axis(labels, call, weights.back, 1), said)
    if weights.projection is not None:
        labels.atoms.tie(_axis(labels, call, weights.projection, 0), said)
        labels.atoms.tie(_axis(labels, call, weights.projection, 1), hidden)


def _start(labels: Labels, call: Call, hidden: Tensor, said: Tensor) -> None:
    """Tie the state in which a layer starts: what it last said, and for an LSTM its memory."""
    for state, units in zip(tensors_in(call.given["hx"]), (said, hidden), strict=False):
        for field in labels.of(state):
            if varying(field) - {state.ndim - 1}:
                labels.atoms.fix(field)  # layers and samples stay
        labels.atoms.tie(_axis(labels, call, state, state.ndim - 1), units)


def _weights(call: Call) -> Iterator[Weights]:
    """The weights of each direction of each layer, in the order in which torch lists them."""
    listed: list[Tensor] = call.given["params"]
    biases = 2 if call.given["has_biases"] else 0
    layers = call.given["num_layers"] * (2 if call.given["bidirectional"] else 1)
    each = len(listed) // layers
    for first in range(0, len(listed), each):
        own = listed[first : first + each]
        yield Weights(own[0], own[1], own[2 : 2 + biases], own[2 + biases] if each > 2 + biases else None)


def _units(labels: Labels, call: Call) -> tuple[Tensor, Tensor]:
    """The hidden units, and the units of what a layer says: the same, unless a projection makes others.

    torch takes a projection only to fewer features than there are hidden units, however small the part is: so each
    feature goes with equally many hidden units of its own, and those that are left over stay.
    """
    first = next(_weights(call))
    hidden = _axis(labels, call, first.back, 0).view(GATES[call.name], -1)[0]
    if first.projection is None:
        return hidden, hidden
    said = _axis(labels, call, first.projection, 0)
    each = len(hidden) // len(said)
    labels.atoms.tie(hidden[: each * len(said)].view(-1, each), said[:, None])
    labels.atoms.fix(hidden[each * len(said) :])
    return hidden, said


def _axis(labels: Labels, call: Call, tensor: Tensor, axis: int) -> Tensor:
    """The atoms along one axis of a tensor; those of the other axes stay out."""
    atoms = torch.zeros(tensor.shape[axis], dtype=torch.int64)
    for field in labels.of(tensor):
        if varying(field) == {axis}:
            atoms = field.flatten()
        elif len(varying(field)) > 1:
            labels.object(call.refusal("its weights are cut along several axes at once"), [field])
    return atoms


def _last(labels: Labels, call: Call, tensor: Tensor) -> Tensor:
    """The atoms of features, which lie along the last axis; units must not lie along time, batch or layers."""
    last = tensor.ndim - 1
    for field in labels.of(tensor):
        if varying(field) - {last}:
            labels.object(call.refusal("units lie along another axis than the features"), [field])
    return _axis(labels, call, tensor, last)


def packed(labels: Labels, call: Call) -> None:
    """Sequences of several lengths in one tensor of their steps: features stay along the last axis."""
    source: Tensor = call.given["input"]
    features = _last(labels, call, source)
    data, lengths = call.outputs
    labels.give(data, [along(features, data.ndim - 1, data.ndim)])
    labels.give(lengths, [])


def unpacked(labels: Labels, call: Call) -> None:
    """The steps of packed sequences, padded again; padding that is not zero is no unit's."""
    features = _last(labels, call, call.given["data"])
    out, lengths = call.outputs
    if call.given["padding_value"] != 0:
        labels.atoms.fix(features)
    labels.give(out, [along(features, out.ndim - 1, out.ndim)])
    labels.give(lengths, [])


RULES = {
    **dict.fromkeys(GATES, recurrent),
    **{f"{name}_cell": cell for name in GATES},
    "_pack_padded_sequence": packed,
    "_pad_packed_sequence": unpacked,
}
