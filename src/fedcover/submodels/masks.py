"""Unstructured parts of a model: masks over single weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcover.submodels.indexing import flatten_in_order
from fedcover.tensors import FlatParams, add_scaled, zeros
from fedcover.types import Params, Reduction


@dataclass(frozen=True, eq=False)
class Masks:
    """Select single weights by boolean masks; the tensors keep their shapes.

    Attributes:
        bits: Masks by tensor name, true at the kept weights. Tensors without a mask are kept whole.
    """

    bits: Mapping[str, Tensor] = field(default_factory=dict)

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """Set the removed weights to zero.

        Args:
            params: Tensors in full shapes, by name.

        Returns:
            The tensors in the same shapes.
        """
        return {name: _apply_mask(self.bits, name, tensor) for name, tensor in params.items()}

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add to the kept entries of tensors, in place.

        Args:
            target: Tensors in full shapes, by name.
            values: Tensors in full shapes; None adds `scale` to every kept entry.
            scale: The factor of the values.
        """
        adds_to_all = values is None or values.keys() == target.keys()
        if isinstance(target, FlatParams) and not self.bits and adds_to_all:
            summand = 1 if values is None else flatten_in_order(values, target)
            target.flat.add_(summand, alpha=scale)
            return
        for name in target if values is None else values:
            if values is not None:
                add_scaled(target[name], _apply_mask(self.bits, name, values[name]), scale)
            elif name in self.bits:
                target[name].add_(self.bits[name], alpha=scale)
            else:
                target[name].add_(scale)

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of all tensors, true at the kept entries.

        Args:
            params: Tensors in full shapes, by name; their values are not read.

        Returns:
            One boolean tensor per tensor.
        """
        masks = {}
        for name, tensor in params.items():
            if name in self.bits:
                masks[name] = self.bits[name]
            else:
                masks[name] = torch.ones_like(tensor, dtype=torch.bool)
        return masks

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Return the masks: a removed weight must stay zero despite momentum and decay."""
        return self.bits

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of kept entries of each tensor.

        Args:
            params: Tensors in full shapes, by name; their values are not read.

        Returns:
            One count per tensor.
        """
        return {
            name: int(self.bits[name].sum()) if name in self.bits else tensor.numel()
            for name, tensor in params.items()
        }


@dataclass(frozen=True, eq=False)
class TrainedSubset:
    """Select the entries of a client's part that count as trained.

    Attributes:
        base: The client's part of the model.
        bits: Masks by tensor name in the shapes of that part. Tensors without a mask count whole.
    """

    base: Reduction
    bits: Mapping[str, Tensor]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """Return the client's part, with zeros at entries that do not count as trained."""
        part = self.base.extract(params)
        return {name: _apply_mask(self.bits, name, tensor) for name, tensor in part.items()}

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or just `scale`) to the trained entries of `target`, in place."""
        if values is not None:
            masked = {name: _apply_mask(self.bits, name, part) for name, part in values.items()}
            self.base.add_into(target, masked, scale)
            return
        masked = {
            name: self.bits[name].to(target[name].dtype) for name in target if name in self.bits
        }
        self.base.add_into(target, masked, scale)
        unmasked_target = {name: tensor for name, tensor in target.items() if name not in masked}
        self.base.add_into(unmasked_target, None, scale)

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks in the full shapes, true at the trained entries."""
        counts = zeros(params, torch.uint8)
        self.add_into(counts, None, 1)
        return {name: tensor.bool() for name, tensor in counts.items()}

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Return the masks of the base: entries that do not count may still change."""
        return self.base.gradient_mask()

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of trained entries of each tensor."""
        return {
            name: int(self.bits[name].sum()) if name in self.bits else size
            for name, size in self.base.sizes(params).items()
        }


def _apply_mask(bits: Mapping[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Set the entries outside a tensor's mask to zero, if it has a mask."""
    if name not in bits:
        return tensor
    # `where`, not a product: entries outside the mask, even NaN, must not be read.
    return torch.where(bits[name].to(tensor.device), tensor, 0)
