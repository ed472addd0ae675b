"""Build softmax regression, the convex model whose optimum and constants are known exactly."""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from fedcover.models.mlp_cnn import CLASSIFIER, check_norm_unused
from fedcover.types import Cut, Model, UnitGroup


class FeatureSelector(nn.Module):
    """Select the input features of a device: all of them in the whole model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.place: Tensor
        self.register_buffer("place", torch.arange(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the selected features as columns."""
        return x.flatten(1).index_select(1, self.place)


class AppendZeroLogit(nn.Module):
    """Append a logit that is always 0, which replaces the weights of the last class."""

    def forward(self, logits_BK: Tensor) -> Tensor:
        """Return the logits with an additional zero."""
        return torch.cat([logits_BK, torch.zeros_like(logits_BK[:, :1])], dim=1)


def softmax(
    shape: Sequence[int], classes: int, norm: str, *, bias: bool = True, pinned: bool = False
) -> Model:
    """Build softmax regression on the inputs; a unit is an input feature.

    Weight decay makes it strongly convex.

    Args:
        shape: The shape of one sample.
        classes: The number of classes.
        norm: Must be left at its default, as there are no norm layers.
        bias: Whether the logits have biases.
        pinned: Whether the logit of the last class is fixed to 0.

    Returns:
        The model with one group, the input features.

    Raises:
        InvalidValue: If `norm` is changed.

    >>> model = softmax((3,), 2, "batch", bias=False, pinned=True)
    >>> sum(p.numel() for p in model.module.parameters())
    3
    """
    check_norm_unused("softmax", norm)
    size = prod(shape)
    layers: list[tuple[str, nn.Module]] = [
        ("features", FeatureSelector(size)),
        ("head", nn.Linear(size, classes - pinned, bias=bias)),
    ]
    if pinned:
        layers.append(("pinned", AppendZeroLogit()))
    units = UnitGroup("features", size, (Cut("features.place", 0), Cut("head.weight", 1)))
    if pinned:
        classifier: tuple[str, ...] = ()
    else:
        classifier = CLASSIFIER if bias else CLASSIFIER[:1]
    return Model(nn.Sequential(OrderedDict(layers)), (units,), ("head.weight",), classifier)
