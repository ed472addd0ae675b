"""Build pre-activation ResNets: the paper's wide ones, and that of HeteroFL and FedRolex."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import Scaler, check_layer_count
from fedcover.models.mlp_cnn import CLASSIFIER
from fedcover.types import Cut, Model, UnitGroup

CHANNELS_PER_NORM_GROUP = 4
"""Channels that share group-norm statistics; they form one unit, so groups stay whole."""


class PreactBlock(nn.Module):
    """Apply norm, ReLU and convolution twice, and add a shortcut.

    The shortcut is the identity, or a 1x1 convolution after the first ReLU.
    """

    def __init__(
        self, path: str, fan_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.scaler1 = Scaler(f"{path}.norm1.weight")
        self.norm1 = norm(fan_in)
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False)
        self.scaler2 = Scaler(f"{path}.norm2.weight")
        self.norm2 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if fan_in != width or stride != 1:
            self.shortcut = nn.Conv2d(fan_in, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        activated = self.relu(self.norm1(self.scaler1(x)))
        residual = self.conv2(self.relu(self.norm2(self.scaler2(self.conv1(activated)))))
        out: Tensor = residual + (x if self.shortcut is None else self.shortcut(activated))
        return out


class PreactResNet(nn.Module):
    """Chain a stem, stages of blocks, a norm, global average pooling and a linear head."""

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
        self.scaler = Scaler("norm.weight")
        self.norm = norm(fan_in)
        self.relu = nn.ReLU()
        self.head = nn.Linear(fan_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.stem(x)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        x = self.relu(self.norm(self.scaler(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def norm_factory(kind: str) -> Callable[[int], nn.Module]:
    """Return the function that creates a norm layer for a number of channels."""
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
    prunable = tuple(
        f"{name}.weight"
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d) and name != "stem"
    )
    return Model(net, _preact_groups(net, per_unit), prunable, CLASSIFIER)


def _preact_groups(net: PreactResNet, per_unit: int) -> tuple[UnitGroup, ...]:
    """Return one group per residual stream and one inside each block.

    All tensors that are added into one stream share its channels.
    """
    groups: list[UnitGroup] = []

    def add_group(name: str, channels: int, cuts: list[Cut]) -> None:
        groups.append(UnitGroup(name, channels // per_unit, tuple(cuts)))

    def norm_cuts(path: str) -> list[Cut]:
        return [channel_cut(name, 0) for name in _norm_tensors(net, path)]

    def channel_cut(tensor: str, axis: int) -> Cut:
        return Cut(tensor, axis, per_unit=per_unit)

    stream = "stem"
    stream_width = net.stem.out_channels
    stream_cuts = [channel_cut("stem.weight", 0)]
    for path, block in net.named_modules():
        if not isinstance(block, PreactBlock):
            continue
        stream_cuts += [*norm_cuts(f"{path}.norm1"), channel_cut(f"{path}.conv1.weight", 1)]
        if block.shortcut is not None:  # the stream ends here, and a new one begins
            stream_cuts.append(channel_cut(f"{path}.shortcut.weight", 1))
            add_group(stream, stream_width, stream_cuts)
            stream = f"{path}.out"
            stream_width = block.conv2.out_channels
            stream_cuts = [channel_cut(f"{path}.shortcut.weight", 0)]
        stream_cuts.append(channel_cut(f"{path}.conv2.weight", 0))
        inner_cuts = [
            channel_cut(f"{path}.conv1.weight", 0),
            *norm_cuts(f"{path}.norm2"),
            channel_cut(f"{path}.conv2.weight", 1),
        ]
        add_group(f"{path}.inside", block.conv1.out_channels, inner_cuts)
    stream_cuts += [*norm_cuts("norm"), channel_cut("head.weight", 1)]
    add_group(stream, stream_width, stream_cuts)
    return tuple(groups)


def _norm_tensors(net: nn.Module, path: str) -> list[str]:
    """Return the names of a norm's scale, shift and running statistics."""
    module = net.get_submodule(path)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [f"{path}.{name}" for name, tensor in tensors if tensor.ndim == 1]


def wide_resnet(
    shape: Sequence[int], classes: int, norm: str, *, depth: int = 28, widen: int = 2
) -> Model:
    """Build a wide ResNet (Zagoruyko and Komodakis, 2016); 28x2 is the paper's CIFAR-10 model.

    Args:
        shape: The shape of one image (channels, height, width).
        classes: The number of classes.
        norm: The kind of norm layers.
        depth: The number of layers: 10, 16, 22, 28, ...
        widen: The factor of the numbers of channels.

    Returns:
        The model with one group per residual stream and one per block.

    Raises:
        InvalidValue: If an argument is out of range or the data are not images.

    >>> sum(p.numel() for p in wide_resnet((3, 32, 32), 10, "batch").module.parameters())
    1467610
    """
    if (depth - 4) % 6 or depth < 10:
        raise InvalidValue(f"model wide_resnet: depth must be 10, 16, 22, 28, ...; got {depth}")
    check_layer_count("wide_resnet", depth=depth)
    if widen < 1:
        raise InvalidValue(f"model wide_resnet: widen must be at least 1; got {widen}")
    widths = [16 * widen, 32 * widen, 64 * widen]
    return _preact(shape, classes, norm, stem=16, widths=widths, blocks=(depth - 4) // 6)


def preact_resnet18(shape: Sequence[int], classes: int, norm: str, *, width: int = 64) -> Model:
    """Build the pre-activation ResNet-18 for small images that HeteroFL and FedRolex use.

    Args:
        shape: The shape of one image (channels, height, width).
        classes: The number of classes.
        norm: The kind of norm layers.
        width: The number of channels in the first stage; each stage doubles it.

    Returns:
        The model with one group per residual stream and one per block.

    Raises:
        InvalidValue: If an argument is out of range or the data are not images.
    """
    if width < 1:
        raise InvalidValue(f"model preact_resnet18: width must be at least 1; got {width}")
    widths = [width, 2 * width, 4 * width, 8 * width]
    return _preact(shape, classes, norm, stem=width, widths=widths, blocks=2)
