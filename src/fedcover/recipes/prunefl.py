"""The client's side of PruneFL: it measures the squared gradient of every weight, pruned ones included.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning on edge devices
(TNNLS 2022). The server's side is the policy `prunefl`, which re-configures the common mask by what is measured here.
"""

import torch

from fedcover.recipes.plain import cross_entropy
from fedcover.types import Assignment, Carry, Forward, Outcome, Params, Recipe


def prunefl() -> Recipe:
    """Plain SGD that also reports the mean squared gradient of every prunable weight."""

    def start(assignment: Assignment, params: Params) -> Carry:
        return {name: torch.zeros_like(params[name]) for name in assignment.task.model.prunable}, 0

    def observe(carry: Carry, gradients: Params) -> Carry:
        sums, steps = carry
        return {name: total + gradients[name] ** 2 for name, total in sums.items()}, steps + 1

    def finish(forward: Forward, params: Params, carry: Carry) -> Outcome:
        sums, steps = carry
        return Outcome(params, measured={"squared_gradient": {name: total / steps for name, total in sums.items()}})

    return Recipe(cross_entropy, start, observe, finish)
