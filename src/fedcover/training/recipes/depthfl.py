"""Clients of different depth: each trains the first stages, with a classifier after every stage.

Kim, Yu, Kim, Moon: DepthFL (ICLR 2023). With `exits="last"` it is InclusiveFL (Liu et al., KDD
2022).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue, unknown
from fedcover.types import Assignment, Batch, Carry, Forward, Model, Outcome, Params, Recipe

EXITS = ("all", "last")


def depthfl(*, exits: str = "all", distil: float = 1.0) -> Recipe:
    """Train every exit on the labels and on the other exits, or train only the last exit.

    Use it with a model that has exits, such as `depth_resnet`, and the policy `prefix`, whose
    units are then stages.

    Args:
        exits: Which exits learn: "all" or "last".
        distil: The weight of learning from the other exits.
    """
    if exits not in EXITS:
        raise unknown("recipe depthfl: exits", exits, EXITS)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        logits_EBK = forward(params, batch.x)
        if exits == "last":
            return F.cross_entropy(logits_EBK[-1], batch.y)
        num_exits = len(logits_EBK)
        losses = [F.cross_entropy(logits_BK, batch.y) for logits_BK in logits_EBK]
        label_loss = torch.stack(losses).sum()
        if num_exits == 1 or not distil:
            return label_loss
        return label_loss + distil * _distillation(logits_EBK) / (num_exits - 1)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        if exits == "all":
            return Outcome(params)
        reached_exits = [
            names for names in assignment.task.model.exits if all(name in params for name in names)
        ]
        # untrained exits must not dilute those of shallower clients
        untrained = [name for names in reached_exits[:-1] for name in names]
        bits = {name: torch.zeros_like(params[name], dtype=torch.bool) for name in untrained}
        return Outcome(params, bits=bits)

    check_model = _require_named_exits if exits == "last" else _identity
    return Recipe(loss, finish=finish, exits=True, model=check_model)


def _distillation(logits_EBK: Tensor) -> Tensor:
    """Sum the divergence of each exit from each other exit."""
    log_probs_EBK = logits_EBK.log_softmax(-1)
    divergences = []
    for learner in range(len(logits_EBK)):
        for teacher in range(len(logits_EBK)):
            if learner != teacher:
                target_BK = log_probs_EBK[teacher].detach()
                divergences.append(
                    F.kl_div(
                        log_probs_EBK[learner], target_BK, reduction="batchmean", log_target=True
                    )
                )
    return torch.stack(divergences).sum()


def _identity(model: Model) -> Model:
    return model


def _require_named_exits(model: Model) -> Model:
    """Return the model; raise if it does not name the parameters of its exits."""
    if not model.exits:
        raise InvalidValue(
            "recipe depthfl: exits='last' needs a model that names the parameters of each exit, "
            "such as depth_resnet; name those of your own with "
            "fc.Model(module, groups, exits=(('exit1.weight', 'exit1.bias'), ...))"
        )
    return model
