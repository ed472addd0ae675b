"""Decide whether a difference is more than noise, with Student's t for few seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CLAIMED_SEEDS = 3
"""The paper's numbers are means over three seeds without a spread; our spread is used for both."""

SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class SeedStatistics:
    """Mean, standard deviation (None for one seed) and number of seeds."""

    mean: float
    spread: float | None
    seeds: int


@dataclass(frozen=True)
class PairedDifference:
    """One setting minus another with the same seeds: mean, spread, number of seeds, p-value."""

    mean: float
    spread: float | None
    seeds: int
    p: float | None

    @property
    def verdict(self) -> str:
        """Higher, lower, undecided (the difference may be chance), or one seed."""
        if self.p is None:
            return "one seed"
        if self.p >= SIGNIFICANCE_LEVEL:
            return "undecided"
        return "higher" if self.mean > 0 else "lower"


def seed_statistics(values: Sequence[float]) -> SeedStatistics | None:
    """Return mean and spread over seeds, or None without any.

    >>> seed_statistics([1.0, 2.0, 3.0])
    SeedStatistics(mean=2.0, spread=1.0, seeds=3)
    """
    if not values:
        return None
    spread = stdev(values) if len(values) > 1 else None
    return SeedStatistics(fmean(values), spread, len(values))


def against_claim(claim: float, ours: SeedStatistics) -> str:
    """Compare our mean with a printed mean over three seeds: `=`, `higher` or `lower`.

    `=` means that the difference is within noise. One seed gives no verdict.

    >>> against_claim(98.0, SeedStatistics(97.9, 0.2, 3))
    '='
    >>> against_claim(98.0, SeedStatistics(90.0, 0.2, 3))
    'lower'
    """
    if ours.spread is None:
        return "one seed"
    error = ours.spread * math.sqrt(1 / ours.seeds + 1 / CLAIMED_SEEDS)
    p = two_sided_p_value(_t_statistic(ours.mean - claim, error), ours.seeds - 1)
    if p >= SIGNIFICANCE_LEVEL:
        return "="
    return "higher" if ours.mean > claim else "lower"


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float]
) -> PairedDifference | None:
    """Return first minus second over the seeds that both have, or None if they share none.

    >>> paired_difference({0: 2.0, 1: 3.0, 2: 2.0}, {0: 1.0, 1: 2.0, 2: 1.0}).verdict
    'higher'
    """
    shared_seeds = sorted(first.keys() & second.keys())
    differences = seed_statistics([first[seed] - second[seed] for seed in shared_seeds])
    if differences is None:
        return None
    mean, spread, seeds = differences.mean, differences.spread, differences.seeds
    if spread is None:
        return PairedDifference(mean, None, seeds, None)
    t = _t_statistic(mean, spread / math.sqrt(seeds))
    return PairedDifference(mean, spread, seeds, two_sided_p_value(t, seeds - 1))


def _t_statistic(difference: float, error: float) -> float:
    if error > 0:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def two_sided_p_value(t: float, freedom: int) -> float:
    """Return the probability that Student's t is at least as far from 0.

    For whole degrees of freedom this is a finite sum in the angle with tangent t / sqrt(freedom).

    >>> round(two_sided_p_value(4.302653, 2), 6), round(two_sided_p_value(2.228139, 10), 6)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for step in range(is_odd + 1, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    within = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1 - within)
