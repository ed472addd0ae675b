"""Learned masks: weights stay at their initial values; clients learn and vote which ones to use.

Li, Sun, Zeng, Zhang, Li, Chen: FedMask, Joint computation and communication-efficient personalized
federated learning via heterogeneous masking (SenSys 2021).
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.submodels.unit_groups import separate_buffers
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import (
    Assignment,
    Carry,
    Forward,
    Model,
    Outcome,
    Params,
    Recipe,
    UnitGroup,
)

INITIAL_SCORE, SCORE_THRESHOLD = 2.0**-7, 2.0**-8
"""At first every weight is used.

A vote is worth `INITIAL_SCORE`, so half of the votes reach the threshold exactly.
"""


def fedmask() -> Recipe:
    """Freeze all weights and learn a score for each entry; a client sends one bit for each.

    The server's mean over the clients that hold an entry is the share of those that use it. So
    the global model uses what at least half of them use. Use the recipe with any policy that cuts
    units. Scores need a larger learning rate than weights.
    """

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        votes = {}
        for name, scores in params.items():
            votes[name] = INITIAL_SCORE * (scores >= SCORE_THRESHOLD).to(scores.dtype)
        return Outcome(votes)

    return Recipe(cross_entropy, finish=finish, model=replace_weights_with_scores)


def apply_scores(frozen: Tensor, scores: Tensor) -> Tensor:
    """Return the weights whose scores reach the threshold, and 0 elsewhere.

    The derivative by a score is the weight itself (straight-through).
    """
    bits = (scores >= SCORE_THRESHOLD).to(scores.dtype)
    return frozen * (bits + scores - scores.detach())


class MaskedLinear(nn.Linear):
    """A linear layer whose parameter is a score for each entry of its frozen weight."""

    frozen: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer with the weights that the scores choose."""
        return F.linear(input, apply_scores(self.frozen, self.weight), self.bias)


class MaskedConv2d(nn.Conv2d):
    """A convolution whose parameter is a score for each entry of its frozen weight."""

    frozen: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer with the weights that the scores choose."""
        weight = apply_scores(self.frozen, self.weight)
        output: Tensor = self._conv_forward(input, weight, self.bias)
        return output


MASKED_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: MaskedLinear,
    nn.Conv2d: MaskedConv2d,
}


def replace_weights_with_scores(model: Model) -> Model:
    """Return the network with scores as parameters; weights and all else become buffers."""
    module = copy.deepcopy(model.module)
    frozen_weights: set[str] = set()
    for path, layer in list(module.named_modules()):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if type(layer) in MASKED_LAYERS and name == "weight":
                layer.register_buffer("frozen", parameter.detach().clone())
                parameter.data = torch.full_like(parameter, INITIAL_SCORE)
                layer.__class__ = MASKED_LAYERS[type(layer)]
                frozen_weights.add(f"{path}.weight")
            elif parameter.ndim > 1:
                raise InvalidValue(
                    f"recipe fedmask cannot mask {path}.{name}, a weight of a "
                    f"{type(layer).__name__}"
                )
            else:
                delattr(layer, name)
                layer.register_buffer(name, parameter.detach().clone())
    groups = [_add_frozen_cuts(group, frozen_weights) for group in model.groups]
    score_names = {name for name, _ in module.named_parameters()}
    return replace(
        model,
        module=module,
        groups=separate_buffers(groups, score_names),
        classifier=tuple(name for name in model.classifier if name in frozen_weights),
    )


def _add_frozen_cuts(group: UnitGroup, frozen_weights: set[str]) -> UnitGroup:
    """Return the group with each cut of a weight repeated for its frozen values."""
    cuts = []
    for cut in group.cuts:
        cuts.append(cut)
        if cut.tensor in frozen_weights:
            frozen_name = cut.tensor.removesuffix("weight") + "frozen"
            cuts.append(replace(cut, tensor=frozen_name))
    return replace(group, cuts=tuple(cuts))
