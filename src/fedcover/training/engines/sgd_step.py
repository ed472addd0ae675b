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
from fedcover.training.engines.stacked_layers import StackedLayers
from fedcover.types import Batch, Carry, LocalTraining, Params, Recipe

FunctionalForward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""A sub-model as a function of its buffers, its parameters and a batch."""


class UnsupportedByEngine(FedcoverError):
    """A recipe or model whose steps cannot be kept in place; its clients are trained one after another."""


@dataclass(slots=True, eq=False)
class BatchSchedule:
    """The rows of all steps of one batch size, what is drawn for them, and the step that comes next."""

    rows_TB: Tensor
    drawn_TBK: Tensor
    cursor: Tensor


@dataclass(slots=True, eq=False)
class StepTensors:
    """The tensors that a step reads and writes; those of a crew have a first axis C, rows and losses one after T."""

    params: Params
    velocity: Params
    masks: Params
    buffers: Params
    carry: Carry
    observed: Carry
    x: Tensor
    y: Tensor
    lr: Tensor
    step: Tensor
    losses_T: Tensor


@dataclass(frozen=True, slots=True)
class SGDStep:
    """What `training.train` does with one batch: loss, gradients, what the recipe observes, descent.

    `fused` descends in one kernel for all tensors; a compiler makes its own. In bf16 a crew turns all that it computes
    with (`bf16`); a lone client is in autocast, which would turn its weights one by one: those named in `cast_params`
    are turned together before it sees them. With `stacked_kernels` a crew's convolutions and norms are kernels of our own,
    which turn weights themselves.
    """

    recipe: Recipe
    local: LocalTraining
    functional_forward: FunctionalForward
    stacked: bool
    channels_last: bool = False
    bf16: bool = False
    fused: bool = True
    cast_params: tuple[str, ...] = ()
    stacked_kernels: bool = False

    def __call__(self, tensors: StepTensors, schedule: BatchSchedule) -> None:
        """Take the next rows, go down, move on."""
        self.compute(tensors, schedule)
        self.update_carry(tensors)

    def update_carry(self, tensors: StepTensors) -> None:
        """Let what was observed in a step be what the recipe remembers in the next."""
        if observes_gradients(self.recipe) and tree_leaves(tensors.carry):
            torch._foreach_copy_(tree_leaves(tensors.carry), tree_leaves(tensors.observed))

    def compute(self, tensors: StepTensors, schedule: BatchSchedule) -> None:
        """A step, all but `update_carry`: one function cannot both read what is remembered and write over it.

        A compiler that sees `before = last; last = new` in tensors that stay in place may well swap the two.
        """
        rows_B = schedule.rows_TB.index_select(0, schedule.cursor)[0]
        drawn_BK = schedule.drawn_TBK.index_select(0, schedule.cursor)[0]
        gradients, loss = (self._stacked_gradients if self.stacked else self._client_gradients)(
            tensors, rows_B, drawn_BK
        )
        loss = loss.detach().to(tensors.losses_T.dtype)
        if self.stacked:
            tensors.losses_T.index_put_(
                (tensors.step, torch.arange(len(loss), device=loss.device)), loss
            )
        else:
            tensors.losses_T.index_copy_(0, tensors.step.view(1), loss[None])
        with torch.no_grad():
            if observes_gradients(self.recipe):
                observe = vmap(self.recipe.observe) if self.stacked else self.recipe.observe
                tree_copy_(tensors.observed, observe(tensors.carry, gradients))
            self._sgd_update(tensors, gradients)
        tensors.step.add_(1)
        schedule.cursor.add_(1)

    def _client_gradients(
        self, tensors: StepTensors, rows_B: Tensor, drawn_BK: Tensor
    ) -> tuple[Params, Tensor]:
        x = AUGMENTATIONS[self.local.augment].apply(tensors.x[rows_B], drawn_BK)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in tensors.params.items()}
            loss = self._loss(
                leaves, tensors.buffers, tensors.carry, x, tensors.y[rows_B], tensors.step
            )
            found = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        return dict(zip(leaves, found, strict=True)), loss

    def _stacked_gradients(
        self, tensors: StepTensors, rows_CB: Tensor, drawn_CBK: Tensor
    ) -> tuple[Params, Tensor]:
        clients_C1 = torch.arange(len(rows_CB), device=rows_CB.device)[:, None]
        x_CB, y_CB = tensors.x[clients_C1, rows_CB], tensors.y[clients_C1, rows_CB]
        if self.local.augment != "none":
            x_CB = vmap(AUGMENTATIONS[self.local.augment].apply)(x_CB, drawn_CBK)
        one = grad_and_value(self._loss)
        with StackedLayers() if self.stacked_kernels else nullcontext():
            found: tuple[Params, Tensor] = vmap(one)(
                tensors.params, tensors.buffers, tensors.carry, x_CB, y_CB, tensors.step
            )
        return found

    def _loss(
        self, params: Params, buffers: Params, carry: Carry, x: Tensor, y: Tensor, step: Tensor
    ) -> Tensor:
        def forward(values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            if self.bf16:
                weights = values if self.stacked_kernels else _to_bf16(values)
                return self.functional_forward(
                    _to_bf16(buffers), weights, _to_bf16({"": inputs})[""]
                ).float()
            names = [name for name in self.cast_params if name in values]
            turned = _ForeachCast.apply(*(values[name] for name in names)) if names else ()  # type: ignore[no-untyped-call]
            return self.functional_forward(
                buffers, {**values, **dict(zip(names, turned, strict=True))}, inputs
            )

        return self.recipe.loss(forward, params, Batch(x, y, step), carry)

    def _sgd_update(self, tensors: StepTensors, gradients: Params) -> None:
        """`training.descend`, for one client or a crew, with a learning rate that is a tensor."""
        lead, local = int(self.stacked), self.local
        gradients = {
            name: g * tensors.masks[name] if name in tensors.masks else g
            for name, g in gradients.items()
        }
        if local.clip is not None:
            length = (
                torch.stack([g.flatten(lead).square().sum(-1) for g in gradients.values()])
                .sum(0)
                .sqrt()
            )
            scale = (local.clip / (length + 1e-6)).clamp(max=1.0)
            gradients = {
                name: g * scale.view(*scale.shape, *[1] * (g.ndim - lead))
                for name, g in gradients.items()
            }
        if self.fused:
            names = list(tensors.params)
            sgd(
                [tensors.params[name] for name in names],
                [_match_memory_format(tensors.params[name], gradients[name]) for name in names],
                [tensors.velocity[name] for name in names],
                fused=True, foreach=False, lr=tensors.lr,  # type: ignore[arg-type]
                momentum=local.momentum, weight_decay=local.weight_decay, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            return
        for name, weight in tensors.params.items():
            change = (
                gradients[name] + local.weight_decay * weight
                if local.weight_decay
                else gradients[name]
            )
            tensors.velocity[name].mul_(local.momentum).add_(change)
            weight.sub_(tensors.velocity[name] * tensors.lr)


def _match_memory_format(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its weight's memory format, which the fused step wants."""
    return (
        gradient
        if gradient.stride() == weight.stride()
        else torch.empty_like(weight).copy_(gradient)
    )


