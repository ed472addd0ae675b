"""Clients that know only some labels: their loss, and the classifier rows that they may teach.

Diao, Ding, Tarokh: HeteroFL (ICLR 2021), masked cross-entropy and label-split aggregation; used by FedRolex too.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedcover.errors import unknown
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe

ABSENT_LABELS = {"free": None, "zero": 0.0, "ignore": -1e9}
"""What the logits of labels that a client lacks become in its loss: unchanged, 0 (HeteroFL), or so low that they add
nothing; not minus infinity, because a distillation term multiplies it by a probability of 0."""


def mask_absent_labels(recipe: Recipe, *, absent: str = "free", rows: bool = False) -> Recipe:
    """A recipe whose loss and whose classifier rows keep to the labels that the client holds.

    With `absent` "zero" each absent label still adds e^0 to the softmax, as in the original code; with "ignore" it adds
    nothing. With `rows` the classifier's rows of absent labels do not count as trained.
    """
    if absent not in ABSENT_LABELS:
        raise unknown("absent_labels", absent, ABSENT_LABELS)
    if absent == "free" and not rows:
        return recipe
    fill = ABSENT_LABELS[absent]

    def start(assignment: Assignment, params: Params) -> Carry:
        device = next(iter(params.values())).device
        held = torch.zeros(assignment.task.source.classes, dtype=torch.bool, device=device)
        held[list(assignment.client.labels)] = True
        return recipe.start(assignment, params), held

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        inner, held = carry

        def filled(values: Params, x: Tensor) -> Tensor:
            logits = forward(values, x)
            by_label = held.view(
                -1, *[1] * (batch.y.ndim - 1)
            )  # places of a sequence come after the labels
            return logits if fill is None else torch.where(by_label, logits, fill)

        return recipe.loss(filled, params, batch, inner)  # type: ignore[arg-type]

    def observe(carry: Carry, gradients: Params) -> Carry:
        return recipe.observe(carry[0], gradients), carry[1]

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        inner, held = carry
        outcome = recipe.finish(assignment, forward, params, inner)
        classifier = assignment.task.model.classifier if rows else ()
        bits = dict(outcome.bits)
        for name in (
            name for name in classifier if name in params
        ):  # an exit may be out of the client's reach
            taught = held.view(-1, *[1] * (params[name].ndim - 1)).expand_as(params[name])
            bits[name] = bits[name] & taught if name in bits else taught
        return replace(outcome, bits=bits)

    return replace(
        recipe,
        loss=loss,
        start=start,
        observe=observe,
        finish=finish,
        chooses=recipe.chooses or rows,
    )
