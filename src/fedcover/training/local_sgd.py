"""Local training of one client: plain, readable SGD, and the specification of every engine."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcover.data.augment import AUGMENTATIONS
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.models.norms import running_statistics, statistics_key, use_batch_statistics
from fedcover.rng import generator, seeded
from fedcover.submodels.build import submodel
from fedcover.submodels.partial_params import merge_params
from fedcover.submodels.reductions import TrainedSubset
from fedcover.tensors import clone, zeros_like
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
    """Train one client's part of the global model by the task's recipe.

    Args:
        task: What all clients have in common.
        state: The global model.
        client: The client.
        reduction: The client's part of the model.
        lr: The learning rate.

    Raises:
        InvalidValue: If batch norm gets a batch of one sample.
        TrainingDiverged: If a loss or a weight is not finite.
    """
    assignment = Assignment(task, state, client, reduction)
    module = client_module(assignment)
    params = {name: p.detach() for name, p in module.named_parameters()}
    carry = task.recipe.start(assignment, params)

    def forward(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, dict(values), (x,))  # type: ignore[no-any-return]

    try:
        # the forward pass may draw random numbers (dropout)
        with seeded(task.seed, "forward", state.round, client.id):
            params, carry, loss = train(assignment, forward, params, carry, lr)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InvalidValue(
            f"batch_size {task.local.batch_size} leaves client {client.id} a batch of one sample, "
            "for which batch norm has no statistics; choose another batch_size, or norm = 'group'"
        ) from error
    finite = torch.stack([p.isfinite().all() for p in params.values()]).all()
    check_divergence(assignment, bool(finite), loss, lr)
    outcome = task.recipe.finish(assignment, forward, params, carry)
    return build_update(assignment, module, outcome, loss)


def client_module(assignment: Assignment) -> nn.Module:
    """Return the client's sub-model in training mode, with tracked statistics of its width."""
    task, state = assignment.task, assignment.state
    key = statistics_key(task.norm, assignment.client.capacity)
    statistics = state.statistics.get(key, {}) if key else {}
    values = merge_params(state.params, statistics)
    module = submodel(task.model.module, assignment.reduction, values, scaler=task.scaler)
    if key is None:
        module = use_batch_statistics(module)
    return module.train()


def check_divergence(assignment: Assignment, finite: bool, loss: float, lr: float) -> None:
    """Check that a client's weights and loss are finite.

    Raises:
        TrainingDiverged: If they are not.
    """
    if finite and math.isfinite(loss):
        return
    raise TrainingDiverged(
        f"training diverged in round {assignment.state.round} (counted from 0) at client "
        f"{assignment.client.id}: a loss or weight is not finite (learning rate {lr:g}; try a "
        "smaller one, or clip)"
    )


def build_update(
    assignment: Assignment, module: nn.Module, outcome: Outcome, loss: float
) -> Update:
    """Build what the client sends back.

    Raises:
        InvalidValue: If the recipe measured something that it does not declare.
    """
    task, client, reduction = assignment.task, assignment.client, assignment.reduction
    undeclared = sorted(outcome.measured.keys() - task.recipe.measures.keys())
    if undeclared:
        raise InvalidValue(f"recipe measures {undeclared[0]!r}, which its `measures` do not name")
    tracks_statistics = bool(statistics_key(task.norm, client.capacity))
    buffers = running_statistics(module) if tracks_statistics else {}
    return Update(
        client=client,
        sent=reduction,
        trained=TrainedSubset(reduction, outcome.bits) if outcome.bits else reduction,
        params=outcome.params,
        buffers=clone(buffers),
        measured=outcome.measured,
        private=clone(outcome.private),  # views would keep the tensors of other clients alive
        loss=loss,
    )


def train(
    assignment: Assignment, forward: Forward, params: Params, carry: Carry, lr: float
) -> tuple[Params, Carry, float]:
    """Run epochs of SGD with momentum on a client's rows.

    Gradients are masked before clipping, decay and momentum see them, so a cut weight stays cut.

    Args:
        assignment: The client and its task.
        forward: The client's sub-model as a function.
        params: Its initial parameters.
        carry: What the recipe remembers at first.
        lr: The learning rate.

    Returns:
        The trained parameters, what the recipe remembers, and the mean loss of the last epoch.
    """
    task, local = assignment.task, assignment.task.local
    shard = task.source.shard(assignment.client.id)
    masks = assignment.reduction.gradient_mask()
    augment = AUGMENTATIONS[local.augment]
    weights = {name: p.clone().requires_grad_() for name, p in params.items()}
    velocity = zeros_like(params)
    losses: list[Tensor] = []
    step = torch.zeros((), dtype=torch.int64, device=shard.index.device)
    for epoch in range(local.epochs):
        order_N, drawn_NK = draw_row_order(assignment, len(shard.index), epoch)
        order_N, drawn_NK = order_N.to(step.device), drawn_NK.to(step.device)
        losses = []
        for positions_B in torch.split(order_N, local.batch_size):
            rows_B = shard.index[positions_B]
            x = augment.apply(shard.samples.x[rows_B], drawn_NK[positions_B])
            batch = Batch(x, shard.samples.y[rows_B], step)
            loss = task.recipe.loss(forward, weights, batch, carry)
            gradients = _compute_gradients(loss, weights)
            with torch.no_grad():
                carry = task.recipe.observe(carry, gradients)
                gradients = _apply_masks(gradients, masks)
                sgd_update(weights, gradients, velocity, local, lr)
            del gradients  # the next step needs the memory
            losses.append(loss.detach())
            step = step + 1
    trained = {name: p.detach() for name, p in weights.items()}
    return trained, carry, float(torch.stack(losses).mean())


def _compute_gradients(loss: Tensor, weights: Params) -> Params:
    gradients = torch.autograd.grad(
        loss, list(weights.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(weights, gradients, strict=True))


def _apply_masks(gradients: Params, masks: Mapping[str, Tensor]) -> Params:
    return {name: g * masks[name] if name in masks else g for name, g in gradients.items()}


def draw_row_order(assignment: Assignment, rows: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Draw the row order of one epoch, and the random numbers that augment each row."""
    task = assignment.task
    stream = (assignment.state.round, assignment.client.id, epoch)
    order_N = torch.randperm(rows, generator=generator(task.seed, "shuffle", *stream))
    draw = AUGMENTATIONS[task.local.augment].draw
    return order_N, draw(rows, generator(task.seed, "augment", *stream))


def sgd_update(
    weights: Params, gradients: Params, velocity: Params, local: LocalTraining, lr: float
) -> None:
    """Do one step of SGD in place: clip, decay, momentum."""
    if local.clip is not None:
        gradients = _clip(gradients, local.clip)
    for name, weight in weights.items():
        change = gradients[name]
        if local.weight_decay:
            change = change.add(weight, alpha=local.weight_decay)
        velocity[name].mul_(local.momentum).add_(change)
        weight.sub_(velocity[name], alpha=lr)


def _clip(gradients: Params, max_norm: float) -> Params:
    """Scale gradients down to a total norm of at most `max_norm`.

    Unlike `tensors.norm`, this one computes in the gradients' dtype, as PyTorch's own clipping
    does, and never waits for a GPU: it is part of every step.
    """
    norms = [torch.linalg.vector_norm(g) for g in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return {name: g * scale for name, g in gradients.items()}
