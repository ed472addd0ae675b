"""Algorithm 1 of the paper, slowly: dense masks, plain loops, one number system, nothing clever.

Everything fast in fedcover must equal this. It shares with the library only the model, the policy's
masks and the addresses of the random draws.
"""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcover.models import Scaler
from fedcover.rng import generator
from fedcover.server.round_setup import Setup
from fedcover.types import Client, Reduction, State


def reference_round(
    setup: Setup, state: State, work: list[tuple[Client, Reduction]]
) -> dict[str, Tensor]:
    """The global parameters after one round in which these clients train their masks."""
    trained = [
        (client, *train_masked(setup, state, client, reduction)) for client, reduction in work
    ]
    new: dict[str, Tensor] = {}
    for name, old in state.params.items():
        entries = []
        for i, old_value in enumerate(old.flatten().tolist()):
            total = weight = 0.0
            for client, params, masks in trained:
                if masks[name].flatten()[i]:
                    counts = float(client.samples) if setup.experiment.weights == "samples" else 1.0
                    total += counts * params[name].flatten()[i].item()
                    weight += counts
            entries.append(total / weight if weight else old_value)
        new[name] = torch.tensor(entries, dtype=old.dtype).view_as(old)
    return new


def train_masked(
    setup: Setup, state: State, client: Client, reduction: Reduction
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """T epochs of masked SGD on the dense model: theta <- theta - lr * velocity, gradients masked
    first.
    """
    task, local = setup.task, setup.task.local
    masks = reduction.mask(state.params)
    params = {name: torch.where(masks[name], p, 0.0) for name, p in state.params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    module = dense_module(task.model.module, masks, task.scaler)
    shard = task.source.shard(client.id)
    for epoch in range(local.epochs):
        order = torch.randperm(
            len(shard.index),
            generator=generator(task.seed, "shuffle", state.round, client.id, epoch),
        )
        for start in range(0, len(order), local.batch_size):
            rows = shard.index[order[start : start + local.batch_size]]
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            logits = functional_call(module, leaves, (shard.samples.x[rows],))
            chosen = torch.log_softmax(logits, 1).gather(1, shard.samples.y[rows].unsqueeze(1))
            gradients = torch.autograd.grad(-chosen.mean(), list(leaves.values()))
            gradient = {name: g * masks[name] for name, g in zip(leaves, gradients, strict=True)}
            if local.clip is not None:
                length = sum(g.square().sum() for g in gradient.values()) ** 0.5
                gradient = {
                    name: g * min(1.0, local.clip / float(length + 1e-6))
                    for name, g in gradient.items()
                }
            for name in params:
                step = gradient[name] + local.weight_decay * params[name]
                velocity[name] = local.momentum * velocity[name] + step
                params[name] = params[name] - setup.lr(state.round) * velocity[name]
    return params, masks


def dense_module(module: nn.Module, masks: dict[str, Tensor], scaler: bool) -> nn.Module:
    """The full-sized model as a masked client must run it: on batch statistics, with the scaler's
    factors.
    """
    dense = with_masked_moments(copy.deepcopy(module).train(), masks)
    for layer in dense.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            layer.track_running_stats = False
        if scaler and isinstance(layer, Scaler):
            rows = (
                masks[layer.of].flatten(1).any(1) if masks[layer.of].ndim > 1 else masks[layer.of]
            )
            layer.factor = len(rows) / int(rows.sum())
    return dense


class MaskedLayerNorm(nn.LayerNorm):
    """A layer norm of the full width whose moments are taken over the kept units only."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the kept units; the others' scale and shift are zero anyway."""
        mean = x[..., self.kept].mean(-1, keepdim=True)
        variance = x[..., self.kept].var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def with_masked_moments(module: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """The masked twin of a norm across a cut axis (changes the module, returns it)."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.LayerNorm):
            layer.__class__ = MaskedLayerNorm
            layer.kept = masks[f"{path}.weight"]
    return module
