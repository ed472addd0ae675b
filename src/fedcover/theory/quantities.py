"""The quantities of the theorems: constants of the problem, measurements of a round, and a bound.

The quantities of a round concern the parameters that some client holds in it; the others do not
move. The suffix T of an array counts local steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LocalSteps:
    """T local steps of SGD with momentum mu, which starts at zero in every round.

    >>> LocalSteps(300).total, LocalSteps(3, momentum=0.5).shares.tolist()
    (300.0, [1.75, 1.5, 1.0])
    """

    count: int
    momentum: float = 0.0

    @cached_property
    def shares(self) -> np.ndarray:
        """c_j, the weight of gradient j in the sum of all steps."""
        remaining_T = np.arange(self.count, 0, -1)
        return np.asarray((1 - self.momentum**remaining_T) / (1 - self.momentum))

    @property
    def total(self) -> float:
        """S, the sum of all c_j; T without momentum."""
        return float(self.shares.sum())

    @property
    def squares(self) -> float:
        """The sum of c_j^2 divided by S; 1 without momentum."""
        return float((self.shares**2).sum()) / self.total

    @cached_property
    def drift(self) -> float:
        """An upper bound of the mean squared distance from the start, for steps of unit length.

        The mean is weighted by c_j / S. Before step j, the distance is at most S_(j-1), the total
        of j - 1 steps. Without momentum the bound is (T-1)(2T-1)/6.

        >>> LocalSteps(10).drift == 9 * 19 / 6
        True
        """
        distance_T = np.concatenate([[0.0], np.cumsum(self.shares[::-1])[:-1]])
        return float((self.shares * distance_T**2).sum()) / self.total


@dataclass(frozen=True, slots=True)
class RoundQuantities:
    """The measurements of one round: its masks and gradients."""

    lr: float
    inverse_coverage: tuple[float, ...]
    """For each client, the largest weight with which it counts for any parameter that it holds.

    That is 1/Gamma_(n) if all clients count the same.
    """
    pruned_energy: tuple[float, ...]
    """d_n: for each client, the squared length of the parameters that its mask cuts away."""
    gamma: int
    """The fewest clients that hold any of the round's parameters."""
    energy: float
    """The squared length of the global model."""
    gradient: float
    """The bounded quantity: the squared length of the full gradient over the round's parameters."""
    bias: float = 0.0
    """The squared distance of the mean of the clients' gradients from the full gradient.

    Both are taken at the global model.
    """
    offset: float = 0.0
    """Like `bias`, for the gradients of the batches that the clients used, weighted by c_j."""
    spread: float = 0.0
    """The expected squared bias of a random cohort.

    The sum over parameters of zeta_i^2/Gamma_i (M - Gamma_i)/(M - 1).
    """
    regions: int = 1
    """The number of different sets of clients that hold some parameter."""

    @property
    def clients(self) -> int:
        """N, the number of clients of the round."""
        return len(self.inverse_coverage)


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a whole run; `lr_sum` is the sum of all rounds' learning rates."""

    smoothness: float
    """L of the clients' losses; used for the descent and for the drift."""
    batch_smoothness: float
    """L of the loss of any batch, along the clients' trajectories."""
    gradient: float
    """G: the largest mean squared length of a client's masked batch gradients."""
    step_gradient: float
    """The largest squared length of any gradient that was used for a step."""
    variance: float
    """sigma^2: the largest variance of batch gradients around their client's gradient."""
    start: float
    """F at the initial model."""
    least: float
    """A lower bound of F."""
    steps: LocalSteps
    rounds: int
    lr_sum: float


@dataclass(frozen=True, slots=True)
class Condition:
    """An upper limit of the learning rate."""

    name: str
    allowed: float
    actual: float

    @property
    def factor(self) -> float:
        """The learning rate as a multiple of the limit; at most 1 if the condition holds."""
        return self.actual / self.allowed if self.allowed else math.inf

    @property
    def holds(self) -> bool:
        """Whether the condition holds, up to rounding."""
        return self.factor <= 1 + 1e-9


@dataclass(frozen=True)
class Bound:
    """The right-hand side of a theorem, term by term, and the conditions under which it is valid.

    `left` is the bounded quantity.
    """

    name: str
    terms: dict[str, float]
    conditions: tuple[Condition, ...]
    left: float
    violated_assumptions: tuple[str, ...] = field(default=())
    """One sentence for each assumption of the theorem that the run violates."""

    @property
    def value(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def applies(self) -> bool:
        """Whether all conditions and assumptions are met."""
        if self.violated_assumptions:
            return False
        return all(condition.holds for condition in self.conditions)


def lr_weighted_mean(
    rounds: Sequence[RoundQuantities], quantity: Callable[[RoundQuantities], float]
) -> float:
    """Return the mean of a quantity over rounds, weighted by their learning rates."""
    total = sum(r.lr for r in rounds)
    return sum(r.lr * quantity(r) for r in rounds) / total


def squared_inverse(r: RoundQuantities) -> float:
    """Return the sum over clients of 1/Gamma_(n)^2."""
    return sum(inverse**2 for inverse in r.inverse_coverage)


def gradient_gap(
    constants: Constants, r: RoundQuantities, *, smoothness: float, gradient: float
) -> tuple[float, float]:
    """Bound the gap between the clients' mean gradient and the one at the global model (Lemma 2).

    Returns:
        The part of the squared gap that is due to drift, and the part that is due to pruning.
    """
    drift = smoothness**2 * r.lr**2 * gradient * constants.steps.drift * sum(r.inverse_coverage)
    pruning = smoothness**2 * sum(
        inverse * energy
        for inverse, energy in zip(r.inverse_coverage, r.pruned_energy, strict=True)
    )
    return drift, pruning
