"""A model of your own: an ordinary module, and which of its units are cut together.

Run it from the root of the repository: python -m examples.your_model
"""

import torch
from torch import Tensor, nn

import fedcover as fc


def two_branches(shape: tuple[int, ...], classes: int, norm: str, *, width: int = 32) -> fc.Model:
    """Two layers side by side whose outputs are concatenated: the head's inputs belong to two groups."""
    inputs = shape[0] * shape[1] * shape[2]
    module = TwoBranches(inputs, classes, width)
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
    return fc.Model(module, groups, prunable=("left.weight", "right.weight"))


class TwoBranches(nn.Module):
    """The module knows nothing of fedcover."""

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


if __name__ == "__main__":
    experiment = fc.Experiment(
        model="examples.your_model:two_branches(width=24)",
        fleet="1x1.0 + 1x0.5",
        policy="rolling",
        clients=20,
        rounds=10,
    )
    run = fc.run(experiment)
    print(f"accuracy {run.accuracy:.3f}; a half-sized device gets {run.submodel(0.5)}")
