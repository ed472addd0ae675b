"""F, what all clients minimise together, at the whole model: its value, its gradient, and every client's own.

F is the clients' mean cross-entropy, each client counting as in the run's aggregation, plus half the weight decay times
the squared length of the parameters. Suffixes: P parameters.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedcover.models.norms import has_batch_norm, use_batch_statistics
from fedcover.rng import generator
from fedcover.server.aggregation import WEIGHTS
from fedcover.server.cohort import client_of
from fedcover.server.round_setup import Setup
from fedcover.types import Params, Samples

FLOAT64_MAX_PARAMS = 200_000
"""Up to so many parameters gradients of the whole model are computed in float64 on a CPU."""

CHUNK = 1024
POWER_STEPS = 20
HESSIAN_ROWS = 1024


@dataclass(frozen=True)
class LossEvaluation:
    """F at one model: value, gradient, chosen clients' own gradients, and the variance between clients by parameter."""

    value: float
    gradient: Params
    client_gradients: dict[int, Params] = field(repr=False)
    dissimilarity: Params = field(repr=False)


@dataclass(frozen=True)
class GlobalLoss:
    """F over some clients (all, unless they are too many), as a function of the whole model's parameters."""

    module: nn.Module
    rows: Callable[[int], Samples]
    client_weights: Mapping[int, float]
    decay: float
    chunk: int
    dtype: torch.dtype

    @torch.enable_grad()
    def loss_and_gradient(
        self, theta: Params, rows: Samples, chunk: int | None = None
    ) -> tuple[float, Params]:
        """The mean cross-entropy of some rows, plus decay, and its gradient."""
        values = {
            name: tensor.detach().to(self.dtype).requires_grad_() for name, tensor in theta.items()
        }
        gradient = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        total = 0.0
        size = chunk or self.chunk
        for x, y in zip(torch.split(rows.x, size), torch.split(rows.y, size), strict=True):
            loss = self._loss(values, x, y) * (len(y) / len(rows))
            parts = torch.autograd.grad(
                loss, list(values.values()), allow_unused=True, materialize_grads=True
            )
            for sum_P, part_P in zip(gradient.values(), parts, strict=True):
                sum_P += part_P
            total += float(loss.detach())
        with torch.no_grad():
            for name, tensor in values.items():
                gradient[name].add_(tensor, alpha=self.decay)
        return total + self.decay / 2 * squared_norm(values), gradient

    def _loss(self, values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        inputs = x.to(self.dtype) if x.is_floating_point() else x
        return F.cross_entropy(functional_call(self.module, dict(values), (inputs,)), y)

    def evaluate(self, theta: Params, keep: Iterable[int] = ()) -> LossEvaluation:
        """F at a model; the gradients of the clients in `keep` are kept."""
        wanted, client_gradients = set(keep), {}
        value, gradient = 0.0, {n: torch.zeros_like(t, dtype=self.dtype) for n, t in theta.items()}
        sums = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in theta.items()}
        squares = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in theta.items()}
        for client, share in self.client_weights.items():
            its_value, its = self.loss_and_gradient(theta, self.rows(client))
            value += share * its_value
            for name, tensor in its.items():
                gradient[name].add_(tensor, alpha=share)
                sums[name] += tensor
                squares[name] += tensor.double() ** 2
            if client in wanted:
                client_gradients[client] = its
        count = len(self.client_weights)
        dissimilarity = {
            n: (squares[n] / count - (sums[n] / count) ** 2).clamp_min(0) for n in theta
        }
        return LossEvaluation(value, gradient, client_gradients, dissimilarity)

    @sdpa_kernel(SDPBackend.MATH)  # the fused ones cannot be differentiated twice
    def curvature(self, theta: Params, seed: int) -> float:
        """The largest eigenvalue (by size) of F's Hessian on a sample of rows, by power iteration."""
        each = max(1, HESSIAN_ROWS // len(self.client_weights))
        parts = [self.rows(client) for client in self.client_weights]
        x = torch.cat([part.x[:each] for part in parts])[:HESSIAN_ROWS]
        y = torch.cat([part.y[:each] for part in parts])[:HESSIAN_ROWS]
        values = [tensor.detach().to(self.dtype).requires_grad_() for tensor in theta.values()]
        draw = generator(seed, "curvature")
        vector = [torch.randn(v.shape, generator=draw).to(v.device, self.dtype) for v in values]
        found = 0.0
        for _ in range(POWER_STEPS):
            length = _norm(vector)
            vector = [v / length for v in vector]
            product = [torch.zeros_like(v) for v in values]
            for some_x, some_y in zip(
                torch.split(x, self.chunk), torch.split(y, self.chunk), strict=True
            ):
                loss = self._loss(dict(zip(theta, values, strict=True)), some_x, some_y) * (
                    len(some_y) / len(y)
                )
                slope = torch.autograd.grad(
                    loss, values, create_graph=True, allow_unused=True, materialize_grads=True
                )
                pull = torch.stack(
                    [(s * v).sum() for s, v in zip(slope, vector, strict=True)]
                ).sum()
                parts_P = torch.autograd.grad(
                    pull, values, allow_unused=True, materialize_grads=True
                )
                product = [p + part for p, part in zip(product, parts_P, strict=True)]
            found = _norm(product)
            if not found:
                break
            vector = product
        return found + self.decay


def build_global_loss(setup: Setup, most: int) -> GlobalLoss:
    """The run's F; where there are more than `most` clients, over evenly spaced ones."""
    task = setup.task
    ids = range(setup.clients)
    chosen = ids if setup.clients <= most else [ids[k * setup.clients // most] for k in range(most)]
    weight = WEIGHTS[setup.weights]
    weights = {id: weight(client_of(setup, id, 0)) for id in chosen}
    total = sum(weights.values())
    module = use_batch_statistics(copy.deepcopy(task.model.module)).train()
    parameters = list(module.parameters())
    size = sum(p.numel() for p in parameters)
    precise = size <= FLOAT64_MAX_PARAMS and parameters[0].device.type == "cpu"
    dtype = torch.float64 if precise else parameters[0].dtype

    def rows(client: int) -> Samples:
        shard = task.source.shard(client)
        return Samples(shard.samples.x[shard.index], shard.samples.y[shard.index])

    return GlobalLoss(
        module.to(dtype), rows, {id: w / total for id, w in weights.items()}, task.local.weight_decay,
        task.local.batch_size if has_batch_norm(module) else CHUNK, dtype,
    )  # fmt: skip


def squared_norm(tensors: Mapping[str, Tensor], where: Mapping[str, Tensor] | None = None) -> float:
    """The squared length of tensors together, or of their entries at some places."""
    parts = (
        t.detach() if where is None else t.detach()[where[name]] for name, t in tensors.items()
    )
    return float(sum(part.double().square().sum() for part in parts))


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))
