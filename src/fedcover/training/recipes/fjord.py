"""Ordered dropout: every batch trains a nested part of the client's sub-model, of random width.

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
from fedcover.tensors import device_of
from fedcover.training.recipes.base import client_norm_statistics, client_units
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe


def fjord(*, widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0), distil: float = 0.0) -> Recipe:
    """Draw a width for each batch, uniformly from those up to the client's own.

    The part of this width is a mask inside the client's sub-model. Use the recipe with the policy
    `prefix`. Running norm statistics see only batches of the client's largest width. Units beyond
    that width do not count as trained.

    Args:
        widths: The widths to draw from, in (0, 1].
        distil: The weight, in [0, 1], of learning from the output of the client's largest width.
            The authors use 1.
    """
    if not widths or any(not 0 < width <= 1 for width in widths):
        raise InvalidValue(f"recipe fjord: widths must lie in (0, 1]; got {list(widths)}")
    if not 0 <= distil <= 1:
        raise InvalidValue(f"recipe fjord: distil must be in [0, 1]; got {distil}")

    def start(assignment: Assignment, params: Params) -> Carry:
        level_widths = client_widths(assignment, widths)
        task, round, client = assignment.task, assignment.state.round, assignment.client
        draw = generator(task.seed, "fjord", round, client.id)
        schedule = torch.randint(len(level_widths), (assignment.steps,), generator=draw)
        schedule = schedule.to(device_of(params))
        masks = nested_masks(assignment, params, level_widths)
        return masks, schedule, client_norm_statistics(assignment)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        masks, schedule, statistics = carry
        level = schedule.gather(0, batch.step.view(1))
        widest = _widest_level(masks, level)
        # Tracked statistics must see only the widest part, so narrower parts update copies. `int`
        # reads a tensor's value: such steps are never stacked, and `streams` cannot capture them.
        use_copies = statistics and (distil or int(level) != int(widest))
        values = {**_apply_level_mask(params, masks, level), **(statistics if use_copies else {})}
        logits_BK = forward(values, batch.x)
        if not distil:
            return F.cross_entropy(logits_BK, batch.y)
        # the widest part learns from the labels; the drawn one from it and, if `distil` < 1, from
        # the labels too
        widest_logits_BK = forward(_apply_level_mask(params, masks, widest), batch.x)
        teacher_BK = widest_logits_BK.detach().softmax(1)
        distillation = F.cross_entropy(logits_BK, teacher_BK)
        drawn_loss = (1 - distil) * F.cross_entropy(logits_BK, batch.y) + distil * distillation
        return drawn_loss + F.cross_entropy(widest_logits_BK, batch.y)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        widest_masks = {name: masks[-1].bool() for name, masks in carry[0].items()}
        all_trained = all(bool(bits.all()) for bits in widest_masks.values())
        return Outcome(params, bits={} if all_trained else widest_masks)

    return Recipe(loss, start, finish=finish)


def client_widths(assignment: Assignment, widths: tuple[float, ...]) -> list[float]:
    """Return the widths up to the client's own, ascending; its own if all are larger."""
    units = client_units(assignment)
    groups = assignment.task.model.groups
    client_width = assignment.client.capacity
    capacity_is_width = all(
        num_units_kept(group.size, client_width) == len(units[group.name]) for group in groups
    )
    if not capacity_is_width:  # it is a share of the parameters
        client_width = max(len(units[group.name]) / group.size for group in groups)
    return sorted(width for width in set(widths) if width <= client_width + 1e-9) or [client_width]


def nested_masks(assignment: Assignment, params: Params, level_widths: list[float]) -> Params:
    """Return the masks of all levels, stacked, for each cut tensor in the client's own shapes."""
    groups, units = assignment.task.model.groups, client_units(assignment)
    cut_tensors = dict.fromkeys(
        cut.tensor for group in groups for cut in group.cuts if cut.tensor in params
    )
    client_part = Slices(groups, units)
    level_parts = []
    for width in level_widths:
        level_units = {g.name: units[g.name][: num_units_kept(g.size, width)] for g in groups}
        level_parts.append(Slices(groups, level_units))

    def mask(level_part: Slices, name: str) -> Tensor:
        if name in level_part.absent:
            return torch.zeros_like(params[name])
        shape = assignment.state.params[name].shape
        overlap = overlap_mask(
            client_part.region(name, shape), level_part.region(name, shape), shape
        )
        return overlap.to(params[name])

    return {name: torch.stack([mask(part, name) for part in level_parts]) for name in cut_tensors}


def _widest_level(masks: Params, level: Tensor) -> Tensor:
    """Return the number of the last level, in the shape of another level."""
    if not masks:
        return level
    return torch.full_like(level, len(next(iter(masks.values()))) - 1)


def _apply_level_mask(params: Params, masks: Params, level_1: Tensor) -> Params:
    masked = {}
    for name, weight in params.items():
        if name in masks:
            weight = weight * masks[name].index_select(0, level_1)[0]
        masked[name] = weight
    return masked
