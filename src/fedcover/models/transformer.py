"""A small causal transformer over characters: heads, hidden units and the embedding itself can be cut."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count
from fedcover.models.mlp_cnn import check_norm_unused
from fedcover.types import Cut, Model, UnitGroup


class Attention(nn.Module):
    """Causal self-attention with fused queries, keys and values; the number of heads follows from their width."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What every position takes from those before it."""
        batch, length, _ = x_BTD.shape
        qkv_BTHE = [
            part.view(batch, length, -1, self.head_width)
            for part in self.qkv(x_BTD).chunk(3, dim=-1)
        ]
        query, key, value = (part.transpose(1, 2) for part in qkv_BTHE)
        seen_BHTE = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(seen_BHTE.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer network, each after a layer norm and added to the stream."""

    def __init__(self, width: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head_width)
        self.norm2, self.up, self.gelu, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        x = x + self.attention(self.norm1(x))
        after: Tensor = x + self.down(self.gelu(self.up(self.norm2(x))))
        return after


class Transformer(nn.Module):
    """Characters in, logits of the next character at every position out, labels on axis 1."""

    def __init__(
        self, length: int, vocabulary: int, width: int, heads: int, blocks: int, hidden: int
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // heads, hidden) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits [batch, vocabulary, position], as cross-entropy wants them."""
        x = self.characters(x_BT) + self.places(torch.arange(x_BT.shape[1], device=x_BT.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


def transformer(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    hidden: int = 256,
) -> Model:
    """A language model over characters; groups: the embedding stream, and heads and hidden units of every block.

    A layer norm over a cut stream is computed over the units that are kept.
    """
    check_norm_unused("transformer", norm)
    if len(shape) != 1:
        raise InvalidValue(
            f"model transformer needs sequences (length,); the data has shape {tuple(shape)}"
        )
    check_layer_count("transformer", heads=heads, blocks=blocks)
    if width % heads:
        raise InvalidValue(
            f"model transformer: width must be divisible by heads ({heads}); got {width}"
        )
    net = Transformer(shape[0], classes, width, heads, blocks, hidden)
    each = width // heads
    stream = [Cut("characters.weight", 1), Cut("places.weight", 1)]
    groups = []
    for i in range(blocks):
        path = f"blocks.{i}"
        stream += [Cut(f"{path}.norm{n}.{leaf}", 0) for n in (1, 2) for leaf in ("weight", "bias")]
        stream += [Cut(f"{path}.attention.qkv.weight", 1), Cut(f"{path}.up.weight", 1)]
        stream += [
            Cut(f"{path}.{out}.{leaf}", 0)
            for out in ("attention.out", "down")
            for leaf in ("weight", "bias")
        ]
        qkv = [
            Cut(f"{path}.attention.qkv.{leaf}", 0, start=third * width, per_unit=each)
            for leaf in ("weight", "bias")
            for third in range(3)
        ]
        groups.append(
            UnitGroup(
                f"{path}.heads",
                heads,
                (*qkv, Cut(f"{path}.attention.out.weight", 1, per_unit=each)),
            )
        )
        up = (Cut(f"{path}.up.weight", 0), Cut(f"{path}.up.bias", 0), Cut(f"{path}.down.weight", 1))
        groups.append(UnitGroup(f"{path}.hidden", hidden, up))
    stream += [Cut("norm.weight", 0), Cut("norm.bias", 0), Cut("head.weight", 1)]
    prunable = tuple(
        f"blocks.{i}.{leaf}.weight"
        for i in range(blocks)
        for leaf in ("attention.qkv", "attention.out", "up", "down")
    )
    return Model(
        net,
        (UnitGroup("stream", width, tuple(stream)), *groups),
        prunable,
        ("head.weight", "head.bias"),
    )
