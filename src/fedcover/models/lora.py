"""Build models with low-rank adapters: the network is frozen, and devices differ in rank.

See Hu et al., LoRA (ICLR 2022). The units are ranks, and each rank is averaged over the clients
that hold it. HetLoRA's zero-padding would dilute the high ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.mlp_cnn import mlp
from fedcover.types import Cut, Model, UnitGroup


class LowRank(nn.Module):
    """Add the product of two learned factors, `up` (initially 0) and `down`, to a frozen layer."""

    weight: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().clone())
        self.register_buffer("bias", layer.bias.detach().clone())
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer plus the learned correction."""
        correction: Tensor = self.up(self.down(x))
        return nn.functional.linear(x, self.weight, self.bias) + correction


def lora(
    shape: Sequence[int], classes: int, norm: str, *, hidden: Sequence[int] = (200,), rank: int = 8
) -> Model:
    """Build a multi-layer perceptron whose linear layers are frozen and adapted.

    The units of a group are the ranks of one layer.

    Args:
        shape: The shape of one sample.
        classes: The number of classes.
        norm: Must be left at its default, as there are no norm layers.
        hidden: The widths of the hidden layers.
        rank: The rank of every adapter.

    Returns:
        The model with one group per linear layer.

    Raises:
        InvalidValue: If an argument is out of range.
    """
    if rank < 1:
        raise InvalidValue(f"model lora: rank must be at least 1; got {rank}")
    module = mlp(shape, classes, norm, hidden=hidden).module
    groups = []
    for name, layer in list(module.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(module, name, LowRank(layer, rank))
            cuts = (Cut(f"{name}.down.weight", 0), Cut(f"{name}.up.weight", 1))
            groups.append(UnitGroup(name, rank, cuts))
    return Model(module, tuple(groups))


def product_gap(factors: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the distance of the product of mean factors from the mean product, relative to it.

    The server averages `up` and `down` separately, while the clients learned the products. The two
    agree only if one factor is the same for all clients.

    >>> same = (torch.ones(3, 1), torch.ones(1, 2))
    >>> product_gap([same, same])
    0.0
    """
    ups, downs = zip(*factors, strict=True)
    mean_of_products = torch.stack([up @ down for up, down in factors]).mean(0)
    product_of_means = torch.stack(ups).mean(0) @ torch.stack(downs).mean(0)
    size = float(mean_of_products.norm())
    return float((product_of_means - mean_of_products).norm()) / size if size else 0.0


def factors_of(params: Mapping[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """Return the learned factors of one adapted layer."""
    return params[f"{layer}.up.weight"], params[f"{layer}.down.weight"]
