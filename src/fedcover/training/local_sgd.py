"""Local training of one client's sub-model: plain, readable SGD, the specification of every engine."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcover.data.augment import AUGMENTATIONS
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.models.norms import running, statistics_key, use_batch_statistics
from fedcover.rng import generator, seeded
from fedcover.submodels.build import submodel
from fedcover.submodels.partial_params import merge_params
from fedcover.submodels.reductions import TrainedSubset
from fedcover.types import (
    Assignment,
    Batch,
    Carry,
    Client,
    Forward,
    LocalTraining,
    Outcome,
    Params,
    Reduction,
    State,
    Task,
    Update,
)


def train_client(
    task: Task, state: State, client: Client, reduction: Reduction, lr: float
) -> Update:
    """Send a client its part of the model, train it there by the task's recipe, and bring back what it made of it."""
    assignment = Assignment(task, state, client, reduction)
    part = client_module(assignment)
    params = {name: p.detach() for name, p in part.named_parameters()}
    carry = task.recipe.start(assignment, params)

    def forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(part, dict(values), (x,))  # type: ignore[no-any-return]

    try:
        with seeded(
            task.seed, "forward", state.round, client.id
        ):  # a model may draw in its forward pass: dropout
            params, carry, loss = train(assignment, forward, params, carry, lr)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InvalidValue(
            f"batch_size {task.local.batch_size} leaves client {client.id} a batch of one sample, of which batch norm "
            "can take no statistics; choose another batch_size, or norm = 'group'"
        ) from error
    finite = torch.stack([p.isfinite().all() for p in params.values()]).all()
    check_divergence(assignment, bool(finite), loss, lr)
    outcome = task.recipe.finish(assignment, forward, params, carry)
    return build_update(assignment, part, outcome, loss)


def client_module(assignment: Assignment) -> nn.Module:
    """The client's sub-model in training mode, with the running statistics of its width if those are tracked."""
    task, state = assignment.task, assignment.state
    key = statistics_key(task.norm, assignment.client.capacity)
    known = state.statistics.get(key, {}) if key else {}
    values = merge_params(state.params, known)
    part = submodel(task.model.module, assignment.reduction, values, scaler=task.scaler)
    return (use_batch_statistics(part) if key is None else part).train()


def check_divergence(assignment: Assignment, finite: bool, loss: float, lr: float) -> None:
    """Stop a run in which a client's weights or loss are no longer numbers."""
    if not finite or not math.isfinite(loss):
        raise TrainingDiverged(
            f"training diverged in round {assignment.state.round} (counted from 0) at client {assignment.client.id}: a "
            f"loss or weight is not finite (learning rate {lr:g}; try a smaller one, or clip)"
        )


def build_update(assignment: Assignment, part: nn.Module, outcome: Outcome, loss: float) -> Update:
    """What the client sends back."""
    task, client, reduction = assignment.task, assignment.client, assignment.reduction
    undeclared = sorted(outcome.measured.keys() - task.recipe.measures.keys())
    if undeclared:
        raise InvalidValue(f"recipe measures {undeclared[0]!r}, which its `measures` do not name")
    trained = TrainedSubset(reduction, outcome.bits) if outcome.bits else reduction
    kept = statistics_key(task.norm, client.capacity)
    buffers = {name: tensor.clone() for name, tensor in running(part).items()} if kept else {}
    private = {
        name: tensor.clone() for name, tensor in outcome.private.items()
    }  # it must not keep others' in memory
    return Update(
        client, reduction, trained, outcome.params, buffers, outcome.measured, private, loss
    )


def train(
    assignment: Assignment, forward: Forward, params: Params, carry: Carry, lr: float
) -> tuple[Params, Carry, float]:
    """Epochs of SGD with momentum on a client's rows; also gives the mean loss of the last epoch.

    Gradients are masked before clipping, decay and momentum see them, so that a cut weight stays cut.
    """
    task, local = assignment.task, assignment.task.local
    shard = task.source.shard(assignment.client.id)
    masks = assignment.reduction.gradient_mask()
    augment = AUGMENTATIONS[local.augment]
    weights = {name: p.clone().requires_grad_() for name, p in params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    losses: list[Tensor] = []
    step = torch.zeros((), dtype=torch.int64, device=shard.index.device)
    for epoch in range(local.epochs):
        order_N, drawn_NK = (
            plan.to(step.device) for plan in draw_row_order(assignment, len(shard.index), epoch)
        )
        losses = []
        for places_B in torch.split(order_N, local.batch_size):
            rows_B = shard.index[places_B]
            x = augment.apply(shard.samples.x[rows_B], drawn_NK[places_B])
            batch = Batch(x, shard.samples.y[rows_B], step)
            loss = task.recipe.loss(forward, weights, batch, carry)
            gradients = torch.autograd.grad(
                loss, list(weights.values()), allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                gradient = dict(zip(weights, gradients, strict=True))
                carry = task.recipe.observe(carry, gradient)
                gradient = {
                    name: g * masks[name] if name in masks else g for name, g in gradient.items()
                }
                sgd_update(weights, gradient, velocity, local, lr)
            del gradient, gradients  # the next ones need their memory
            losses.append(loss.detach())
            step = step + 1
    return (
        {name: p.detach() for name, p in weights.items()},
        carry,
        float(torch.stack(losses).mean()),
    )


def draw_row_order(assignment: Assignment, rows: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The order in which a client goes through its rows in an epoch, and what is drawn to augment each row."""
    task = assignment.task
    address = (assignment.state.round, assignment.client.id, epoch)
    order_N = torch.randperm(rows, generator=generator(task.seed, "shuffle", *address))
    draw = AUGMENTATIONS[task.local.augment].draw
    return order_N, draw(rows, generator(task.seed, "augment", *address))


def sgd_update(
    weights: Params, gradient: Params, velocity: Params, local: LocalTraining, lr: float
) -> None:
    """One step of SGD in place: clip, decay, momentum."""
    if local.clip is not None:
        length = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
        )
        scale = (local.clip / (length + 1e-6)).clamp(max=1.0)
        gradient = {name: g * scale for name, g in gradient.items()}
    for name, weight in weights.items():
        change = (
            gradient[name].add(weight, alpha=local.weight_decay)
            if local.weight_decay
            else gradient[name]
        )
        velocity[name].mul_(local.momentum).add_(change)
        weight.sub_(velocity[name], alpha=lr)
