"""Plain PyTorch modules and the groups in which their units are cut: mlp, cnn, wide_resnet, preact_resnet18.

A builder takes the shape of one input, the number of classes and the kind of norm, and returns a `Model`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.types import Cut, Model, UnitGroup

CHANNELS_PER_NORM_GROUP = 4
"""With group norm, four channels share their statistics and form one unit, so a group is kept or cut whole."""


class Scaler(nn.Module):
    """HeteroFL's scaler: divides by the width share while training, so that sub-models' activations match.

    It stands in the model as the identity; a sub-model sets `factor` from the tensor named by `of`.
    """

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale while training; the identity otherwise."""
        return x * self.factor if self.training and self.factor != 1.0 else x


def mlp(shape: Sequence[int], classes: int, norm: str, *, hidden: Sequence[int] = (200,)) -> Model:
    """A multi-layer perceptron; 784-200-10 has the paper's 159,010 parameters.

    >>> sum(p.numel() for p in mlp((1, 28, 28), 10, "batch").module.parameters())
    159010
    """
    _refuse_norm("mlp", norm)
    if not hidden or any(not isinstance(width, int) or width < 1 for width in hidden):
        raise InvalidValue(f"model mlp: hidden must be a list of positive integers; got {hidden!r}")
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    groups: list[UnitGroup] = []
    names = [f"hidden{i}" for i in range(1, len(hidden) + 1)] + ["head"]
    fan_in = prod(shape)
    for name, following, width in zip(names, names[1:], hidden, strict=False):
        layers += [
            (name, nn.Linear(fan_in, width)),
            (f"{name}_scaler", Scaler(f"{name}.weight")),
            (f"{name}_relu", nn.ReLU()),
        ]
        cuts = (Cut(f"{name}.weight", 0), Cut(f"{name}.bias", 0), Cut(f"{following}.weight", 1))
        groups.append(UnitGroup(name, width, cuts))
        fan_in = width
    layers.append(("head", nn.Linear(fan_in, classes)))
    prunable = tuple(f"{name}.weight" for name in names[:-1])
    return Model(nn.Sequential(OrderedDict(layers)), tuple(groups), prunable)


