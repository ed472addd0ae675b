"""Build a recurrent text model: embedding, LSTM layers and a linear layer, as in LEAF."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count
from fedcover.models.mlp_cnn import CLASSIFIER, check_norm_unused
from fedcover.types import Cut, Model, UnitGroup

LABEL_POSITIONS = ("every", "last")


class TextLSTM(nn.Module):
    """Predict logits from characters (or words), at every position or at the last one only."""

    def __init__(
        self, vocabulary: int, classes: int, embedding: int, hidden: int, layers: int, every: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.every = every

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return logits [batch, classes, position] (for cross-entropy) or [batch, classes]."""
        states_BTH: Tensor = self.lstm(self.embedding(x_BT))[0]
        logits: Tensor = self.head(states_BTH if self.every else states_BTH[:, -1])
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
    """Build LEAF's Shakespeare model.

    One group holds the columns of the embedding. The other holds the hidden units with all their
    gates and layers.

    Args:
        shape: The shape of one sample, (length,).
        classes: The number of labels.
        norm: Must be left at its default, as there are no norm layers.
        embedding: The width of the embedding.
        hidden: The number of hidden units per layer.
        layers: The number of LSTM layers.
        labels: `every` if a sample has a label per position, `last` if it has one label.
        vocabulary: The number of different inputs; by default that of the labels.

    Returns:
        The model with its two groups.

    Raises:
        InvalidValue: If an argument is out of range or the data are not sequences.

    >>> model = lstm((80,), 80, "batch", labels="last")
    >>> [(group.name, group.size) for group in model.groups]
    [('embedding', 8), ('lstm', 256)]
    >>> sum(p.numel() for p in model.module.parameters())
    819920
    """
    check_norm_unused("lstm", norm)
    if len(shape) != 1:
        raise InvalidValue(
            f"model lstm needs sequences (length,); the data has shape {tuple(shape)}"
        )
    symbols = classes if vocabulary is None else vocabulary
    _check_sizes(embedding=embedding, hidden=hidden, layers=layers, vocabulary=symbols)
    check_layer_count("lstm", layers=layers)
    if labels not in LABEL_POSITIONS:
        raise InvalidValue(f"model lstm: labels must be 'every' or 'last'; got {labels!r}")
    net = TextLSTM(symbols, classes, embedding, hidden, layers, labels == "every")
    embedding_cuts = (Cut("embedding.weight", 1), Cut("lstm.weight_ih_l0", 1))
    hidden_cuts = (*_hidden_unit_cuts(hidden, layers), Cut("head.weight", 1))
    groups = (
        UnitGroup("embedding", embedding, embedding_cuts),
        UnitGroup("lstm", hidden, hidden_cuts),
    )
    prunable = tuple(
        f"lstm.weight_{kind}_l{layer}" for layer in range(layers) for kind in ("ih", "hh")
    )
    return Model(net, groups, prunable, CLASSIFIER)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InvalidValue(f"model lstm: {name} must be a positive integer; got {size!r}")


def _hidden_unit_cuts(hidden: int, layers: int) -> list[Cut]:
    """Locate the hidden units: rows of the four gates in each layer, and columns that read them."""
    cuts: list[Cut] = []
    for layer in range(layers):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            cuts += [Cut(f"lstm.{name}_l{layer}", 0, start=gate * hidden) for gate in range(4)]
        cuts.append(Cut(f"lstm.weight_hh_l{layer}", 1))
        if layer > 0:
            cuts.append(Cut(f"lstm.weight_ih_l{layer}", 1))
    return cuts
