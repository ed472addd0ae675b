"""Learned masks: the weights stay as they were drawn, clients learn which of them to use.

Li, Sun, Li, Pu, Li, Chen: FedMask, Joint computation and communication-efficient personalized federated learning via
heterogeneous masking (SenSys 2021).
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedcover.recipes.plain import cross_entropy
from fedcover.types import Carry, Forward, Model, Outcome, Params, Recipe

START, THRESHOLD = 0.01, 0.005
"""Every weight is used at first: scores begin at twice the threshold."""


class BinaryMask(nn.Module):
    """A weight that never changes, used where its score reaches the threshold; scores learn straight through."""

    frozen: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("frozen", weight.detach().clone())

    def forward(self, scores: Tensor) -> Tensor:
        """The masked weight; its derivative by the score is the weight itself."""
        bits = (scores >= THRESHOLD).to(scores.dtype)
        return self.frozen * (bits + scores - scores.detach())


def fedmask() -> Recipe:
    """Freeze all weights and learn a score for each entry of every weight matrix; what a client masks it does not teach."""

    def finish(forward: Forward, params: Params, carry: Carry) -> Outcome:
        return Outcome(params, bits={name: scores >= THRESHOLD for name, scores in params.items()})

    return Recipe(cross_entropy, finish=finish, model=with_scores)


def with_scores(model: Model) -> Model:
    """The same network with frozen weights and one score per entry; it has no units to cut and nothing to prune."""
    module = copy.deepcopy(model.module)
    for layer in list(module.modules()):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                frozen = BinaryMask(parameter)
                parameter.data = torch.full_like(parameter, START)
                parametrize.register_parametrization(layer, name, frozen)
            else:
                delattr(layer, name)
                layer.register_buffer(name, parameter.detach().clone())
    return Model(module, groups=(), prunable=())
