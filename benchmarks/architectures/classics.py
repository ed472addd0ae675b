"""Families of torchvision that timm lacks, written as torchvision writes them: it cannot be
installed everywhere.
"""

import torch
from torch import Tensor, nn


def _block(fan_in: int, width: int, kernel: int, stride: int = 1, **options: int) -> nn.Sequential:
    convolution = nn.Conv2d(fan_in, width, kernel, stride, kernel // 2, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class AlexNet(nn.Module):
    """Five convolutions, flattened into three linear layers (of 512 units, not 4096)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(256 * 6 * 6, 512), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Fire(nn.Module):
    """Squeeze to few channels, expand with two kernels, concatenate."""

    def __init__(self, fan_in: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze, self.activation = nn.Conv2d(fan_in, squeeze, 1), nn.ReLU(inplace=True)
        self.expand1x1, self.expand3x3 = (
            nn.Conv2d(squeeze, expand, 1),
            nn.Conv2d(squeeze, expand, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Squeeze and expand."""
        x = self.activation(self.squeeze(x))
        return torch.cat(
            [self.activation(self.expand1x1(x)), self.activation(self.expand3x3(x))], 1
        )


def squeezenet() -> nn.Module:
    """Give SqueezeNet 1.1."""
    fires = [
        Fire(64, 16, 64),
        Fire(128, 16, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(128, 32, 128),
    ]
    fires += [
        Fire(256, 32, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
    ]
    fires += [Fire(384, 64, 256), Fire(512, 64, 256)]
    stem = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True)]
    head = [
        nn.Dropout(),
        nn.Conv2d(512, 10, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    ]
    return nn.Sequential(*stem, *fires, *head)


class Inception(nn.Module):
    """Four branches side by side, concatenated."""

    def __init__(
        self, fan_in: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int
    ) -> None:
        super().__init__()
        self.branch1 = _block(fan_in, one, 1)
        self.branch2 = nn.Sequential(_block(fan_in, three[0], 1), _block(*three, 3))
        self.branch3 = nn.Sequential(_block(fan_in, five[0], 1), _block(*five, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _block(fan_in, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Run all branches."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


def googlenet() -> nn.Module:
    """Give GoogLeNet without its auxiliary heads."""
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(
        _block(3, 64, 7, 2),
        pool,
        _block(64, 64, 1),
        _block(64, 192, 3),
        pool,
        Inception(192, 64, (96, 128), (16, 32), 32),
        Inception(256, 128, (128, 192), (32, 96), 64),
        pool,
        Inception(480, 192, (96, 208), (16, 48), 64),
        Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64),
        Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        Inception(832, 256, (160, 320), (32, 128), 128),
        Inception(832, 384, (192, 384), (48, 128), 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(1024, 10),
    )


class Shuffled(nn.Module):
    """Half of the channels pass by, the others are changed, and both are shuffled together."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        half = width // 2
        self.branch1: nn.Module | None = None
        if stride > 1:
            self.branch1 = nn.Sequential(_depthwise(fan_in, stride), _block(fan_in, half, 1))
        inner = fan_in if stride > 1 else half
        self.branch2 = nn.Sequential(
            _block(inner, half, 1), _depthwise(half, stride), _block(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Change a half and shuffle."""
        if self.branch1 is None:
            left, right = x.chunk(2, dim=1)
            out = torch.cat((left, self.branch2(right)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        batch, channels, height, width = out.size()
        return (
            out.view(batch, 2, channels // 2, height, width)
            .transpose(1, 2)
            .reshape(batch, -1, height, width)
        )


def _depthwise(width: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


def shufflenet() -> nn.Module:
    """Give ShuffleNetV2 x0.5."""
    layers, channels = [_block(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)], 24
    for width, repeats in ((48, 4), (96, 8), (192, 4)):
        layers += [
            Shuffled(channels if i == 0 else width, width, 2 if i == 0 else 1)
            for i in range(repeats)
        ]
        channels = width
    head = [_block(192, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers, *head)


CLASSICS = {
    "alexnet": AlexNet,
    "googlenet": googlenet,
    "shufflenetv2": shufflenet,
    "squeezenet": squeezenet,
}
