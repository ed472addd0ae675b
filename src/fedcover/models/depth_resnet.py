"""Build a residual network with a classifier after every stage, to be cut by stages."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models.layers import check_layer_count, params_and_buffers
from fedcover.models.resnet import PreactBlock, norm_factory
from fedcover.types import Cut, Model, UnitGroup


class Stage(nn.Module):
    """Apply blocks of one width and classify their output."""

    def __init__(
        self, path: str, fan_in: int, width: int, blocks: int, classes: int, norm: str
    ) -> None:
        super().__init__()
        make_norm = norm_factory(norm)
        self.blocks = nn.Sequential()
        for i in range(blocks):
            is_first = i == 0
            block_fan_in = fan_in if is_first else width
            stride = 2 if is_first and fan_in != width else 1
            block = PreactBlock(f"{path}.blocks.{i}", block_fan_in, width, stride, make_norm)
            self.blocks.append(block)
        self.norm = make_norm(width)
        self.relu = nn.ReLU()
        self.exit = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the next stage, and the logits of this stage."""
        x = self.blocks(x)
        return x, self.exit(self.relu(self.norm(x)).mean(dim=(2, 3)))


class DepthResNet(nn.Module):
    """Chain stages; a client's part ends after the last stage that it holds."""

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
        """Return the stacked logits of all exits in training, otherwise those of the deepest."""
        x = self.stem(x)
        logits = []
        for stage in self.stages:
            if isinstance(stage.exit, nn.Identity):  # this stage is not in the client's part
                break
            x, stage_logits = stage(x)
            logits.append(stage_logits)
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
    """Build a pre-activation ResNet whose units are its stages, as in DepthFL.

    Use it with the recipe `depthfl`.

    Args:
        shape: The shape of one image (channels, height, width).
        classes: The number of classes.
        norm: The kind of norm layers.
        width: The number of channels in the first stage; each stage doubles it.
        stages: The number of stages.
        blocks: The number of residual blocks per stage.

    Returns:
        The model with one nested group, the stages.

    Raises:
        InvalidValue: If an argument is out of range or the data are not images.
    """
    if len(shape) != 3:
        raise InvalidValue(
            f"a ResNet needs images (channels, height, width); the data has shape {tuple(shape)}"
        )
    if stages < 1 or blocks < 1 or width < 1:
        raise InvalidValue("model depth_resnet: width, stages and blocks must be at least 1")
    check_layer_count("depth_resnet", stages=stages, blocks=blocks)
    net = DepthResNet(shape[0], classes, [width * 2**i for i in range(stages)], blocks, norm)
    stage_tensors = [name for name in params_and_buffers(net) if name.startswith("stages.")]
    cuts = tuple(Cut(name, None, unit=int(name.split(".")[1])) for name in stage_tensors)
    convolutions = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d) and name != "stem"
    ]
    classifier = tuple(
        f"stages.{i}.exit.{leaf}" for i in range(stages) for leaf in ("weight", "bias")
    )
    return Model(
        module=net,
        groups=(UnitGroup("stages", stages, cuts, nested=True),),
        prunable=tuple(f"{name}.weight" for name in convolutions),
        classifier=classifier,
        exits=tuple(_exit_parameters(f"stages.{i}", stage) for i, stage in enumerate(net.stages)),
    )


def _exit_parameters(path: str, stage: nn.Module) -> tuple[str, ...]:
    """Return the parameters that only the exit of a stage uses: all but those of its blocks."""
    return tuple(
        f"{path}.{name}" for name, _ in stage.named_parameters() if not name.startswith("blocks.")
    )