def cnn(
    shape: Sequence[int], classes: int, norm: str, *, channels: Sequence[int] = (32, 64), hidden: int = 128
) -> Model:
    """Convolutions with pooling, flattened into a linear layer: one channel owns many of its inputs.

    >>> model = cnn((1, 28, 28), 10, "batch")
    >>> model.groups[1].cuts[-1]
    Cut(tensor='hidden.weight', axis=1, start=0, per_unit=49)
    """
    _refuse_norm("cnn", norm)
    if len(shape) != 3:
        raise InvalidValue(f"model cnn needs images (channels, height, width); the data has shape {tuple(shape)}")
    if min(shape[1:]) >> len(channels) < 1:
        raise InvalidValue(f"model cnn: {len(channels)} poolings leave nothing of an image of {tuple(shape)}")
    layers: list[tuple[str, nn.Module]] = []
    groups: list[UnitGroup] = []
    names = [f"conv{i}" for i in range(1, len(channels) + 1)] + ["hidden"]
    fan_in, height, width = shape
    for name, following, size in zip(names, names[1:], channels, strict=False):
        layers += [
            (name, nn.Conv2d(fan_in, size, 3, padding=1)),
            (f"{name}_scaler", Scaler(f"{name}.weight")),
            (f"{name}_relu", nn.ReLU()),
            (f"{name}_pool", nn.MaxPool2d(2)),
        ]
        height, width = height // 2, width // 2
        owned = height * width if following == "hidden" else 1
        cuts = (
            Cut(f"{name}.weight", 0),
            Cut(f"{name}.bias", 0),
            Cut(f"{following}.weight", 1, per_unit=owned),
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
    return Model(nn.Sequential(OrderedDict(layers)), tuple(groups), prunable)


class PreactBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut is the identity, or a 1x1 convolution of the first ReLU."""

    def __init__(self, path: str, fan_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.scaler1, self.norm1 = Scaler(f"{path}.norm1.weight"), norm(fan_in)
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False)
        self.scaler2, self.norm2 = Scaler(f"{path}.norm2.weight"), norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if fan_in != width or stride != 1:
            self.shortcut = nn.Conv2d(fan_in, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change to its input."""
        active = self.relu(self.norm1(self.scaler1(x)))
        change = self.conv2(self.relu(self.norm2(self.scaler2(self.conv1(active)))))
        out: Tensor = change + (x if self.shortcut is None else self.shortcut(active))
        return out


class PreactResNet(nn.Module):
    """A stem, stages of pre-activation blocks, a last norm, global average pooling and a linear head."""

    def __init__(
        self,
        channels: int,
        classes: int,
        stem: int,
        widths: Sequence[int],
        blocks: int,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, stem, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        fan_in = stem
        for i, width in enumerate(widths):
            stage = nn.ModuleList()
            for j in range(blocks):
                stride = 2 if i > 0 and j == 0 else 1
                stage.append(PreactBlock(f"stages.{i}.{j}", fan_in, width, stride, norm))
                fan_in = width
            self.stages.append(stage)
        self.scaler, self.norm, self.relu = Scaler("norm.weight"), norm(fan_in), nn.ReLU()
        self.head = nn.Linear(fan_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = self.stem(x)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        x = self.relu(self.norm(self.scaler(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


def _group_norm(width: int) -> nn.Module:
    if width % CHANNELS_PER_NORM_GROUP:
        raise InvalidValue(f"norm group needs widths divisible by {CHANNELS_PER_NORM_GROUP}; got {width}")
    return nn.GroupNorm(width // CHANNELS_PER_NORM_GROUP, width)


def _preact(shape: Sequence[int], classes: int, norm: str, stem: int, widths: Sequence[int], blocks: int) -> Model:
    if len(shape) != 3:
        raise InvalidValue(f"a ResNet needs images (channels, height, width); the data has shape {tuple(shape)}")
    per_unit = CHANNELS_PER_NORM_GROUP if norm == "group" else 1
    make_norm = _group_norm if norm == "group" else _batch_norm
    net = PreactResNet(shape[0], classes, stem, widths, blocks, make_norm)
    convolutions = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and n != "stem"]
    return Model(net, _preact_groups(net, per_unit), tuple(f"{name}.weight" for name in convolutions))


def _preact_groups(net: PreactResNet, per_unit: int) -> tuple[UnitGroup, ...]:
    """One group per residual stream (all that is added into it shares its channels) and one inside each block."""
    groups: list[UnitGroup] = []

    def close(name: str, width: int, cuts: list[Cut]) -> None:
        groups.append(UnitGroup(name, width // per_unit, tuple(cuts)))

    def norm(path: str) -> list[Cut]:
        return [Cut(name, 0, per_unit=per_unit) for name in _norm_tensors(net, path)]

    def cut(tensor: str, axis: int) -> Cut:
        return Cut(tensor, axis, per_unit=per_unit)

    stream, width, cuts = "stem", net.stem.out_channels, [cut("stem.weight", 0)]
    for path, block in net.named_modules():
        if not isinstance(block, PreactBlock):
            continue
        cuts += [*norm(f"{path}.norm1"), cut(f"{path}.conv1.weight", 1)]
        if block.shortcut is not None:  # the stream ends here, and a new one begins
            close(stream, width, [*cuts, cut(f"{path}.shortcut.weight", 1)])
            stream, width, cuts = f"{path}.out", block.conv2.out_channels, [cut(f"{path}.shortcut.weight", 0)]
        cuts.append(cut(f"{path}.conv2.weight", 0))
        inside = [cut(f"{path}.conv1.weight", 0), *norm(f"{path}.norm2"), cut(f"{path}.conv2.weight", 1)]
        close(f"{path}.inside", block.conv1.out_channels, inside)
    close(stream, width, [*cuts, *norm("norm"), cut("head.weight", 1)])
    return tuple(groups)


def _norm_tensors(net: nn.Module, path: str) -> list[str]:
    """A norm's scale and shift, and its running statistics where it has any."""
    module = net.get_submodule(path)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [f"{path}.{name}" for name, tensor in tensors if tensor.ndim == 1]


def wide_resnet(shape: Sequence[int], classes: int, norm: str, *, depth: int = 28, widen: int = 2) -> Model:
    """A wide residual network (Zagoruyko and Komodakis, 2016); 28x2 is the paper's CIFAR-10 model.

    >>> sum(p.numel() for p in wide_resnet((3, 32, 32), 10, "batch").module.parameters())
    1467610
    """
    if (depth - 4) % 6 or depth < 10:
        raise InvalidValue(f"model wide_resnet: depth must be 10, 16, 22, 28, ...; got {depth}")
    if widen < 1:
        raise InvalidValue(f"model wide_resnet: widen must be at least 1; got {widen}")
    return _preact(shape, classes, norm, 16, [16 * widen, 32 * widen, 64 * widen], (depth - 4) // 6)


def preact_resnet18(shape: Sequence[int], classes: int, norm: str, *, width: int = 64) -> Model:
    """The pre-activation ResNet-18 for small images that HeteroFL and FedRolex use."""
    return _preact(shape, classes, norm, width, [width, 2 * width, 4 * width, 8 * width], 2)


def _refuse_norm(name: str, norm: str) -> None:
    if norm != "batch":
        raise InvalidValue(f"model {name} has no norm layers, so norm must be left at 'batch'; got {norm!r}")


MODELS: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "wide_resnet": wide_resnet,
    "preact_resnet18": preact_resnet18,
}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name, detached."""
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def input_of(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """One input without values, for measuring a model."""
    return torch.empty((1, *shape), dtype=dtype, device="meta")
