"""The format of a client's reply: which named arrays it has, and how the client packs them.

A reply is a set of arrays and a few numbers. The names of its arrays have a prefix:

- `params/NAME`: a trained parameter of the client's sub-model; of a masked one, only the entries
  under the mask, in a row.
- `buffers/NAME`: a running norm statistic.
- `measured/KIND/NAME`: what the recipe measured of a parameter.
- `bits/NAME`: one bit per entry of a parameter, set where the client counts it as trained.

The server knows all names, shapes and types before a reply arrives (`PendingTask.expected_arrays`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedcover.models.norms import statistics_key
from fedcover.server.raw_arrays import ArraySpec, RawArray, array_spec, as_array
from fedcover.server.safetensors_codec import ARRAY_OVERHEAD
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.types import Client, Params, Reduction, State, Task, Update


@dataclass(frozen=True, slots=True)
class RawReply:
    """A reply as it arrived. Nothing in it can be trusted, not even the types of its fields."""

    nonce: Any
    client: Any
    arrays: Mapping[Any, RawArray]
    metrics: Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class PendingTask:
    """A task that was sent to a client and has not been answered yet.

    `params` and `statistics` are the global model's; `reduction` is the client's part of it.
    `measures` names the parameters that each kind of measurement covers. `metrics` names the
    numbers that a reply must have. With `allow_bits` the client may report which entries it
    trained. A measurement in `marks` must equal the given number in the mask and 0 outside of it.
    """

    nonce: str
    client: Client
    reduction: Reduction
    params: Params
    statistics: Params = field(default_factory=dict)
    measures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("loss",)
    allow_bits: bool = True
    marks: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> Params:
        """The parameters that the client began with."""
        return self.reduction.extract(self.params)

    @cached_property
    def expected_arrays(self) -> dict[str, ArraySpec]:
        """Every array that a reply may have, by name; it may leave out bits, but nothing more."""
        expected = {}
        masks = self.reduction.gradient_mask()
        for name, tensor in self.start.items():
            expected[f"params/{name}"] = array_spec(tensor, masks.get(name))
        for name, tensor in self.reduction.extract(self.statistics).items():
            expected[f"buffers/{name}"] = array_spec(tensor)
        # Measurements are not masked: a recipe may measure weights that the client does not train.
        unmasked = without_masks(self.reduction).extract(self.params)
        for kind, names in self.measures.items():
            for name in names:
                if name in unmasked:
                    expected[f"measured/{kind}/{name}"] = array_spec(unmasked[name])
        if self.allow_bits:
            for name, tensor in self.start.items():
                packed_length = -(-tensor.numel() // 8)
                expected[f"bits/{name}"] = ArraySpec((packed_length,), "uint8", bits=True)
        return expected

    @cached_property
    def byte_limit(self) -> int:
        """An upper bound on the bytes of an honest reply."""
        return sum(spec.bytes + ARRAY_OVERHEAD for spec in self.expected_arrays.values())


def pending_task(
    nonce: str,
    task: Task,
    state: State,
    client: Client,
    reduction: Reduction,
    *,
    allow_bits: bool = True,
) -> PendingTask:
    """Describe the task of a client that is sent its part of the model."""
    statistics = state.statistics.get(statistics_key(task.norm, client.capacity) or "", {})
    parameters_by_scope = {
        "all": tuple(state.params),
        "prunable": task.model.prunable,
        "round": task.model.prunable,
    }
    recipe_measures = task.recipe.measures.items()
    return PendingTask(
        nonce,
        client,
        reduction,
        state.params,
        statistics,
        measures={kind: parameters_by_scope[scope] for kind, scope in recipe_measures},
        allow_bits=allow_bits,
        marks={kind: state.round + 1 for kind, scope in recipe_measures if scope == "round"},
    )


def pack_update(update: Update) -> dict[str, np.ndarray]:
    """Return the arrays in which a client sends its update.

    Masked weights are left out, and so is everything that is private to the client. Bits are sent
    only if the client chose which entries it trained.
    """
    masks = update.sent.gradient_mask()
    arrays = {}
    for name, tensor in update.params.items():
        unmasked = tensor[masks[name]] if name in masks else tensor
        arrays[f"params/{name}"] = as_array(unmasked)
    for name, tensor in update.buffers.items():
        arrays[f"buffers/{name}"] = as_array(tensor)
    for kind, tensors in update.measured.items():
        for name, tensor in tensors.items():
            arrays[f"measured/{kind}/{name}"] = as_array(tensor)
    if isinstance(update.trained, TrainedSubset):
        for name, bits in update.trained.bits.items():
            allowed = bits & masks[name].to(bits.device) if name in masks else bits
            arrays[f"bits/{name}"] = np.packbits(as_array(allowed).ravel())
    return arrays
