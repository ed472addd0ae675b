"""Clients that hold only some labels: mask their loss and the classifier rows that they train.

Diao, Ding, Tarokh: HeteroFL (ICLR 2021), masked cross-entropy and label-split aggregation. FedRolex
uses both, too.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcover.errors import unknown
from fedcover.tensors import device_of
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe

ABSENT_LABELS = {"free": None, "zero": 0.0, "ignore": -1e9}
"""What replaces the logits of labels that a client lacks: nothing, 0 (HeteroFL), or a number so low
that they add nothing to the softmax. That is not minus infinity, because a distillation term
multiplies it by a probability of 0."""


def mask_absent_labels(recipe: Recipe, *, absent: str = "free", rows: bool = False) -> Recipe:
    """Restrict a recipe's loss, and what counts as trained, to the labels that a client holds.

    Args:
        recipe: The recipe.
        absent: What the logits of absent labels become: "free" leaves them unchanged, "zero" sets
            them to 0 (each still adds e^0 to the softmax, as in the original code), "ignore"
            removes them from the softmax.
        rows: Whether the classifier's rows of absent labels do not count as trained.
    """
    if absent not in ABSENT_LABELS:
        raise unknown("absent_labels", absent, ABSENT_LABELS)
    if absent == "free" and not rows:
        return recipe
    fill = ABSENT_LABELS[absent]

    def start(assignment: Assignment, params: Params) -> Carry:
        device = device_of(params)
        has_label = torch.zeros(assignment.task.source.classes, dtype=torch.bool, device=device)
        has_label[list(assignment.client.labels)] = True
        return recipe.start(assignment, params), has_label

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        inner_carry, has_label = carry

        def masked_forward(values: Params, x: Tensor) -> Tensor:
            logits = forward(values, x)
            # the positions of a sequence come after the labels
            by_label = _expand_after(has_label, batch.y.ndim)
            return logits if fill is None else torch.where(by_label, logits, fill)

        return recipe.loss(masked_forward, params, batch, inner_carry)  # type: ignore[arg-type]

    def observe(carry: Carry, gradients: Params) -> Carry:
        inner_carry, has_label = carry
        return recipe.observe(inner_carry, gradients), has_label

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        inner_carry, has_label = carry
        outcome = recipe.finish(assignment, forward, params, inner_carry)
        bits = dict(outcome.bits)
        for name in assignment.task.model.classifier if rows else ():
            if name not in params:  # an exit beyond the client's depth
                continue
            trained = _expand_after(has_label, params[name].ndim).expand_as(params[name])
            bits[name] = bits[name] & trained if name in bits else trained
        return replace(outcome, bits=bits)

    chooses = recipe.chooses or rows
    return replace(recipe, loss=loss, start=start, observe=observe, finish=finish, chooses=chooses)


def _expand_after(vector: Tensor, ndim: int) -> Tensor:
    """Return a view of a vector with trailing axes of size 1, `ndim` axes in total."""
    return vector.view(-1, *[1] * (ndim - 1))
