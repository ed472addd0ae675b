"""Parameters on a device that holds only its part: full shapes, but only the values it was sent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.types import Params, Reduction


class PartialParams(Params):
    """Hold tensors in full shapes without values (on the `meta` device), and a part with values.

    Extracting with the reduction that cut the part returns the part itself, without a copy.
    """

    def __init__(self, whole: Mapping[str, Tensor], part: Params, reduction: Reduction) -> None:
        super().__init__(
            {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
        )
        self.part, self.reduction = part, reduction

    def extract_for(self, reduction: Reduction) -> Params:
        """Return the part; raise for another reduction, whose values may not be here."""
        if reduction is not self.reduction:
            raise InvalidValue(
                "a device holds its own part of the model only, and another part was asked for"
            )
        return dict(self.part)


def merge_params(first: Params, second: Params) -> Params:
    """Combine two sets of tensors; two partial sets of one reduction give a partial set."""
    if not second:
        return first
    if isinstance(first, PartialParams) and isinstance(second, PartialParams):
        return PartialParams({**first, **second}, {**first.part, **second.part}, first.reduction)
    return {**first, **second}


def local_params(tensors: Params) -> Params:
    """Return the tensors that have values on this device."""
    return tensors.part if isinstance(tensors, PartialParams) else tensors
