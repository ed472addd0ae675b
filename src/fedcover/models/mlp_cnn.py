"""Build networks without norm layers: a multi-layer perceptron and a small convolutional one."""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import Scaler, check_layer_count
from fedcover.types import Cut, Model, UnitGroup

CLASSIFIER = ("head.weight", "head.bias")


def mlp(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    hidden: Sequence[int] = (200,),
    dropout: float = 0.0,
) -> Model:
    """Build a multi-layer perceptron; 784-200-10 has the paper's 159,010 parameters.

    Args:
        shape: The shape of one sample.
        classes: The number of classes.
        norm: Must be left at its default, as there are no norm layers.
        hidden: The widths of the hidden layers.
        dropout: The probability of dropping a hidden unit.

    Returns:
        The model with one group per hidden layer.

    Raises:
        InvalidValue: If an argument is out of range.

    >>> sum(p.numel() for p in mlp((1, 28, 28), 10, "batch").module.parameters())
    159010
    """
    check_norm_unused("mlp", norm)
    if not hidden or any(not isinstance(width, int) or width < 1 for width in hidden):
        raise InvalidValue(f"model mlp: hidden must be a list of positive integers; got {hidden!r}")
    check_layer_count("mlp", **{"the length of hidden": len(hidden)})
    if not 0 <= dropout < 1:
        raise InvalidValue(f"model mlp: dropout must be in [0, 1); got {dropout}")
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    groups: list[UnitGroup] = []
    names = [f"hidden{i}" for i in range(1, len(hidden) + 1)] + ["head"]
    fan_in = prod(shape)
    for name, next_name, width in zip(names, names[1:], hidden, strict=False):
        layers += [
            (name, nn.Linear(fan_in, width)),
            (f"{name}_scaler", Scaler(f"{name}.weight")),
            *([(f"{name}_dropout", nn.Dropout(dropout))] if dropout else []),
            (f"{name}_relu", nn.ReLU()),
        ]
        cuts = (Cut(f"{name}.weight", 0), Cut(f"{name}.bias", 0), Cut(f"{next_name}.weight", 1))
        groups.append(UnitGroup(name, width, cuts))
        fan_in = width
    layers.append(("head", nn.Linear(fan_in, classes)))
    prunable = tuple(f"{name}.weight" for name in names[:-1])
    return Model(nn.Sequential(OrderedDict(layers)), tuple(groups), prunable, CLASSIFIER)


def cnn(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    channels: Sequence[int] = (32, 64),
    hidden: int = 128,
) -> Model:
    """Build convolutions with pooling, followed by two linear layers.

    Each channel of the last convolution owns several inputs of the first linear layer.

    Args:
        shape: The shape of one image (channels, height, width).
        classes: The number of classes.
        norm: Must be left at its default, as there are no norm layers.
        channels: The numbers of channels of the convolutions.
        hidden: The width of the hidden linear layer.

    Returns:
        The model with one group per convolution and one for the hidden layer.

    Raises:
        InvalidValue: If an argument is out of range or the data are not images.

    >>> model = cnn((1, 28, 28), 10, "batch")
    >>> model.groups[1].cuts[-1].tensor, model.groups[1].cuts[-1].per_unit
    ('hidden.weight', 49)
    """
    check_norm_unused("cnn", norm)
    _check_cnn(shape, channels, hidden)
    layers: list[tuple[str, nn.Module]] = []
    groups: list[UnitGroup] = []
    names = [f"conv{i}" for i in range(1, len(channels) + 1)] + ["hidden"]
    fan_in, height, width = shape
    for name, next_name, size in zip(names, names[1:], channels, strict=False):
        layers += [
            (name, nn.Conv2d(fan_in, size, 3, padding=1)),
            (f"{name}_scaler", Scaler(f"{name}.weight")),
            (f"{name}_relu", nn.ReLU()),
            (f"{name}_pool", nn.MaxPool2d(2)),
        ]
        height, width = height // 2, width // 2
        inputs_per_channel = height * width if next_name == "hidden" else 1
        cuts = (
            Cut(f"{name}.weight", 0),
            Cut(f"{name}.bias", 0),
            Cut(f"{next_name}.weight", 1, per_unit=inputs_per_channel),
        )
        groups.append(UnitGroup(name, size, cuts))
        fan_in = size
    layers += [
        ("flatten", nn.Flatten()),
        ("hidden", nn.Linear(fan_in * height * width, hidden)),
        ("hidden_scaler", Scaler("hidden.weight")),
        ("hidden_relu", nn.ReLU()),
        ("head", nn.Linear(hidden, classes)),
    ]
    hidden_cuts = (Cut("hidden.weight", 0), Cut("hidden.bias", 0), Cut("head.weight", 1))
    groups.append(UnitGroup("hidden", hidden, hidden_cuts))
    prunable = tuple(f"{name}.weight" for name in names[1:])
    return Model(nn.Sequential(OrderedDict(layers)), tuple(groups), prunable, CLASSIFIER)


def _check_cnn(shape: Sequence[int], channels: Sequence[int], hidden: int) -> None:
    if len(shape) != 3:
        raise InvalidValue(
            f"model cnn needs images (channels, height, width); the data has shape {tuple(shape)}"
        )
    if not channels or min(channels) < 1 or hidden < 1:
        raise InvalidValue(
            f"model cnn: channels and hidden must be positive; got {list(channels)} and {hidden}"
        )
    check_layer_count("cnn", **{"the length of channels": len(channels)})
    if min(shape[1:]) >> len(channels) < 1:
        raise InvalidValue(
            f"model cnn: {len(channels)} poolings leave nothing of an image of {tuple(shape)}"
        )


def check_norm_unused(name: str, norm: str) -> None:
    """Raise `InvalidValue` if a norm is chosen for a model without norm layers."""
    if norm != "batch":
        raise InvalidValue(
            f"model {name} has no norm layers, so norm must be left at 'batch'; got {norm!r}"
        )
