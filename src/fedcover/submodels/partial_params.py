"""Tensors of which a device holds only its part: the shapes of all of it, the values of what it was sent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.types import Params, Reduction


class PartialParams(Params):
    """Tensors by name in full shapes, without values (on the `meta` device), and the part that a device holds of them.

    What a reduction extracts from them is that part, without a copy, if it is the reduction that the part was cut by.
    """

    def __init__(self, whole: Mapping[str, Tensor], part: Params, reduction: Reduction) -> None:
        super().__init__(
            {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
        )
        self.part, self.reduction = part, reduction

    def extract_for(self, reduction: Reduction) -> Params:
        """The part; refused for any other reduction, of which there may be less here than it asks for."""
        if reduction is not self.reduction:
            raise InvalidValue(
                "a device holds its own part of the model only, and another part was asked for"
            )
        return dict(self.part)


def merge_params(some: Params, others: Params) -> Params:
    """All tensors of both; of portions of one reduction a portion again."""
    if not others:
        return some
    if isinstance(some, PartialParams) and isinstance(others, PartialParams):
        return PartialParams({**some, **others}, {**some.part, **others.part}, some.reduction)
    return {**some, **others}


def local_params(tensors: Params) -> Params:
    """What a device has of tensors: the part of a portion, else all."""
    return tensors.part if isinstance(tensors, PartialParams) else tensors
