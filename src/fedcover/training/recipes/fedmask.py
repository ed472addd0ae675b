"""Learned masks: the weights stay as they were drawn, clients learn which of them to use, and vote.

Li, Sun, Zeng, Zhang, Li, Chen: FedMask, Joint computation and communication-efficient personalized federated
learning via heterogeneous masking (SenSys 2021).
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
    Cut,
    Forward,
    Model,
    Outcome,
    Params,
    Recipe,
    UnitGroup,
)

INITIAL_SCORE, SCORE_THRESHOLD = 2.0**-7, 2.0**-8
"""Every weight is used at first. A vote is worth START, so that half of the votes reach the threshold, exactly."""


def fedmask() -> Recipe:
    """Freeze all weights and learn a score for each entry of every weight matrix; a client sends one bit of each.

    The server's mean over the clients that hold an entry is then the share of those that use it: the global model uses
    what at least half of them use. Use it with any policy that cuts units; scores need a larger learning rate.
    """

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        return Outcome(
            {
                name: INITIAL_SCORE * (scores >= SCORE_THRESHOLD).to(scores.dtype)
                for name, scores in params.items()
            }
        )

    return Recipe(cross_entropy, finish=finish, model=replace_weights_with_scores)


def apply_scores(frozen: Tensor, scores: Tensor) -> Tensor:
    """The weight where its score reaches the threshold, else 0; its derivative by the score is the weight itself."""
    bits = (scores >= SCORE_THRESHOLD).to(scores.dtype)
    return frozen * (bits + scores - scores.detach())


class MaskedLinear(nn.Linear):
    """A linear layer whose parameter is a score for each entry of its frozen weight."""

    frozen: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Use the weights that the scores choose."""
        return F.linear(input, apply_scores(self.frozen, self.weight), self.bias)


class MaskedConv2d(nn.Conv2d):
    """A convolution whose parameter is a score for each entry of its frozen weight."""

    frozen: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Use the weights that the scores choose."""
        output: Tensor = self._conv_forward(
            input, apply_scores(self.frozen, self.weight), self.bias
        )
        return output


MASKED_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: MaskedLinear,
    nn.Conv2d: MaskedConv2d,
}


def replace_weights_with_scores(model: Model) -> Model:
    """The same network with scores in the place of its weights; whatever else it could learn is frozen too."""
    module = copy.deepcopy(model.module)
    frozen: set[str] = set()
    for path, layer in list(module.named_modules()):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if type(layer) in MASKED_LAYERS and name == "weight":
                layer.register_buffer("frozen", parameter.detach().clone())
                parameter.data = torch.full_like(parameter, INITIAL_SCORE)
                layer.__class__ = MASKED_LAYERS[type(layer)]
                frozen.add(f"{path}.weight")
            elif parameter.ndim > 1:
                raise InvalidValue(
                    f"recipe fedmask cannot mask {path}.{name}, a weight of a {type(layer).__name__}"
                )
            else:
                delattr(layer, name)
                layer.register_buffer(name, parameter.detach().clone())
    return replace(
        model,
        module=module,
        groups=separate_buffers(
            [_add_frozen_cuts(g, frozen) for g in model.groups],
            {name for name, _ in module.named_parameters()},
        ),
        classifier=tuple(name for name in model.classifier if name in frozen),
    )


def _add_frozen_cuts(group: UnitGroup, frozen: set[str]) -> UnitGroup:
    """The group with every cut of a weight repeated for its frozen values."""

    def both(cut: Cut) -> tuple[Cut, ...]:
        twin = replace(cut, tensor=cut.tensor.removesuffix("weight") + "frozen")
        return (cut, twin) if cut.tensor in frozen else (cut,)

    return replace(group, cuts=tuple(each for cut in group.cuts for each in both(cut)))
