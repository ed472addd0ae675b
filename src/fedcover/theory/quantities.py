"""What the theorems speak of: constants of the problem, what the masks of a round say, and a bound in named terms.

A round's figures concern the parameters that some client holds in it; the others do not move. `inverse_coverage` of client n is
the largest weight with which it counts for any parameter it holds: 1/Gamma_(n) if all clients count the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LocalSteps:
    """T local steps of SGD with momentum mu that starts afresh in every round.

    >>> LocalSteps(300).total, LocalSteps(3, momentum=0.5).shares.tolist()
    (300.0, [1.75, 1.5, 1.0])
    """

    count: int
    momentum: float = 0.0

    @cached_property
    def shares(self) -> np.ndarray:
        """c_j: how much gradient j counts in the end."""
        left_T = np.arange(self.count, 0, -1)
        return np.asarray((1 - self.momentum**left_T) / (1 - self.momentum))

    @property
    def total(self) -> float:
        """S, the sum of all c_j: T without momentum."""
        return float(self.shares.sum())

    @property
    def squares(self) -> float:
        """The sum of c_j^2, over S: 1 without momentum."""
        return float((self.shares**2).sum()) / self.total

    @cached_property
    def drift(self) -> float:
        """How far T steps of unit length lead away at most: the mean of squared distances, weighted by c_j / S.

        Before gradient j is taken, at most S_(j-1) has been walked, the total of j - 1 steps. Without momentum this is
        (T-1)(2T-1)/6.

        >>> LocalSteps(10).drift == 9 * 19 / 6
        True
        """
        walked_T = np.concatenate([[0.0], np.cumsum(self.shares[::-1])[:-1]])
        return float((self.shares * walked_T**2).sum()) / self.total


@dataclass(frozen=True, slots=True)
class RoundQuantities:
    """What one round's masks and gradients say."""

    lr: float
    inverse_coverage: tuple[float, ...]
    """For every client the largest weight of any parameter it holds."""
    pruned_energy: tuple[float, ...]
    """d_n: the squared length of what every client's mask cuts away."""
    gamma: int
    """The fewest clients that hold any of the round's parameters."""
    energy: float
    """The squared length of the global model."""
    gradient: float
    """The squared length of the full gradient, over the parameters that the round trains: the left-hand side."""
    bias: float = 0.0
    """Squared distance between the mean of the clients' own gradients and the full one, at the global model."""
    offset: float = 0.0
    """The same for the gradients of the very batches, as often as they count in the end."""
    spread: float = 0.0
    """The sum over parameters of zeta_i^2/Gamma_i (M - Gamma_i)/(M - 1): a random cohort's expected squared bias."""
    regions: int = 1
    """How many different sets of clients hold some parameter."""

    @property
    def clients(self) -> int:
        """N, the clients of the round."""
        return len(self.inverse_coverage)


@dataclass(frozen=True, slots=True)
class Constants:
    """What is known of a whole run; `lr_sum` is the sum of all rounds' learning rates."""

    smoothness: float
    """L of the clients' losses: for the descent and for the drift."""
    batch_smoothness: float
    """L of the loss of any batch, along the clients' paths."""
    gradient: float
    """G: the largest mean squared length of a masked batch gradient."""
    step_gradient: float
    """The largest squared length of any gradient that was stepped along."""
    variance: float
    """sigma^2: the largest variance of a batch gradient around its client's own gradient."""
    start: float
    """F at the first model."""
    least: float
    """A lower bound of F."""
    steps: LocalSteps
    rounds: int
    lr_sum: float


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the step size, and by which factor it is violated (at most 1: it holds)."""

    name: str
    allowed: float
    actual: float

    @property
    def factor(self) -> float:
        """How many times too large the step size is."""
        return self.actual / self.allowed if self.allowed else math.inf

    @property
    def holds(self) -> bool:
        """Whether it is met, to rounding."""
        return self.factor <= 1 + 1e-9


@dataclass(frozen=True)
class Bound:
    """A right-hand side, term by term, with the conditions under which it is one."""

    name: str
    terms: dict[str, float]
    conditions: tuple[Condition, ...]
    left: float
    violated_assumptions: tuple[str, ...] = field(default=())
    """In which respects the run lies outside the theorem's assumptions."""

    @property
    def value(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def applies(self) -> bool:
        """Whether all conditions and assumptions are met."""
        return (
            all(condition.holds for condition in self.conditions) and not self.violated_assumptions
        )


def lr_weighted_mean(
    rounds: Sequence[RoundQuantities], figure: Callable[[RoundQuantities], float]
) -> float:
    """The mean over rounds in which a round counts as much as its learning rate; the plain mean if that is constant."""
    total = sum(r.lr for r in rounds)
    return sum(r.lr * figure(r) for r in rounds) / total


def squared_inverse(r: RoundQuantities) -> float:
    """The sum over clients of 1/Gamma_(n)^2."""
    return sum(share**2 for share in r.inverse_coverage)


def gradient_gap(
    known: Constants, r: RoundQuantities, *, smoothness: float, gradient: float
) -> tuple[float, float]:
    """Lemma 2: how far the clients' mean gradient can be from the one at the global model, by drift and by cutting."""
    drift = smoothness**2 * r.lr**2 * gradient * known.steps.drift * sum(r.inverse_coverage)
    cut = smoothness**2 * sum(
        share * d for share, d in zip(r.inverse_coverage, r.pruned_energy, strict=True)
    )
    return drift, cut
