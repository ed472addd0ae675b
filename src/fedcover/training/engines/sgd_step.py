"""One step of SGD on tensors that stay in place, for one client or for a crew whose tensors are stacked.

A step takes its rows from a buffer, at a cursor that it moves on itself: it is the same work every time, whoever the
clients are, so it can be compiled or captured once and replayed.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.optim.sgd import sgd

from fedcover.data.augment import AUGMENTATIONS
from fedcover.errors import FedcoverError
from fedcover.training.engines.stacked_layers import CrewLayers
from fedcover.types import Batch, Carry, LocalTraining, Params, Recipe

Whole = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""A sub-model as a function of its buffers, its parameters and a batch."""


class Unfit(FedcoverError):
    """A recipe or model whose steps cannot be kept in place; its clients are trained one after another."""


@dataclass(slots=True, eq=False)
class Track:
    """The rows of all steps of one batch size, what is drawn for them, and the step that comes next."""

    rows_TB: Tensor
    drawn_TBK: Tensor
    cursor: Tensor


@dataclass(slots=True, eq=False)
class Slots:
    """The tensors that a step reads and writes; those of a crew have a first axis C, rows and losses one after T."""

    params: Params
    velocity: Params
    masks: Params
    buffers: Params
    carry: Carry
    observed: Carry
    x: Tensor
    y: Tensor
    rate: Tensor
    step: Tensor
    losses_T: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What `training.train` does with one batch: loss, gradients, what the recipe observes, descent.

    `fused` descends in one kernel for all tensors; a compiler makes its own. In bf16 a crew turns all that it computes
    with (`half`); a lone client is in autocast, which would turn its weights one by one: those named in `in_one_go`
    are turned together before it sees them. With `own_layers` a crew's convolutions and norms are kernels of our own,
    which turn weights themselves.
    """

    recipe: Recipe
    local: LocalTraining
    whole: Whole
    crew: bool
    channels_last: bool = False
    half: bool = False
    fused: bool = True
    in_one_go: tuple[str, ...] = ()
    own_layers: bool = False

    def __call__(self, slots: Slots, track: Track) -> None:
        """Take the next rows, go down, move on."""
        self.compute(slots, track)
        self.remember(slots)

    def remember(self, slots: Slots) -> None:
        """Let what was observed in a step be what the recipe remembers in the next."""
        if observes(self.recipe) and leaves_of(slots.carry):
            torch._foreach_copy_(leaves_of(slots.carry), leaves_of(slots.observed))

    def compute(self, slots: Slots, track: Track) -> None:
        """A step, all but `remember`: one function cannot both read what is remembered and write over it.

        A compiler that sees `before = last; last = new` in tensors that stay in place may well swap the two.
        """
        rows_B = track.rows_TB.index_select(0, track.cursor)[0]
        drawn_BK = track.drawn_TBK.index_select(0, track.cursor)[0]
        gradients, loss = (self._of_crew if self.crew else self._of_one)(slots, rows_B, drawn_BK)
        loss = loss.detach().to(slots.losses_T.dtype)
        if self.crew:
            slots.losses_T.index_put_((slots.step, torch.arange(len(loss), device=loss.device)), loss)
        else:
            slots.losses_T.index_copy_(0, slots.step.view(1), loss[None])
        with torch.no_grad():
            if observes(self.recipe):
                observe = vmap(self.recipe.observe) if self.crew else self.recipe.observe
                overwrite(slots.observed, observe(slots.carry, gradients))
            self._descend(slots, gradients)
        slots.step.add_(1)
        track.cursor.add_(1)

    def _of_one(self, slots: Slots, rows_B: Tensor, drawn_BK: Tensor) -> tuple[Params, Tensor]:
        x = AUGMENTATIONS[self.local.augment].apply(slots.x[rows_B], drawn_BK)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in slots.params.items()}
            loss = self._loss(leaves, slots.buffers, slots.carry, x, slots.y[rows_B], slots.step)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True)), loss

    def _of_crew(self, slots: Slots, rows_CB: Tensor, drawn_CBK: Tensor) -> tuple[Params, Tensor]:
        clients_C1 = torch.arange(len(rows_CB), device=rows_CB.device)[:, None]
        x_CB, y_CB = slots.x[clients_C1, rows_CB], slots.y[clients_C1, rows_CB]
        if self.local.augment != "none":
            x_CB = vmap(AUGMENTATIONS[self.local.augment].apply)(x_CB, drawn_CBK)
        one = grad_and_value(self._loss)
        with CrewLayers() if self.own_layers else nullcontext():
            found: tuple[Params, Tensor] = vmap(one)(slots.params, slots.buffers, slots.carry, x_CB, y_CB, slots.step)
        return found

    def _loss(self, params: Params, buffers: Params, carry: Carry, x: Tensor, y: Tensor, step: Tensor) -> Tensor:
        def forward(values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            if self.half:
                weights = values if self.own_layers else _halved(values)
                return self.whole(_halved(buffers), weights, _halved({"": inputs})[""]).float()
            names = [name for name in self.in_one_go if name in values]
            turned = _InOneGo.apply(*(values[name] for name in names)) if names else ()  # type: ignore[no-untyped-call]
            return self.whole(buffers, {**values, **dict(zip(names, turned, strict=True))}, inputs)

        return self.recipe.loss(forward, params, Batch(x, y, step), carry)

    def _descend(self, slots: Slots, gradients: Params) -> None:
        """`training.descend`, for one client or a crew, with a learning rate that is a tensor."""
        lead, local = int(self.crew), self.local
        gradients = {name: g * slots.masks[name] if name in slots.masks else g for name, g in gradients.items()}
        if local.clip is not None:
            length = torch.stack([g.flatten(lead).square().sum(-1) for g in gradients.values()]).sum(0).sqrt()
            scale = (local.clip / (length + 1e-6)).clamp(max=1.0)
            gradients = {name: g * scale.view(*scale.shape, *[1] * (g.ndim - lead)) for name, g in gradients.items()}
        if self.fused:
            names = list(slots.params)
            sgd(
                [slots.params[name] for name in names],
                [_laid_out_like(slots.params[name], gradients[name]) for name in names],
                [slots.velocity[name] for name in names],
                fused=True, foreach=False, lr=slots.rate,  # type: ignore[arg-type]
                momentum=local.momentum, weight_decay=local.weight_decay, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            return
        for name, weight in slots.params.items():
            change = gradients[name] + local.weight_decay * weight if local.weight_decay else gradients[name]
            slots.velocity[name].mul_(local.momentum).add_(change)
            weight.sub_(slots.velocity[name] * slots.rate)


def _laid_out_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its weight's memory format, which the fused step wants."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


def _halved(tensors: Mapping[str, Tensor]) -> Params:
    """In bf16, unless they are integers; a crew does not use autocast, which `vmap` does not go with."""
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


class _InOneGo(torch.autograd.Function):
    """Tensors in bf16, and their gradients back in what they were: one kernel each way, not one for each tensor."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before = tensors[0].dtype
        return _turned(tensors, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return _turned(gradients, ctx.before)


def _turned(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    turned = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(turned, list(tensors))
    return tuple(turned)


# ── trees of tensors ────────────────────────────────────────────────────────────────────────────────────


def leaves_of(tree: Carry) -> list[Tensor]:
    """The tensors of a tree, in an order that does not depend on that of its dicts.

    >>> [leaf.item() for leaf in leaves_of(({"b": torch.tensor(2), "a": torch.tensor(1)}, torch.tensor(3)))]
    [1, 2, 3]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree, key=str) for leaf in leaves_of(tree[name])]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves_of(part)]
    raise Unfit(f"the recipe remembers a {type(tree).__name__}, not only tensors")


Form = Hashable


def form_of(tree: Carry) -> Form:
    """What equal trees have in common: names, places, and the shapes and types of tensors."""
    if isinstance(tree, dict):
        return tuple((name, form_of(tree[name])) for name in sorted(tree, key=str))
    if isinstance(tree, tuple):
        return tuple(form_of(part) for part in tree)
    return tuple(leaves_of(tree)[0].shape), tree.dtype


def map_trees(function: Callable[..., Tensor], first: Carry, *others: Carry) -> Carry:
    """The tree of what a function makes of the tensors of equal trees, one after another as in `leaves_of`."""
    if isinstance(first, Tensor):
        return function(first, *others)
    if isinstance(first, dict):
        made = {n: map_trees(function, first[n], *(other[n] for other in others)) for n in sorted(first, key=str)}
        return {name: made[name] for name in first}
    return tuple(map_trees(function, *parts) for parts in zip(first, *others, strict=True))


def overwrite(room: Carry, values: Carry) -> None:
    """Put the tensors of a tree into those of another of the same form."""
    if form_of(room) != form_of(values):
        raise Unfit("what the recipe remembers does not keep its names, shapes and types")
    for old, new in zip(leaves_of(room), leaves_of(values), strict=True):
        old.copy_(new)


def observes(recipe: Recipe) -> bool:
    """Whether a recipe looks at gradients at all."""
    return recipe.observe is not _BLIND


_BLIND = Recipe.__dataclass_fields__["observe"].default
