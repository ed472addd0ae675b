"""Write a recipe (what a local step minimises) and a rule (how the server combines updates).

Run it from the root of the repository: python -m examples.your_recipe
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

import fedcover as fc
from fedcover.server.aggregation import coverage_mean
from fedcover.types import Batch, Carry, Forward, Params, Recipe, Reduction


def smoothed(*, amount: float = 0.1) -> Recipe:
    """Cross entropy with smoothed labels."""

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        logits_BK = forward(params, batch.x)
        return F.cross_entropy(logits_BK, batch.y, label_smoothing=amount)

    return Recipe(loss)


def agreed(
    old: Params, updates: Iterable[tuple[Reduction, Params, float]], *, clients: int = 2
) -> Params:
    """The coverage mean, but entries that fewer than `clients` clients trained keep their value."""
    listed = list(updates)
    masks = [reduction.mask(old) for reduction, _, _ in listed]
    mean = coverage_mean(old, listed)
    enough = {name: torch.stack([mask[name] for mask in masks]).sum(0) >= clients for name in old}
    return {name: torch.where(enough[name], mean[name], tensor) for name, tensor in old.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    common_fields = {"fleet": "1x1.0 + 1x0.5", "policy": "rolling", "clients": 20, "rounds": 10}
    own_parts = {
        "recipe": "examples.your_recipe:smoothed(amount=0.05)",
        "rule": "examples.your_recipe:agreed(clients=2)",
    }
    for name, experiment in {
        "plain": fc.Experiment(**common_fields),
        "mine": fc.Experiment(**common_fields, **own_parts),
    }.items():
        print(f"{name:6} accuracy {fc.run(experiment).accuracy:.3f}")