def _to_bf16(tensors: Mapping[str, Tensor]) -> Params:
    """In bf16, unless they are integers; a crew does not use autocast, which `vmap` does not go with."""
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


class _ForeachCast(torch.autograd.Function):
    """Tensors in bf16, and their gradients back in what they were: one kernel each way, not one for each tensor."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before = tensors[0].dtype
        return _foreach_cast(tensors, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return _foreach_cast(gradients, ctx.before)


def _foreach_cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    turned = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(turned, list(tensors))
    return tuple(turned)


# ── trees of tensors ────────────────────────────────────────────────────────────────────────────────────


def tree_leaves(tree: Carry) -> list[Tensor]:
    """The tensors of a tree, in an order that does not depend on that of its dicts.

    >>> [leaf.item() for leaf in tree_leaves(({"b": torch.tensor(2), "a": torch.tensor(1)}, torch.tensor(3)))]
    [1, 2, 3]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree, key=str) for leaf in tree_leaves(tree[name])]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in tree_leaves(part)]
    raise UnsupportedByEngine(f"the recipe remembers a {type(tree).__name__}, not only tensors")


TreeSpec = Hashable


def tree_spec(tree: Carry) -> TreeSpec:
    """What equal trees have in common: names, places, and the shapes and types of tensors."""
    if isinstance(tree, dict):
        return tuple((name, tree_spec(tree[name])) for name in sorted(tree, key=str))
    if isinstance(tree, tuple):
        return tuple(tree_spec(part) for part in tree)
    return tuple(tree_leaves(tree)[0].shape), tree.dtype


def tree_map(function: Callable[..., Tensor], first: Carry, *others: Carry) -> Carry:
    """The tree of what a function makes of the tensors of equal trees, one after another as in `tree_leaves`."""
    if isinstance(first, Tensor):
        return function(first, *others)
    if isinstance(first, dict):
        made = {
            n: tree_map(function, first[n], *(other[n] for other in others))
            for n in sorted(first, key=str)
        }
        return {name: made[name] for name in first}
    return tuple(tree_map(function, *parts) for parts in zip(first, *others, strict=True))


def tree_copy_(room: Carry, values: Carry) -> None:
    """Put the tensors of a tree into those of another of the same form."""
    if tree_spec(room) != tree_spec(values):
        raise UnsupportedByEngine(
            "what the recipe remembers does not keep its names, shapes and types"
        )
    for old, new in zip(tree_leaves(room), tree_leaves(values), strict=True):
        old.copy_(new)


def observes_gradients(recipe: Recipe) -> bool:
    """Whether a recipe looks at gradients at all."""
    return recipe.observe is not _NO_OBSERVE


_NO_OBSERVE = Recipe.__dataclass_fields__["observe"].default
