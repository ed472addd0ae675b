"""Low-rank adapters: the network stays as it is, devices differ in the rank of what they learn.

Hu et al.: LoRA (ICLR 2022). Ranks as units, averaged per rank over the clients that hold it: no zero-padding as in
HetLoRA, which dilutes the high ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.mlp_cnn import mlp
from fedcover.types import Cut, Model, UnitGroup


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two learned factors, `up` (begins at zero) and `down`."""

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
        """The frozen layer's answer and the learned correction."""
        correction: Tensor = self.up(self.down(x))
        return nn.functional.linear(x, self.weight, self.bias) + correction


def lora(
    shape: Sequence[int], classes: int, norm: str, *, hidden: Sequence[int] = (200,), rank: int = 8
) -> Model:
    """A multi-layer perceptron whose linear layers are frozen and adapted; the units of a group are ranks."""
    if rank < 1:
        raise InvalidValue(f"model lora: rank must be at least 1; got {rank}")
    module = mlp(shape, classes, norm, hidden=hidden).module
    groups = []
    for name, layer in list(module.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(module, name, LowRank(layer, rank))
            groups.append(
                UnitGroup(name, rank, (Cut(f"{name}.down.weight", 0), Cut(f"{name}.up.weight", 1)))
            )
    return Model(module, tuple(groups))


def product_gap(factors: Sequence[tuple[Tensor, Tensor]]) -> float:
    """How far the product of mean factors is from the mean of products, relative to the latter.

    The server averages `up` and `down` apart, while what the clients learned are the products: the two agree only if
    one factor is the same for all.

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
    """The learned factors of one adapted layer."""
    return params[f"{layer}.up.weight"], params[f"{layer}.down.weight"]
