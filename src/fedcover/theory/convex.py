"""Softmax regression with weight decay: proved constants, and the optimum to any precision.

F(W) = mean cross-entropy of softmax(W x) + decay/2 |W|^2. The Hessian of one sample is
(diag(p) - p p') (x) x x', and the largest eigenvalue of diag(p) - p p' is at most 1/2.

Suffixes of tensors: B rows, D features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HISTORY = 30
"""The number of steps that L-BFGS remembers."""
SLACK = 1 + 1e-9
"""A factor that keeps rounding from making a bound too small."""


@dataclass(frozen=True)
class ConvexConstants:
    """Upper bounds of the theorems' constants for every model, every batch and every client."""

    smoothness: float
    """L of every client's loss."""
    batch_smoothness: float
    """L of the loss of any batch."""
    gradient: float
    """The squared gradient of any rows, at every model that training can reach."""
    variance: float
    """The variance of batch gradients around their client's gradient."""
    dissimilarity: float
    """The squared distance of a client's gradient from the mean of all clients'."""


def convex_constants(
    clients: list[Tensor],
    start: Tensor,
    *,
    bias: bool,
    decay: float,
    batch_size: int,
    decay_contracts: bool,
) -> ConvexConstants:
    """Bound the constants of softmax regression.

    Args:
        clients: each client's inputs, one row per sample.
        start: the initial weights, with the bias as their last column.
        bias: whether there is a bias.
        decay: the weight decay.
        batch_size: the size of a batch.
        decay_contracts: whether decay limits the weights: there is no momentum, and decay times the
            learning rate is at most 1.

    >>> inputs, start = [torch.ones(4, 3)], torch.zeros(2, 3)
    >>> options = {"bias": False, "decay": 0.1, "batch_size": 4, "decay_contracts": True}
    >>> round(convex_constants(inputs, start, **options).smoothness, 6)
    1.6
    """
    inputs = [append_bias_column(x, bias) for x in clients]
    moments = [x_BD.T @ x_BD / len(x_BD) for x_BD in inputs]
    largest_eigenvalue = max(float(torch.linalg.eigvalsh(moment)[-1]) for moment in moments)
    largest_square = max(float(x_BD.square().sum(1).max()) for x_BD in inputs)
    full_batches = all(len(x_BD) <= batch_size for x_BD in inputs)
    largest_of_batch = largest_eigenvalue if full_batches else largest_square
    gradient_norm = math.sqrt(2 * largest_square)
    if decay:
        # The loss moves a weight by at most |x_d| <= largest_d per unit of learning rate, and decay
        # moves it back. So |weight| stays below largest_d / decay, or below its initial value.
        largest_D = torch.stack([x_BD.abs().amax(0) for x_BD in inputs]).amax(0)
        largest_decay = torch.maximum(largest_D.expand_as(start), decay * start.abs())
        gradient_norm += float(largest_decay.square().sum()) ** 0.5
    return ConvexConstants(
        smoothness=(decay + largest_eigenvalue / 2) * SLACK,
        batch_smoothness=(decay + largest_of_batch / 2) * SLACK,
        gradient=gradient_norm**2 if decay_contracts or not decay else math.inf,
        variance=0.0 if full_batches else 2 * largest_square / batch_size,
        dissimilarity=2 * largest_square,
    )


def append_bias_column(x: Tensor, bias: bool) -> Tensor:
    """Return rows of features in float64; with `bias`, each ends with a 1."""
    x_BD = x.flatten(1).double()
    return torch.cat([x_BD, torch.ones_like(x_BD[:, :1])], dim=1) if bias else x_BD


@dataclass(frozen=True)
class Optimum:
    """The minimum of a strongly convex loss."""

    point: Tensor
    """The best point found."""
    value: float
    """The loss at this point."""
    least: float
    """A lower bound of the loss at any point."""
    gradient: float
    """The squared length of the gradient at this point."""


def minimise(
    loss: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, decay: float, limit: int = 2000
) -> Optimum:
    """Minimise a strongly convex loss with L-BFGS until its gradient has vanished.

    Strong convexity turns the remaining gradient into a lower bound of the loss.

    Args:
        loss: returns the loss at a point and its gradient.
        start: where to begin.
        decay: the constant of strong convexity.
        limit: the largest number of iterations.

    >>> start = torch.ones(2, dtype=torch.float64)
    >>> optimum = minimise(lambda x: (float((x**2).sum()), 2 * x), start, decay=2.0)
    >>> round(optimum.value, 12), optimum.value - optimum.least < 1e-12
    (0.0, True)
    """
    point = start.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [point],
        max_iter=limit,
        max_eval=2 * limit,
        history_size=HISTORY,
        tolerance_grad=1e-11,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value, gradient = loss(point.detach())
        point.grad = gradient
        return torch.tensor(value, dtype=torch.float64)

    solver.step(closure)  # type: ignore[no-untyped-call]
    value, gradient = loss(point.detach())
    squared_gradient = float(gradient.square().sum())
    least = value - squared_gradient / (2 * decay)
    return Optimum(point.detach(), value, least, squared_gradient)
