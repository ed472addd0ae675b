"""Softmax regression: the convex model, for which the theory's constants and the optimum are known exactly."""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from fedcover.models.mlp_cnn import CLASSIFIER, check_norm_unused
from fedcover.types import Cut, Model, UnitGroup


class FeatureSelector(nn.Module):
    """The features that a device looks at: all of them, until its part is cut out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.place: Tensor
        self.register_buffer("place", torch.arange(size))

    def forward(self, x: Tensor) -> Tensor:
        """One column for each feature that is there."""
        return x.flatten(1).index_select(1, self.place)


class AppendZeroLogit(nn.Module):
    """Adds a last logit that is always 0: the same family of models with one class's weights fewer."""

    def forward(self, logits_BK: Tensor) -> Tensor:
        """One more logit."""
        return torch.cat([logits_BK, torch.zeros_like(logits_BK[:, :1])], dim=1)


def softmax(
    shape: Sequence[int], classes: int, norm: str, *, bias: bool = True, pinned: bool = False
) -> Model:
    """Softmax regression on the inputs themselves; a unit is an input feature. `weight_decay` makes it strongly convex.

    With `pinned` the last class has no weights of its own: three features and two classes make three parameters.

    >>> sum(p.numel() for p in softmax((3,), 2, "batch", bias=False, pinned=True).module.parameters())
    3
    """
    check_norm_unused("softmax", norm)
    size = prod(shape)
    layers: list[tuple[str, nn.Module]] = [
        ("features", FeatureSelector(size)),
        ("head", nn.Linear(size, classes - pinned, bias=bias)),
        *([("pinned", AppendZeroLogit())] if pinned else []),
    ]
    units = UnitGroup("features", size, (Cut("features.place", 0), Cut("head.weight", 1)))
    taught = () if pinned else CLASSIFIER if bias else CLASSIFIER[:1]
    return Model(nn.Sequential(OrderedDict(layers)), (units,), ("head.weight",), taught)
