"""One compiled step for all clients that share shapes: their parameters are stacked, and `vmap` runs them together.

Masked clients always share shapes, sliced ones do by width. What cannot run together (a recipe that remembers more than
tensors, augmentation, dropout, tracked statistics) is trained by `sequential`, and one line of the log says so.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.sequential import sequential
from fedcover.norms import statistics_key
from fedcover.rng import generator
from fedcover.training import client_module, update_of
from fedcover.types import Assignment, Batch, Client, LocalTraining, Params, Recipe, Reduction, State, Task, Update

log = logging.getLogger("fedcover")
Step = Callable[[Params, Params, Mapping[str, Tensor], Tensor, Tensor, Tensor], Tensor]
_STEPS: WeakKeyDictionary[nn.Module, dict[object, Step]] = WeakKeyDictionary()
"""Compiled steps of each global model, by the shapes of the sub-model: rounds and capacities reuse them."""

_SAID: set[str] = set()


@dataclass(frozen=True, eq=False)
class Together:
    """Clients with the same shapes: stacked data [C, n, ...], stacked masks, and the assignments themselves."""

    assignments: Sequence[Assignment]
    modules: Sequence[nn.Module]
    x_CN: Tensor
    y_CN: Tensor


def batched(
    task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float, *, compiled: bool = True
) -> Iterator[Update]:
    """Train clients of equal shapes together; what cannot run together one after another."""
    reason = _why_not(task)
    if reason:
        _say(f"{reason}, so clients are trained one after another")
        yield from sequential(task, state, work, lr)
        return
    alike: dict[object, list[Assignment]] = defaultdict(list)
    for client, reduction in work:
        rows = len(task.source.shard(client.id).index)
        sizes = tuple(sorted((name, tuple(t.shape)) for name, t in _part_shapes(reduction, state.params).items()))
        masked = tuple(sorted(reduction.gradient_mask()))
        alike[sizes, masked, rows].append(Assignment(task, state, client, reduction))
    for key, assignments in alike.items():
        yield from _train_together(_gathered(assignments), key, lr, compiled)


def _part_shapes(reduction: Reduction, params: Params) -> Params:
    return reduction.extract({name: p.to("meta") for name, p in params.items()})


def _why_not(task: Task) -> str | None:
    """What about a task keeps its clients from running together, if anything does."""
    layers = list(task.model.module.modules())
    reasons = {
        "the recipe is not plain": not task.recipe.together,
        "augmentation draws for each client": task.local.augment != "none",
        "dropout draws for each client": any(isinstance(layer, nn.Dropout) for layer in layers),
        "norm statistics are tracked": statistics_key(task.norm, 1.0) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _gathered(assignments: Sequence[Assignment]) -> Together:
    shards = [a.task.source.shard(a.client.id) for a in assignments]
    return Together(
        assignments,
        [client_module(a) for a in assignments],
        torch.stack([shard.samples.x[shard.index] for shard in shards]),
        torch.stack([shard.samples.y[shard.index] for shard in shards]),
    )


def _train_together(group: Together, key: object, lr: float, compiled: bool) -> Iterator[Update]:
    """The same epochs, batches and steps as `training.train`, for all clients of a group at once."""
    task = group.assignments[0].task
    first, local = group.modules[0], task.local
    params = {
        name: torch.stack([m.get_parameter(name).detach() for m in group.modules])
        for name, _ in first.named_parameters()
    }
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    masks = {
        name: torch.stack([a.reduction.gradient_mask()[name] for a in group.assignments])
        for name in group.assignments[0].reduction.gradient_mask()
    }
    eager = partial(_step, task.recipe, local, first)
    fast = _compiled(task, first, (key, len(group.modules), local, task.recipe)) if compiled else eager
    rate = torch.tensor(lr, dtype=next(iter(params.values())).dtype, device=group.x_CN.device)
    clients_C1 = torch.arange(len(group.modules), device=group.x_CN.device)[:, None]
    losses: list[Tensor] = []
    for epoch in range(local.epochs):
        order_CN = torch.stack([_order(a, epoch) for a in group.assignments]).to(group.x_CN.device)
        losses = []
        for rows_CB in torch.split(order_CN, local.batch_size, dim=1):
            step = fast if rows_CB.shape[1] == local.batch_size else eager  # a rest is not worth compiling
            losses.append(
                step(params, velocity, masks, group.x_CN[clients_C1, rows_CB], group.y_CN[clients_C1, rows_CB], rate)
            )
    mean_C = torch.stack(losses).mean(0).tolist()
    for place, assignment in enumerate(group.assignments):
        own = {name: p[place].clone() for name, p in params.items()}
        outcome = task.recipe.finish(_no_forward, own, None)
        yield update_of(assignment, group.modules[place], outcome, mean_C[place], lr)


def _order(assignment: Assignment, epoch: int) -> Tensor:
    rows = len(assignment.task.source.shard(assignment.client.id).index)
    address = (assignment.state.round, assignment.client.id, epoch)
    return torch.randperm(rows, generator=generator(assignment.task.seed, "shuffle", *address))


def _no_forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    raise AssertionError("recipes that run together do not look back")


def _step(
    recipe: Recipe,
    local: LocalTraining,
    module: nn.Module,
    params: Params,
    velocity: Params,
    masks: Mapping[str, Tensor],
    x_CB: Tensor,
    y_CB: Tensor,
    lr: Tensor,
) -> Tensor:
    """One step of SGD of all clients, in place; gives their losses."""

    def forward(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, dict(own), (x,))  # type: ignore[no-any-return]

    def loss(own: Params, x: Tensor, y: Tensor) -> Tensor:
        return recipe.loss(forward, own, Batch(x, y, 0), None)

    gradients, found = vmap(grad_and_value(loss))(params, x_CB, y_CB)
    losses_C: Tensor = found
    gradients = {name: g * masks[name] if name in masks else g for name, g in gradients.items()}
    if local.clip is not None:
        length_C = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        scale_C = (local.clip / (length_C + 1e-6)).clamp(max=1.0)
        gradients = {name: g * scale_C.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}
    for name, weight in params.items():
        change = gradients[name] + local.weight_decay * weight if local.weight_decay else gradients[name]
        velocity[name].mul_(local.momentum).add_(change)
        weight.sub_(velocity[name] * lr)
    return losses_C


def _compiled(task: Task, module: nn.Module, key: object) -> Step:
    """The compiled step for these shapes; made once for a model and kept as long as it lives."""
    steps = _STEPS.setdefault(task.model.module, {})
    if key not in steps:
        eager = partial(_step, task.recipe, task.local, module)
        steps[key] = _or_eager(torch.compile(eager, dynamic=False), eager)
    return steps[key]


def _or_eager(fast: Step, eager: Step) -> Step:
    """The fast step, or the eager one from the first call on which compiling fails (no compiler, say)."""
    failed: list[bool] = []

    def step(*args: Any) -> Tensor:
        if not failed:
            try:
                return fast(*args)
            except RuntimeError as error:  # torch's compiler raises before anything is computed
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                failed.append(True)
                _say(f"the step cannot be compiled ({type(error).__name__}), so it runs uncompiled")
        return eager(*args)

    return step


def _say(reason: str) -> None:
    if reason not in _SAID:
        _SAID.add(reason)
        log.warning("batched: %s", reason)
