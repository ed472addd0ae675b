"""Build a small causal transformer whose heads, hidden units and embedding can be cut."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count
from fedcover.models.mlp_cnn import CLASSIFIER, check_norm_unused
from fedcover.types import Cut, Model, UnitGroup


class Attention(nn.Module):
    """Apply causal self-attention; the number of heads follows from the width of the tensors."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output of every position."""
        batch, length, _ = x_BTD.shape
        qkv_BTHE = [
            part.view(batch, length, -1, self.head_width)
            for part in self.qkv(x_BTD).chunk(3, dim=-1)
        ]
        query, key, value = (part.transpose(1, 2) for part in qkv_BTHE)
        attended_BHTE = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out_BTD: Tensor = self.out(attended_BHTE.transpose(1, 2).flatten(2))
        return out_BTD


class Block(nn.Module):
    """Add attention and a two-layer network, each after a layer norm, to the residual stream."""

    def __init__(self, width: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(self.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Predict the logits of the next character at every position."""

    def __init__(
        self, length: int, vocabulary: int, width: int, heads: int, blocks: int, hidden: int
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // heads, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return logits [batch, vocabulary, position], the layout for cross-entropy."""
        positions_T = torch.arange(x_BT.shape[1], device=x_BT.device)
        x = self.characters(x_BT) + self.places(positions_T)
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
    """Build a language model over characters.

    The groups are the embedding stream, and the heads and hidden units of every block. A layer norm
    over a cut stream is computed over the kept units.

    Args:
        shape: The shape of one sample, (length,).
        classes: The number of characters.
        norm: Must be left at its default, as the norm layers are fixed.
        width: The width of the embedding stream.
        heads: The number of attention heads per block.
        blocks: The number of blocks.
        hidden: The number of hidden units per block.

    Returns:
        The model with its groups.

    Raises:
        InvalidValue: If an argument is out of range or the data are not sequences.
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
    block_groups: list[UnitGroup] = []
    for i in range(blocks):
        block_groups += _block_groups(f"blocks.{i}", width, heads, hidden)
    stream = UnitGroup("stream", width, tuple(_stream_cuts(blocks)))
    prunable = tuple(
        f"blocks.{i}.{leaf}.weight"
        for i in range(blocks)
        for leaf in ("attention.qkv", "attention.out", "up", "down")
    )
    return Model(net, (stream, *block_groups), prunable, CLASSIFIER)


def _stream_cuts(blocks: int) -> list[Cut]:
    """Locate the units of the embedding stream in all tensors."""
    cuts = [Cut("characters.weight", 1), Cut("places.weight", 1)]
    for i in range(blocks):
        path = f"blocks.{i}"
        for leaf in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            cuts.append(Cut(f"{path}.{leaf}", 0))
        for leaf in ("attention.qkv.weight", "up.weight"):
            cuts.append(Cut(f"{path}.{leaf}", 1))
        for leaf in ("attention.out.weight", "attention.out.bias", "down.weight", "down.bias"):
            cuts.append(Cut(f"{path}.{leaf}", 0))
    cuts += [Cut("norm.weight", 0), Cut("norm.bias", 0), Cut("head.weight", 1)]
    return cuts


def _block_groups(path: str, width: int, heads: int, hidden: int) -> tuple[UnitGroup, UnitGroup]:
    """Return the groups of a block's heads and hidden units."""
    head_width = width // heads
    head_cuts = []
    for leaf in ("weight", "bias"):
        for start in (0, width, 2 * width):  # queries, keys, values
            cut = Cut(f"{path}.attention.qkv.{leaf}", 0, start=start, per_unit=head_width)
            head_cuts.append(cut)
    head_cuts.append(Cut(f"{path}.attention.out.weight", 1, per_unit=head_width))
    hidden_cuts = (
        Cut(f"{path}.up.weight", 0),
        Cut(f"{path}.up.bias", 0),
        Cut(f"{path}.down.weight", 1),
    )
    return (
        UnitGroup(f"{path}.heads", heads, tuple(head_cuts)),
        UnitGroup(f"{path}.hidden", hidden, hidden_cuts),
    )
