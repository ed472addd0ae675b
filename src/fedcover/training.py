"""Local training of one client's sub-model: plain, readable SGD, the specification of every engine."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover.augment import AUGMENTATIONS
from fedcover.errors import TrainingDiverged
from fedcover.norms import on_batch_statistics, running, statistics_key
from fedcover.rng import generator
from fedcover.submodel import submodel
from fedcover.types import Client, LocalTraining, Reduction, Shard, State, Task, Update


def train_client(task: Task, state: State, client: Client, reduction: Reduction, lr: float) -> Update:
    """Send a client its part of the model, train it there, and bring it back."""
    key = statistics_key(task.norm, client.capacity)
    known = state.statistics.get(key, {}) if key else {}
    part = submodel(task.model.module, reduction, {**state.params, **known}, scaler=task.scaler)
    if key is None:
        on_batch_statistics(part)
    draw = (task.seed, state.round, client.id)
    loss = train(part, task.source.shard(client.id), task.local, lr, reduction.gradient_mask(), draw)
    params = {name: p.detach() for name, p in part.named_parameters()}
    if not math.isfinite(loss) or not all(bool(p.isfinite().all()) for p in params.values()):
        raise TrainingDiverged(
            f"training diverged in round {state.round} at client {client.id}: a loss or weight is not finite "
            f"(learning rate {lr:g}; try a smaller one, or clip)"
        )
    return Update(client, reduction, params, running(part) if key else {}, loss)


def train(
    module: nn.Module,
    shard: Shard,
    local: LocalTraining,
    lr: float,
    gradient_mask: Mapping[str, Tensor],
    draw: tuple[int, int, int],
) -> float:
    """Epochs of SGD on a client's rows; returns the mean loss of the last epoch.

    Gradients are masked before clipping, momentum and decay see them, so that a cut weight stays cut.
    """
    seed, round, client = draw
    samples, rows = shard.samples, shard.index
    augment = AUGMENTATIONS[local.augment]
    masked = [(module.get_parameter(name), bits) for name, bits in gradient_mask.items()]
    weights = list(module.parameters())
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=local.momentum, weight_decay=local.weight_decay)
    module.train()
    losses: list[Tensor] = []
    for epoch in range(local.epochs):
        order = torch.randperm(len(rows), generator=generator(seed, "shuffle", round, client, epoch))
        noise = generator(seed, "augment", round, client, epoch)
        losses = []
        for batch in torch.split(rows[order.to(rows.device)], local.batch_size):
            loss = F.cross_entropy(module(augment(samples.x[batch], noise)), samples.y[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for weight, bits in masked:
                assert weight.grad is not None
                weight.grad.mul_(bits)
            if local.clip is not None:
                nn.utils.clip_grad_norm_(weights, local.clip)
            optimizer.step()
            losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def constant(round: int, rounds: int) -> float:
    """The same learning rate in every round."""
    return 1.0


def cosine(round: int, rounds: int) -> float:
    """Half a cosine from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * round / rounds))


def steps(round: int, rounds: int, *, at: list[int], factor: float = 0.1) -> float:
    """Multiplied by `factor` at each of the given rounds.

    >>> steps(7, 10, at=[5, 8])
    0.1
    """
    return float(factor ** sum(round >= milestone for milestone in at))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "steps": steps}
