"""Define models, the unit groups along which they are cut, and the parts of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

Params = dict[str, Tensor]
"""Tensors of a model by name: those of the whole model, or a client's part of them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The place of a group's units in one tensor.

    Unit u owns the positions from `start + u * per_unit` up to (not including)
    `start + (u + 1) * per_unit` along the axis. Without an axis the whole tensor belongs to one
    unit, such as a stage of a network or an exit.

    Attributes:
        tensor: The name of the parameter or buffer.
        axis: The axis along which the units are cut, or None if one unit owns the whole tensor.
        start: The first position of unit 0.
        per_unit: The number of positions per unit.
        unit: The unit that owns the whole tensor; only used without an axis.
    """

    tensor: str
    axis: int | None
    start: int = 0
    per_unit: int = 1
    unit: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A number that shrinks with a group, such as `blocks.0.attention.num_heads`.

    Attributes:
        attribute: The path of the number inside the module.
        per_unit: The amount by which the number decreases for each removed unit.
    """

    attribute: str
    per_unit: int = 1


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units (neurons, channels, heads) and every place where they occur in the model.

    Attributes:
        name: The unique name of the group.
        size: The number of units.
        cuts: Where the units are in the parameters.
        nested: Whether each unit needs all units before it; then only leading units can be kept.
        counts: The numbers in the module that count the units.
        buffers: Where the units are in the buffers (norm statistics).
    """

    name: str
    size: int
    cuts: tuple[Cut, ...]
    nested: bool = False
    counts: tuple[Count, ...] = ()
    buffers: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A PyTorch module with the unit groups along which it can be cut.

    Attributes:
        module: The module itself.
        groups: The groups of units that are kept or removed together.
        prunable: The names of the weights that unstructured pruning may remove.
        classifier: The names of the tensors whose first axis is the label.
        exits: For each exit, the names of the parameters that no deeper exit uses.
    """

    module: nn.Module
    groups: tuple[UnitGroup, ...]
    prunable: tuple[str, ...] = ()
    classifier: tuple[str, ...] = ()
    exits: tuple[tuple[str, ...], ...] = ()


class Reduction(Protocol):
    """A client's part of the model: `Slices` (smaller tensors) or `Masks` (sparse ones)."""

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """Return the part of each tensor that is sent to the client."""

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or just `scale`) to the client's entries of `target`, in place."""

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks in the full shapes, true at the entries that the client holds."""

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Return the masks for local gradients; empty if the sub-model's shapes already suffice."""

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of entries of each tensor that the client holds."""
