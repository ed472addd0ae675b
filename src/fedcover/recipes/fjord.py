"""Ordered dropout: every batch trains a nested part of the client's sub-model, of a width drawn anew.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD (NeurIPS 2021).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.recipes.plain import cross_entropy
from fedcover.reduction import windows
from fedcover.rng import generator
from fedcover.types import Assignment, Batch, Carry, Forward, Params, Recipe


def fjord(*, widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0), distil: float = 0.0) -> Recipe:
    """A width per batch, uniform over those up to the client's own; with `distil`, its widest output teaches too.

    The drawn part is run as a mask inside the client's sub-model. Use it with the policy `prefix`. `distil` is the
    weight of the distillation term (cross-entropy against the softened output of the client's whole sub-model).
    """
    if not widths or any(not 0 < width <= 1 for width in widths):
        raise InvalidValue(f"recipe fjord: widths must lie in (0, 1]; got {list(widths)}")
    if not 0 <= distil <= 1:
        raise InvalidValue(f"recipe fjord: distil must be in [0, 1]; got {distil}")

    def start(assignment: Assignment, params: Params) -> Carry:
        return _nested_masks(assignment, params, widths), _schedule(assignment, widths)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        masks, schedule = carry
        drawn = schedule[batch.step]
        nested = {name: p * masks[name][drawn] if name in masks else p for name, p in params.items()}
        if not distil:
            return cross_entropy(forward, nested, batch, carry)
        logits, widest = forward(nested, batch.x), forward(params, batch.x)
        taught = F.cross_entropy(logits, widest.detach().softmax(1))
        # the widest output learns from the labels, the drawn one from the labels and from it
        own = (1 - distil) * F.cross_entropy(logits, batch.y) + distil * taught
        return own + F.cross_entropy(widest, batch.y)

    return Recipe(loss, start)


def _levels(assignment: Assignment, widths: tuple[float, ...]) -> list[float]:
    """The widths up to the client's own; its own where all of them are wider."""
    mine = assignment.client.capacity
    return [width for width in sorted(widths) if width <= mine + 1e-9] or [mine]


def _nested_masks(assignment: Assignment, params: Params, widths: tuple[float, ...]) -> Params:
    """For every cut tensor, the masks of the nested widths, stacked, in the client's own shapes."""
    full, groups = assignment.state.params, assignment.task.model.groups
    cut = {name: full[name] for group in groups for name in {c.tensor for c in group.cuts} if name in full}
    stacks: dict[str, list[Tensor]] = {name: [] for name in cut}
    for width in _levels(assignment, widths):
        own = assignment.reduction.extract(windows(groups, width).mask(cut))
        for name, mask in own.items():
            stacks[name].append(mask.to(params[name].dtype))
    return {name: torch.stack(masks) for name, masks in stacks.items()}


def _schedule(assignment: Assignment, widths: tuple[float, ...]) -> Tensor:
    """Which width every step of this client trains."""
    draw = generator(assignment.task.seed, "fjord", assignment.state.round, assignment.client.id)
    return torch.randint(len(_levels(assignment, widths)), (assignment.steps,), generator=draw)
