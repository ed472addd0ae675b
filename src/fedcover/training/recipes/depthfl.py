"""Clients of different depth: each trains the first stages of a network, with a classifier after every stage.

Kim, Yu, Kim, Moon: DepthFL (ICLR 2023). With `exits="last"` it is InclusiveFL (Liu et al., KDD 2022).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue, unknown
from fedcover.types import Assignment, Batch, Carry, Forward, Model, Outcome, Params, Recipe

EXITS = ("all", "last")


def depthfl(*, exits: str = "all", distil: float = 1.0) -> Recipe:
    """Every exit learns from the labels and, weighted by `distil`, from all other exits; or only the last learns.

    Use it with a model that has exits, such as `depth_resnet`, and the policy `prefix`: its units are stages.
    """
    if exits not in EXITS:
        raise unknown("recipe depthfl: exits", exits, EXITS)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        logits_EBK = forward(params, batch.x)
        if exits == "last":
            return F.cross_entropy(logits_EBK[-1], batch.y)
        count = len(logits_EBK)
        own = torch.stack([F.cross_entropy(logits_BK, batch.y) for logits_BK in logits_EBK]).sum()
        if count == 1 or not distil:
            return own
        log_EBK = logits_EBK.log_softmax(-1)
        taught = [
            F.kl_div(
                log_EBK[learner], log_EBK[teacher].detach(), reduction="batchmean", log_target=True
            )
            for learner in range(count)
            for teacher in range(count)
            if learner != teacher
        ]
        return own + distil * torch.stack(taught).sum() / (count - 1)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        if exits == "all":
            return Outcome(params)
        held = [
            names for names in assignment.task.model.exits if all(name in params for name in names)
        ]
        idle = [
            name for names in held[:-1] for name in names
        ]  # they must not dilute those of shallower clients
        return Outcome(
            params, bits={name: torch.zeros_like(params[name], dtype=torch.bool) for name in idle}
        )

    return Recipe(
        loss,
        finish=finish,
        exits=True,
        model=_require_named_exits if exits == "last" else _identity,
    )


def _identity(model: Model) -> Model:
    return model


def _require_named_exits(model: Model) -> Model:
    """The same model; refused if nobody can tell which parameters belong to which exit."""
    if not model.exits:
        raise InvalidValue(
            "recipe depthfl: exits='last' needs a model that names the parameters of each exit, such as depth_resnet; "
            "name those of your own with fc.Model(module, groups, exits=(('exit1.weight', 'exit1.bias'), ...))"
        )
    return model
