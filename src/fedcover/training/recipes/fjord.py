"""Ordered dropout: every batch trains a nested part of the client's sub-model, of a width drawn anew.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD (NeurIPS 2021).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue
from fedcover.rng import generator
from fedcover.submodels.indexing import overlap_mask
from fedcover.submodels.reductions import Slices
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.training.recipes.base import client_norm_statistics, client_units
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe


def fjord(*, widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0), distil: float = 0.0) -> Recipe:
    """A width per batch, uniform over those up to the client's own; with `distil`, its widest output teaches too.

    The drawn part is run as a mask inside the client's sub-model. Use it with the policy `prefix`. `distil` is the
    weight of the distillation term (cross-entropy against the softmax of the widest part's output); 1 is the authors'.
    Running norm statistics see only batches of the client's widest part; what is wider than that does not count.
    """
    if not widths or any(not 0 < width <= 1 for width in widths):
        raise InvalidValue(f"recipe fjord: widths must lie in (0, 1]; got {list(widths)}")
    if not 0 <= distil <= 1:
        raise InvalidValue(f"recipe fjord: distil must be in [0, 1]; got {distil}")

    def start(assignment: Assignment, params: Params) -> Carry:
        levels = client_widths(assignment, widths)
        draw = generator(
            assignment.task.seed, "fjord", assignment.state.round, assignment.client.id
        )
        schedule = torch.randint(len(levels), (assignment.steps,), generator=draw)
        schedule = schedule.to(next(iter(params.values())).device)
        return (
            nested_masks(assignment, params, levels),
            schedule,
            client_norm_statistics(assignment),
        )

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        masks, schedule, statistics = carry
        level = schedule.gather(0, batch.step.view(1))
        widest = torch.full_like(level, len(next(iter(masks.values()))) - 1) if masks else level
        # statistics that are kept must not see a narrower part (whether it is one can then be asked)
        aside = statistics if statistics and (distil or int(level) != int(widest)) else {}
        logits_BK = forward({**_apply_level_mask(params, masks, level), **aside}, batch.x)
        if not distil:
            return F.cross_entropy(logits_BK, batch.y)
        best_BK = forward(_apply_level_mask(params, masks, widest), batch.x)
        taught = F.cross_entropy(logits_BK, best_BK.detach().softmax(1))
        # the widest output learns from the labels, the drawn one from it and, if `distil` is below 1, from the labels
        own = (1 - distil) * F.cross_entropy(logits_BK, batch.y) + distil * taught
        return own + F.cross_entropy(best_BK, batch.y)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        reached = {name: stack[-1].bool() for name, stack in carry[0].items()}
        whole = all(bool(bits.all()) for bits in reached.values())
        return Outcome(params, bits={} if whole else reached)

    return Recipe(loss, start, finish=finish)


def client_widths(assignment: Assignment, widths: tuple[float, ...]) -> list[float]:
    """The widths up to the client's own, narrowest first; its own alone where all of them are wider."""
    units = client_units(assignment)
    groups = assignment.task.model.groups
    own = assignment.client.capacity
    if any(
        num_units_kept(group.size, own) != len(units[group.name]) for group in groups
    ):  # a share of the parameters
        own = max(len(units[group.name]) / group.size for group in groups)
    return sorted(width for width in set(widths) if width <= own + 1e-9) or [own]


def nested_masks(assignment: Assignment, params: Params, levels: list[float]) -> Params:
    """For every cut tensor, the masks of the levels, stacked, in the client's own shapes."""
    groups, units = assignment.task.model.groups, client_units(assignment)
    cut = dict.fromkeys(c.tensor for g in groups for c in g.cuts if c.tensor in params)
    own = Slices(groups, units)
    parts = [
        Slices(groups, {g.name: units[g.name][: num_units_kept(g.size, level)] for g in groups})
        for level in levels
    ]

    def mask(part: Slices, name: str) -> Tensor:
        if name in part.absent:
            return torch.zeros_like(params[name])
        shape = assignment.state.params[name].shape
        return overlap_mask(own.region(name, shape), part.region(name, shape), shape).to(
            params[name]
        )

    return {name: torch.stack([mask(part, name) for part in parts]) for name in cut}


def _apply_level_mask(params: Params, masks: Params, level_1: Tensor) -> Params:
    return {
        name: p * masks[name].index_select(0, level_1)[0] if name in masks else p
        for name, p in params.items()
    }
