"""What is wanted of a plan: a coverage, drop-outs to survive, or else the smallest bound of the theorem."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from fedcover.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The right side of Theorem 1', over L^2 ||theta||^2: what a plan minimises when no coverage is asked for.

    The sum over clients of variance/Gamma_n^2 + (drift + delta_n^2)/Gamma_n, with Gamma_n the least coverage of what
    client n itself holds. The defaults stand for 300 local steps at the largest learning rate that the theorem
    allows, 1/(2 L T), and gradients as long as L ||theta||: variance 1/300, drift 1/12.
    """

    variance: float = 1 / 300
    drift: float = 1 / 12

    def __post_init__(self) -> None:
        for name in ("variance", "drift"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidValue(f"{name} must be a number from 0 on; got {getattr(self, name)}")

    @classmethod
    def of(
        cls, *, lr: float, steps: int, smoothness: float = 1.0, gradient: float = 1.0, variance: float = 1.0
    ) -> "PlanObjective":
        """From the theorem's gamma, T, L, G and sigma^2, the last two over L^2 ||theta||^2.

        >>> PlanObjective.of(lr=1 / 600, steps=300).variance == PlanObjective().variance
        True
        """
        drift = (lr * smoothness) ** 2 * gradient * (steps - 1) * (2 * steps - 1) / 6
        return cls(2 * lr * smoothness * variance, drift)

    def __call__(self, noise_N: np.ndarray, inverse_N: np.ndarray) -> float:
        """The value for the clients' noises and the inverses of their own coverages."""
        return float((self.variance * inverse_N**2 + (self.drift + noise_N) * inverse_N).sum())


def required_coverage(gamma: int | None, tolerate: int, largest: int, why: str) -> int | None:
    """The coverage that was asked for, None if nothing was; too large a wish is answered with the largest."""
    for name, value in (("gamma", gamma), ("tolerate", tolerate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InvalidValue(f"{name} must be a whole number from 0 on; got {value!r}")
        if value is not None and value < 0:
            raise InvalidValue(f"{name} must be at least 0; got {value}")
    if gamma is not None and gamma > largest:
        raise InvalidValue(f"gamma must be at most {largest} ({why}); got {gamma}")
    if tolerate and tolerate + 1 > largest:
        allowed = f"at most {largest - 1}" if largest > 1 else "0"
        raise InvalidValue(
            f"tolerate must be {allowed}: {tolerate} drop-outs need coverage {tolerate + 1}, "
            f"and the largest feasible is {largest} ({why}); got {tolerate}"
        )
    return None if gamma is None and not tolerate else max(gamma or 0, tolerate + 1 if tolerate else 0)
