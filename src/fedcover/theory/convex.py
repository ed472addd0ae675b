"""Softmax regression with l2: constants that are proved, not estimated, and the optimum to any precision.

F(W) = mean cross-entropy of softmax(W x) + decay/2 |W|^2. One sample's Hessian is (diag(p) - p p') (x) x x', and the
largest eigenvalue of diag(p) - p p' is at most 1/2. Suffixes: B rows, D features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HISTORY = 30
SLACK = 1 + 1e-9
"""So that rounding makes no bound too small."""


@dataclass(frozen=True)
class ConvexConstants:
    """Upper bounds of the theorems' constants, for every model, every batch and every client."""

    smoothness: float
    """Of every client's loss."""
    batch_smoothness: float
    """Of the loss of any batch."""
    gradient: float
    """Of the squared gradient of any rows, wherever training can lead from the first model."""
    variance: float
    """Of the gradient of a batch around its client's own."""
    dissimilarity: float
    """Of the squared distance of a client's gradient from the mean of all."""


def convex_constants(
    clients: list[Tensor],
    start: Tensor,
    *,
    bias: bool,
    decay: float,
    batch_size: int,
    decay_contracts: bool,
) -> ConvexConstants:
    """From the clients' inputs (one tensor of rows each) and the first weights, the bias as their last column.

    `decay_contracts`: steps have no momentum and decay times the learning rate is at most 1, so that decay holds weights back.

    >>> ones = torch.ones(4, 3)
    >>> round(convex_constants([ones], torch.zeros(2, 3), bias=False, decay=0.1, batch_size=4, decay_contracts=True).smoothness, 6)
    1.6
    """
    inputs = [append_bias_column(x, bias) for x in clients]
    moments = [x_BD.T @ x_BD / len(x_BD) for x_BD in inputs]
    smoothness = max(float(torch.linalg.eigvalsh(moment)[-1]) for moment in moments)
    longest = max(float(x_BD.square().sum(1).max()) for x_BD in inputs)
    largest_D = torch.stack([x_BD.abs().amax(0) for x_BD in inputs]).amax(0)
    # a parameter is pulled by at most |x_d| <= largest_d and pushed back by decay: it stays below largest_d / decay
    pushed = torch.maximum(largest_D.expand_as(start), decay * start.abs())
    pulled = math.sqrt(2 * longest) + (float(pushed.square().sum()) ** 0.5 if decay else 0.0)
    whole = all(len(x_BD) <= batch_size for x_BD in inputs)
    any_rows = smoothness if whole else longest
    return ConvexConstants(
        smoothness=(decay + smoothness / 2) * SLACK, batch_smoothness=(decay + any_rows / 2) * SLACK,
        gradient=pulled**2 if decay_contracts or not decay else math.inf,
        variance=0.0 if whole else 2 * longest / batch_size, dissimilarity=2 * longest,
    )  # fmt: skip


def append_bias_column(x: Tensor, bias: bool) -> Tensor:
    """Rows of features in float64, with a 1 for the bias."""
    x_BD = x.flatten(1).double()
    return torch.cat([x_BD, torch.ones_like(x_BD[:, :1])], dim=1) if bias else x_BD


@dataclass(frozen=True)
class Optimum:
    """Where a strongly convex loss is least: the best point found, its loss, and a loss that none can go below."""

    point: Tensor
    value: float
    least: float
    gradient: float
    """The squared gradient that is left at the point."""


def minimise(
    loss: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, decay: float, limit: int = 2000
) -> Optimum:
    """L-BFGS until the gradient has vanished; strong convexity turns what is left of it into a lower bound.

    >>> found = minimise(lambda x: (float((x**2).sum()), 2 * x), torch.ones(2, dtype=torch.float64), decay=2.0)
    >>> round(found.value, 12), found.value - found.least < 1e-12
    (0.0, True)
    """
    point = start.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [point], max_iter=limit, max_eval=2 * limit, history_size=HISTORY, tolerance_grad=1e-11,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        value, gradient = loss(point.detach())
        point.grad = gradient
        return torch.tensor(value, dtype=torch.float64)

    solver.step(closure)  # type: ignore[no-untyped-call]
    value, gradient = loss(point.detach())
    left = float(gradient.square().sum())
    return Optimum(point.detach(), value, value - left / (2 * decay), left)
