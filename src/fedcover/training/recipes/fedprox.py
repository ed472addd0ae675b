"""Plain SGD on the cross-entropy, and FedProx, which holds clients near the model that they were sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks (MLSys 2020).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.types import Assignment, Batch, Carry, Forward, Params, Recipe


def cross_entropy(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(forward(params, batch.x), batch.y)


def plain() -> Recipe:
    """SGD on the cross-entropy, as in the paper."""
    return Recipe(cross_entropy)


def prox(*, mu: float = 0.01) -> Recipe:
    """FedProx: the loss plus mu/2 times the squared distance from the parameters that the client was sent."""
    if mu < 0:
        raise InvalidValue(f"recipe prox: mu must be at least 0; got {mu}")

    def start(assignment: Assignment, params: Params) -> Carry:
        return {name: p.detach().clone() for name, p in params.items()}

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        distance = torch.stack(
            [((params[name] - sent) ** 2).sum() for name, sent in carry.items()]
        ).sum()
        return cross_entropy(forward, params, batch, carry) + mu / 2 * distance

    return Recipe(loss, start)
