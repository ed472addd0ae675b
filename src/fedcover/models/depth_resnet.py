"""A residual network with a classifier after every stage: devices differ in how many stages they hold."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count, params_and_buffers
from fedcover.models.resnet import PreactBlock, norm_factory
from fedcover.types import Cut, Model, UnitGroup


class Stage(nn.Module):
    """Blocks of one width, and the exit that classifies what they say."""

    def __init__(
        self, path: str, fan_in: int, width: int, blocks: int, classes: int, norm: str
    ) -> None:
        super().__init__()
        make = norm_factory(norm)
        strides = [1 if fan_in == width else 2, *[1] * (blocks - 1)]
        self.blocks = nn.Sequential(*(
            PreactBlock(f"{path}.blocks.{i}", fan_in if i == 0 else width, width, stride, make)
            for i, stride in enumerate(strides)
        ))  # fmt: skip
        self.norm, self.relu, self.exit = make(width), nn.ReLU(), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on to the next stage, and the logits of this one."""
        x = self.blocks(x)
        return x, self.exit(self.relu(self.norm(x)).mean(dim=(2, 3)))


class DepthResNet(nn.Module):
    """Stages one after another; a client's part ends after the last stage that it holds."""

    def __init__(
        self, channels: int, classes: int, widths: Sequence[int], blocks: int, norm: str
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        fan_ins = [widths[0], *widths[:-1]]
        self.stages = nn.ModuleList(
            Stage(f"stages.{i}", fan_in, width, blocks, classes, norm)
            for i, (fan_in, width) in enumerate(zip(fan_ins, widths, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The logits of all exits while training, stacked; of the deepest one otherwise."""
        x = self.stem(x)
        logits = []
        for stage in self.stages:
            if isinstance(stage.exit, nn.Identity):  # this stage is not in the client's part
                break
            x, found = stage(x)
            logits.append(found)
        return torch.stack(logits) if self.training else logits[-1]


def depth_resnet(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    width: int = 64,
    stages: int = 4,
    blocks: int = 2,
) -> Model:
    """A pre-activation ResNet whose units are its stages (DepthFL's kind of sub-model): use the recipe `depthfl`."""
    if len(shape) != 3:
        raise InvalidValue(
            f"a ResNet needs images (channels, height, width); the data has shape {tuple(shape)}"
        )
    if stages < 1 or blocks < 1 or width < 1:
        raise InvalidValue("model depth_resnet: width, stages and blocks must be at least 1")
    check_layer_count("depth_resnet", stages=stages, blocks=blocks)
    net = DepthResNet(shape[0], classes, [width * 2**i for i in range(stages)], blocks, norm)
    staged = [name for name in params_and_buffers(net) if name.startswith("stages.")]
    cuts = tuple(Cut(name, None, unit=int(name.split(".")[1])) for name in staged)
    convolutions = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and n != "stem"]
    classifier = tuple(
        f"stages.{i}.exit.{leaf}" for i in range(stages) for leaf in ("weight", "bias")
    )
    return Model(
        module=net,
        groups=(UnitGroup("stages", stages, cuts, nested=True),),
        prunable=tuple(f"{c}.weight" for c in convolutions),
        classifier=classifier,
        exits=tuple(_exit_parameters(f"stages.{i}", stage) for i, stage in enumerate(net.stages)),
    )


def _exit_parameters(path: str, stage: nn.Module) -> tuple[str, ...]:
    """The parameters of a stage that only its own exit uses: all but those of its blocks."""
    return tuple(
        f"{path}.{name}" for name, _ in stage.named_parameters() if not name.startswith("blocks.")
    )
