"""One step of SGD on preallocated tensors, for one client or for many stacked clients.

The step reads the rows of its batch at a cursor and advances the cursor itself. So it performs
the same operations every time, and can be compiled or captured once and then replayed.

To change what a step computes, change `local_sgd.train` first: it is the specification. Then make
`SGDStep.compute` agree; `tests/training/engines/test_engines.py` compares the two.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.optim.sgd import sgd

from fedcover.data.augment import AUGMENTATIONS
from fedcover.tensors import tree_leaves
from fedcover.training.engines.carries import copy_carry_
from fedcover.training.engines.stacked_layers import StackedLayers
from fedcover.training.engines.step_tensors import BatchSchedule, StepTensors
from fedcover.types import Batch, Carry, LocalTraining, Params, Recipe

FunctionalForward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""A sub-model as a function of its buffers, its parameters and a batch of inputs."""

_NO_OBSERVE = Recipe.__dataclass_fields__["observe"].default


def observes_gradients(recipe: Recipe) -> bool:
    """Return whether a recipe defines `observe`."""
    return recipe.observe is not _NO_OBSERVE


@dataclass(frozen=True, slots=True)
class SGDStep:
    """The work that `local_sgd.train` does for one batch, as a function of preallocated tensors.

    It computes loss and gradients, lets the recipe observe the gradients, and descends.

    Attributes:
        recipe: Gives the loss, and `observe`.
        local: The client's hyper-parameters.
        functional_forward: The sub-model.
        stacked: Whether the tensors hold several clients along a first axis.
        channels_last: Whether images are in torch's channels-last memory format.
        bf16: Whether stacked clients compute in bf16. They cast every input of the model
            themselves, because autocast does not work under `vmap`.
        fused: Whether one kernel updates all parameters. A compiler makes its own instead.
        cast_params: The parameters of a lone client to cast to bf16 together. Autocast would
            cast them one by one.
        stacked_kernels: Whether `StackedLayers` computes convolutions and norms. Its kernels cast
            weights themselves.
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
        """Train on the next batch and advance the cursor."""
        self.compute(tensors, schedule)
        self.update_carry(tensors)

    def update_carry(self, tensors: StepTensors) -> None:
        """Copy what the recipe observed in this step into what it remembers in the next."""
        if observes_gradients(self.recipe) and (remembered := tree_leaves(tensors.carry)):
            torch._foreach_copy_(remembered, tree_leaves(tensors.observed))

    def compute(self, tensors: StepTensors, schedule: BatchSchedule) -> None:
        """Do the whole step except `update_carry`.

        The two are separate because one compiled function must not read `carry` and overwrite it:
        a compiler may reorder `before = last; last = new` on tensors that are updated in place.
        """
        rows_B = schedule.rows_TB.index_select(0, schedule.cursor)[0]
        drawn_BK = schedule.drawn_TBK.index_select(0, schedule.cursor)[0]
        compute_gradients = self._stacked_gradients if self.stacked else self._client_gradients
        gradients, loss = compute_gradients(tensors, rows_B, drawn_BK)
        self._record_loss(tensors, loss.detach().to(tensors.losses_T.dtype))
        with torch.no_grad():
            if observes_gradients(self.recipe):
                observe = vmap(self.recipe.observe) if self.stacked else self.recipe.observe
                copy_carry_(tensors.observed, observe(tensors.carry, gradients))
            self._sgd_update(tensors, gradients)
        tensors.step.add_(1)
        schedule.cursor.add_(1)

    def _record_loss(self, tensors: StepTensors, loss: Tensor) -> None:
        if self.stacked:
            clients_C = torch.arange(len(loss), device=loss.device)
            tensors.losses_T.index_put_((tensors.step, clients_C), loss)
        else:
            tensors.losses_T.index_copy_(0, tensors.step.view(1), loss[None])

    def _client_gradients(
        self, tensors: StepTensors, rows_B: Tensor, drawn_BK: Tensor
    ) -> tuple[Params, Tensor]:
        x = AUGMENTATIONS[self.local.augment].apply(tensors.x[rows_B], drawn_BK)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():
            params = {name: p.detach().requires_grad_() for name, p in tensors.params.items()}
            y = tensors.y[rows_B]
            loss = self._loss(params, tensors.buffers, tensors.carry, x, y, tensors.step)
            gradients = torch.autograd.grad(
                loss, list(params.values()), allow_unused=True, materialize_grads=True
            )
        return dict(zip(params, gradients, strict=True)), loss

    def _stacked_gradients(
        self, tensors: StepTensors, rows_CB: Tensor, drawn_CBK: Tensor
    ) -> tuple[Params, Tensor]:
        clients_C1 = torch.arange(len(rows_CB), device=rows_CB.device)[:, None]
        x_CB = tensors.x[clients_C1, rows_CB]
        y_CB = tensors.y[clients_C1, rows_CB]
        if self.local.augment != "none":
            x_CB = vmap(AUGMENTATIONS[self.local.augment].apply)(x_CB, drawn_CBK)
        stacked_grad = vmap(grad_and_value(self._loss))
        with StackedLayers() if self.stacked_kernels else nullcontext():
            gradients_and_loss: tuple[Params, Tensor] = stacked_grad(
                tensors.params, tensors.buffers, tensors.carry, x_CB, y_CB, tensors.step
            )
        return gradients_and_loss

    def _loss(
        self, params: Params, buffers: Params, carry: Carry, x: Tensor, y: Tensor, step: Tensor
    ) -> Tensor:
        def forward(values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            if self.bf16:
                return self._forward_in_bf16(buffers, values, inputs)
            return self.functional_forward(buffers, self._cast_together(values), inputs)

        return self.recipe.loss(forward, params, Batch(x, y, step), carry)

    def _forward_in_bf16(
        self, buffers: Params, values: Mapping[str, Tensor], inputs: Tensor
    ) -> Tensor:
        bf16_buffers = _to_bf16(buffers)
        weights = values if self.stacked_kernels else _to_bf16(values)
        bf16_inputs = _to_bf16({"": inputs})[""]
        return self.functional_forward(bf16_buffers, weights, bf16_inputs).float()

    def _cast_together(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters with those in `cast_params` in bf16."""
        names = [name for name in self.cast_params if name in values]
        if not names:
            return {**values}
        weights = [values[name] for name in names]
        cast = _ForeachCast.apply(*weights)  # type: ignore[no-untyped-call]
        return {**values, **dict(zip(names, cast, strict=True))}

    def _sgd_update(self, tensors: StepTensors, gradients: Params) -> None:
        """Do `local_sgd.sgd_update` with the learning rate as a tensor."""
        masked = {}
        for name, gradient in gradients.items():
            masked[name] = gradient * tensors.masks[name] if name in tensors.masks else gradient
        clipped = masked if self.local.clip is None else self._clip(masked, self.local.clip)
        if self.fused:
            self._fused_update(tensors, clipped)
        else:
            self._plain_update(tensors, clipped)

    def _clip(self, gradients: Params, max_norm: float) -> Params:
        """Scale the gradients of each client down to a norm of at most `max_norm`."""
        lead = int(self.stacked)
        squares = torch.stack([g.flatten(lead).square().sum(-1) for g in gradients.values()])
        norm = squares.sum(0).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = {}
        for name, gradient in gradients.items():
            trailing_ones = [1] * (gradient.ndim - lead)
            clipped[name] = gradient * scale.view(*scale.shape, *trailing_ones)
        return clipped

    def _fused_update(self, tensors: StepTensors, gradients: Params) -> None:
        params = list(tensors.params.values())
        sgd(
            params,
            [_match_memory_format(p, gradients[name]) for name, p in tensors.params.items()],
            [tensors.velocity[name] for name in tensors.params],
            fused=True,
            foreach=False,
            lr=tensors.lr,  # type: ignore[arg-type]
            momentum=self.local.momentum,
            weight_decay=self.local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _plain_update(self, tensors: StepTensors, gradients: Params) -> None:
        # `cpu_kernels` recognises these four operations, in this order
        for name, weight in tensors.params.items():
            change = gradients[name]
            if self.local.weight_decay:
                change = change + self.local.weight_decay * weight
            tensors.velocity[name].mul_(self.local.momentum).add_(change)
            weight.sub_(tensors.velocity[name] * tensors.lr)


def _match_memory_format(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the memory format of its weight, as the fused update needs it."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


def _to_bf16(tensors: Mapping[str, Tensor]) -> Params:
    """Return the tensors in bf16, integers unchanged."""
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


class _ForeachCast(torch.autograd.Function):
    """Cast tensors to bf16, and their gradients back: one kernel each way for all of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.original_dtype = tensors[0].dtype
        return _foreach_cast(tensors, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return _foreach_cast(gradients, ctx.original_dtype)


def _foreach_cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(cast, list(tensors))
    return tuple(cast)
