"""F, the loss that all clients minimise together: its value, gradient and curvature.

F is the weighted mean of the clients' cross-entropy plus half the weight decay times the squared
length of the parameters. Clients have the weights of the run's aggregation.
"""

import copy
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
from fedcover.tensors import norm, squared_norm, zeros_like
from fedcover.types import Params, Samples

FLOAT64_MAX_PARAMS = 200_000
"""The largest model whose gradients are computed in float64 on a CPU."""

CHUNK = 1024
"""How many rows go through the model at once."""
POWER_STEPS = 20
"""The number of steps of the power iteration for the Hessian."""
HESSIAN_ROWS = 1024
"""The number of rows over which the Hessian is computed."""


@dataclass(frozen=True)
class LossEvaluation:
    """F at one model.

    `client_gradients`: the gradients of chosen clients' own losses.
    `dissimilarity`: the variance of the clients' gradients, for each parameter.
    """

    value: float
    gradient: Params
    client_gradients: dict[int, Params] = field(repr=False)
    dissimilarity: Params = field(repr=False)


@dataclass(frozen=True)
class GlobalLoss:
    """F over some or all clients, as a function of the global model's parameters.

    `rows` returns a client's training samples. `chunk` rows go through the model at once.
    """

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
        """Return the mean cross-entropy of some rows plus weight decay, and its gradient."""
        values = {
            name: tensor.detach().to(self.dtype).requires_grad_() for name, tensor in theta.items()
        }
        gradient = zeros_like(values)
        total = 0.0
        size = chunk or self.chunk
        for x, y in zip(torch.split(rows.x, size), torch.split(rows.y, size), strict=True):
            loss = self._loss(values, x, y) * (len(y) / len(rows))
            parts = torch.autograd.grad(
                loss, list(values.values()), allow_unused=True, materialize_grads=True
            )
            for total_gradient, part in zip(gradient.values(), parts, strict=True):
                total_gradient += part
            total += float(loss.detach())
        with torch.no_grad():
            for name, tensor in values.items():
                gradient[name].add_(tensor, alpha=self.decay)
        return total + self.decay / 2 * squared_norm(values.values()), gradient

    def _loss(self, values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        inputs = x.to(self.dtype) if x.is_floating_point() else x
        return F.cross_entropy(functional_call(self.module, dict(values), (inputs,)), y)

    def evaluate(self, theta: Params, keep: Iterable[int] = ()) -> LossEvaluation:
        """Evaluate F at a model; keep the gradients of the clients in `keep`."""
        kept_clients = set(keep)
        client_gradients = {}
        value = 0.0
        gradient = zeros_like(theta, self.dtype)
        sums, squares = zeros_like(theta, torch.float64), zeros_like(theta, torch.float64)
        for client, weight in self.client_weights.items():
            client_value, client_gradient = self.loss_and_gradient(theta, self.rows(client))
            value += weight * client_value
            for name, tensor in client_gradient.items():
                gradient[name].add_(tensor, alpha=weight)
                sums[name] += tensor
                squares[name] += tensor.double() ** 2
            if client in kept_clients:
                client_gradients[client] = client_gradient
        count = len(self.client_weights)
        dissimilarity = {}
        for name in theta:
            variance = squares[name] / count - (sums[name] / count) ** 2
            dissimilarity[name] = variance.clamp_min(0)
        return LossEvaluation(value, gradient, client_gradients, dissimilarity)

    @sdpa_kernel(SDPBackend.MATH)  # the fused kernels cannot be differentiated twice
    def curvature(self, theta: Params, seed: int) -> float:
        """Return the largest absolute eigenvalue of the Hessian of F on a sample of rows.

        It is computed by power iteration.
        """
        rows = self._sample_rows()
        values = {
            name: tensor.detach().to(self.dtype).requires_grad_() for name, tensor in theta.items()
        }
        random = generator(seed, "curvature")
        vector = [
            torch.randn(tensor.shape, generator=random).to(tensor.device, self.dtype)
            for tensor in values.values()
        ]
        eigenvalue = 0.0
        for _ in range(POWER_STEPS):
            length = norm(vector)
            vector = [tensor / length for tensor in vector]
            product = self._hessian_product(values, rows, vector)
            eigenvalue = norm(product)
            if not eigenvalue:
                break
            vector = product
        return eigenvalue + self.decay

    def _sample_rows(self) -> Samples:
        """Return the first rows of each client, `HESSIAN_ROWS` in total."""
        per_client = max(1, HESSIAN_ROWS // len(self.client_weights))
        samples = [self.rows(client) for client in self.client_weights]
        x = torch.cat([part.x[:per_client] for part in samples])[:HESSIAN_ROWS]
        y = torch.cat([part.y[:per_client] for part in samples])[:HESSIAN_ROWS]
        return Samples(x, y)

    def _hessian_product(
        self, values: Params, rows: Samples, vector: Sequence[Tensor]
    ) -> list[Tensor]:
        """Multiply the Hessian of the mean cross-entropy by a vector."""
        tensors = list(values.values())
        product = [torch.zeros_like(tensor) for tensor in tensors]
        x_chunks, y_chunks = torch.split(rows.x, self.chunk), torch.split(rows.y, self.chunk)
        for x, y in zip(x_chunks, y_chunks, strict=True):
            loss = self._loss(values, x, y) * (len(y) / len(rows.y))
            gradient = torch.autograd.grad(
                loss, tensors, create_graph=True, allow_unused=True, materialize_grads=True
            )
            dot_products = [(g * v).sum() for g, v in zip(gradient, vector, strict=True)]
            parts = torch.autograd.grad(
                torch.stack(dot_products).sum(), tensors, allow_unused=True, materialize_grads=True
            )
            product = [total + part for total, part in zip(product, parts, strict=True)]
        return product


def build_global_loss(setup: Setup, most: int) -> GlobalLoss:
    """Return the F of a run; if there are more than `most` clients, over evenly spaced ones."""
    task = setup.task
    clients: Sequence[int] = range(setup.experiment.clients)
    if setup.experiment.clients > most:
        clients = [k * setup.experiment.clients // most for k in range(most)]
    weight = WEIGHTS[setup.experiment.weights]
    weights = {client: weight(client_of(setup, client, 0)) for client in clients}
    total = sum(weights.values())
    module = use_batch_statistics(copy.deepcopy(task.model.module)).train()
    parameters = list(module.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    is_small = size <= FLOAT64_MAX_PARAMS and parameters[0].device.type == "cpu"
    dtype = torch.float64 if is_small else parameters[0].dtype

    def rows(client: int) -> Samples:
        shard = task.source.shard(client)
        return Samples(shard.samples.x[shard.index], shard.samples.y[shard.index])

    return GlobalLoss(
        module=module.to(dtype),
        rows=rows,
        client_weights={client: weight / total for client, weight in weights.items()},
        decay=task.local.weight_decay,
        # Batch norm makes the loss depend on the batches, so use those of training.
        chunk=task.local.batch_size if has_batch_norm(module) else CHUNK,
        dtype=dtype,
    )
