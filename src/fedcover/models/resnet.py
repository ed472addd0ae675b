"""Pre-activation residual networks: the paper's wide ResNets, and the ResNet-18 of HeteroFL and FedRolex."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import Scaler, check_layer_count
from fedcover.models.mlp_cnn import CLASSIFIER
from fedcover.types import Cut, Model, UnitGroup

CHANNELS_PER_NORM_GROUP = 4
"""With group norm, four channels share their statistics and form one unit, so a group is kept or cut whole."""


class PreactBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut is the identity, or a 1x1 convolution of the first ReLU."""

    def __init__(
        self, path: str, fan_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
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


def norm_factory(kind: str) -> Callable[[int], nn.Module]:
    """How a norm layer over some channels is made."""
    return _group_norm if kind == "group" else _batch_norm


def _batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


def _group_norm(width: int) -> nn.Module:
    if width % CHANNELS_PER_NORM_GROUP:
        raise InvalidValue(
            f"norm group needs widths divisible by {CHANNELS_PER_NORM_GROUP}; got {width}"
        )
    return nn.GroupNorm(width // CHANNELS_PER_NORM_GROUP, width)


def _preact(
    shape: Sequence[int], classes: int, norm: str, stem: int, widths: Sequence[int], blocks: int
) -> Model:
    if len(shape) != 3:
        raise InvalidValue(
            f"a ResNet needs images (channels, height, width); the data has shape {tuple(shape)}"
        )
    per_unit = CHANNELS_PER_NORM_GROUP if norm == "group" else 1
    net = PreactResNet(shape[0], classes, stem, widths, blocks, norm_factory(norm))
    convolutions = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and n != "stem"]
    return Model(
        net,
        _preact_groups(net, per_unit),
        tuple(f"{name}.weight" for name in convolutions),
        CLASSIFIER,
    )


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
            stream, width, cuts = (
                f"{path}.out",
                block.conv2.out_channels,
                [cut(f"{path}.shortcut.weight", 0)],
            )
        cuts.append(cut(f"{path}.conv2.weight", 0))
        inside = [
            cut(f"{path}.conv1.weight", 0),
            *norm(f"{path}.norm2"),
            cut(f"{path}.conv2.weight", 1),
        ]
        close(f"{path}.inside", block.conv1.out_channels, inside)
    close(stream, width, [*cuts, *norm("norm"), cut("head.weight", 1)])
    return tuple(groups)


def _norm_tensors(net: nn.Module, path: str) -> list[str]:
    """A norm's scale and shift, and its running statistics where it has any."""
    module = net.get_submodule(path)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [f"{path}.{name}" for name, tensor in tensors if tensor.ndim == 1]


def wide_resnet(
    shape: Sequence[int], classes: int, norm: str, *, depth: int = 28, widen: int = 2
) -> Model:
    """A wide residual network (Zagoruyko and Komodakis, 2016); 28x2 is the paper's CIFAR-10 model.

    >>> sum(p.numel() for p in wide_resnet((3, 32, 32), 10, "batch").module.parameters())
    1467610
    """
    if (depth - 4) % 6 or depth < 10:
        raise InvalidValue(f"model wide_resnet: depth must be 10, 16, 22, 28, ...; got {depth}")
    check_layer_count("wide_resnet", depth=depth)
    if widen < 1:
        raise InvalidValue(f"model wide_resnet: widen must be at least 1; got {widen}")
    return _preact(shape, classes, norm, 16, [16 * widen, 32 * widen, 64 * widen], (depth - 4) // 6)


def preact_resnet18(shape: Sequence[int], classes: int, norm: str, *, width: int = 64) -> Model:
    """The pre-activation ResNet-18 for small images that HeteroFL and FedRolex use."""
    if width < 1:
        raise InvalidValue(f"model preact_resnet18: width must be at least 1; got {width}")
    return _preact(shape, classes, norm, width, [width, 2 * width, 4 * width, 8 * width], 2)
