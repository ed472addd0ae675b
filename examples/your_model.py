"""A model of your own: an ordinary module; which of its units are cut together is found by tracing.

Run it from the root of the repository: python -m examples.your_model
"""

import torch
from torch import Tensor, nn

import fedcover as fc


class TwoBranches(nn.Module):
    """Two layers with concatenated outputs: the inputs of the head belong to two groups."""

    def __init__(self, inputs: int, classes: int, width: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.left, self.right = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        x = self.flatten(x)
        logits: Tensor = self.head(torch.cat([self.left(x).relu(), self.right(x).relu()], dim=1))
        return logits


def two_branches(shape: tuple[int, ...], classes: int, norm: str, *, width: int = 32) -> nn.Module:
    """A builder: `width` is an option that users may set, as in two_branches(width=24)."""
    return TwoBranches(shape[0] * shape[1] * shape[2], classes, width)


def two_branches_declared(
    shape: tuple[int, ...], classes: int, norm: str, *, width: int = 32
) -> fc.Model:
    """The same with its groups declared by hand, for modules that tracing refuses."""
    groups = tuple(
        fc.UnitGroup(
            name,
            size=width,
            cuts=(
                fc.Cut(f"{name}.weight", axis=0),
                fc.Cut(f"{name}.bias", axis=0),
                fc.Cut("head.weight", axis=1, start=start),
            ),
        )
        for name, start in (("left", 0), ("right", width))
    )
    return fc.Model(
        two_branches(shape, classes, norm, width=width),
        groups,
        prunable=("left.weight", "right.weight"),
    )


if __name__ == "__main__":
    for builder in ("two_branches(width=24)", "two_branches_declared(width=24)"):
        experiment = fc.Experiment(
            model=f"examples.your_model:{builder}",
            fleet="1x1.0 + 1x0.5",
            policy="rolling",
            clients=20,
            rounds=10,
        )
        run = fc.run(experiment)
        print(
            f"{builder}: accuracy {run.accuracy:.3f}; a half-sized device gets {run.submodel(0.5)}"
        )
