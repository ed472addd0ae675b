"""Plain SGD on the cross-entropy, and FedProx, which keeps clients near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks
(MLSys 2020).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.types import Assignment, Batch, Carry, Forward, Params, Recipe


def cross_entropy(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
    """Compute the mean cross-entropy of a batch."""
    return F.cross_entropy(forward(params, batch.x), batch.y)


def plain() -> Recipe:
    """Train by SGD on the cross-entropy, as in the paper."""
    return Recipe(cross_entropy)


def prox(*, mu: float = 0.01) -> Recipe:
    """Add mu/2 times the squared distance from the initial parameters to the loss (FedProx)."""
    if mu < 0:
        raise InvalidValue(f"recipe prox: mu must be at least 0; got {mu}")

    def start(assignment: Assignment, params: Params) -> Carry:
        return {name: p.detach().clone() for name, p in params.items()}

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        squares = [((params[name] - initial) ** 2).sum() for name, initial in carry.items()]
        distance = torch.stack(squares).sum()
        return cross_entropy(forward, params, batch, carry) + mu / 2 * distance

    return Recipe(loss, start)
