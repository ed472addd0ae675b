"""A recurrent network over text: an embedding, layers of LSTM and a linear layer, as LEAF has it for Shakespeare."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count
from fedcover.models.mlp_cnn import CLASSIFIER, check_norm_unused
from fedcover.types import Cut, Model, UnitGroup

LABEL_POSITIONS = ("every", "last")


class TextLSTM(nn.Module):
    """Characters (or words) in, logits out: of each position, labels on axis 1, or of the last one only."""

    def __init__(
        self, vocabulary: int, classes: int, embedding: int, hidden: int, layers: int, every: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.every = every

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits [batch, classes, position], as cross-entropy wants them, or [batch, classes]."""
        read_BTH: Tensor = self.lstm(self.embedding(x_BT))[0]
        logits: Tensor = self.head(read_BTH if self.every else read_BTH[:, -1])
        return logits.transpose(1, 2) if self.every else logits


def lstm(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    labels: str = "every",
    vocabulary: int | None = None,
) -> Model:
    """LEAF's reader of Shakespeare; groups: the embedding's columns, and hidden units with all their gates and layers.

    `labels`: whether a sample has one for `every` position or one for the `last`; `vocabulary`: how many different
    inputs there are, as many as labels unless it is given.

    >>> model = lstm((80,), 80, "batch", labels="last")
    >>> [(group.name, group.size) for group in model.groups], sum(p.numel() for p in model.module.parameters())
    ([('embedding', 8), ('lstm', 256)], 819920)
    """
    check_norm_unused("lstm", norm)
    if len(shape) != 1:
        raise InvalidValue(
            f"model lstm needs sequences (length,); the data has shape {tuple(shape)}"
        )
    symbols = classes if vocabulary is None else vocabulary
    sizes = {"embedding": embedding, "hidden": hidden, "layers": layers, "vocabulary": symbols}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InvalidValue(f"model lstm: {name} must be a positive integer; got {size!r}")
    check_layer_count("lstm", layers=layers)
    if labels not in LABEL_POSITIONS:
        raise InvalidValue(f"model lstm: labels must be 'every' or 'last'; got {labels!r}")
    net = TextLSTM(symbols, classes, embedding, hidden, layers, labels == "every")
    groups = (
        UnitGroup(
            "embedding", embedding, (Cut("embedding.weight", 1), Cut("lstm.weight_ih_l0", 1))
        ),
        UnitGroup("lstm", hidden, (*_unit(hidden, layers), Cut("head.weight", 1))),
    )
    prunable = tuple(
        f"lstm.weight_{kind}_l{layer}" for layer in range(layers) for kind in ("ih", "hh")
    )
    return Model(net, groups, prunable, CLASSIFIER)


def _unit(hidden: int, layers: int) -> list[Cut]:
    """Where a hidden unit lies: in the rows of its four gates in each layer, and in what they and later layers read."""
    cuts: list[Cut] = []
    for layer in range(layers):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            cuts += [Cut(f"lstm.{name}_l{layer}", 0, start=gate * hidden) for gate in range(4)]
        cuts += [Cut(f"lstm.weight_hh_l{layer}", 1)]
        cuts += [Cut(f"lstm.weight_ih_l{layer}", 1)] if layer else []
    return cuts
