"""Is a difference more than noise? Student's t for few seeds: a claim against our runs, two settings seed by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CLAIMED_SEEDS = 3
"""The paper's figures are means over three seeds; it prints no spread, so ours stands for both."""

SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class SeedStatistics:
    """What some seeds gave: mean, standard deviation (None with one seed), and how many there were."""

    mean: float
    spread: float | None
    seeds: int


@dataclass(frozen=True)
class PairedDifference:
    """One setting minus another with the same seeds: mean, spread, how many, and how likely that is by chance."""

    mean: float
    spread: float | None
    seeds: int
    p: float | None

    @property
    def verdict(self) -> str:
        """In a word: higher, lower, or nothing that these seeds could tell from chance."""
        if self.p is None:
            return "one seed"
        if self.p >= SIGNIFICANCE_LEVEL:
            return "not decided"
        return "higher" if self.mean > 0 else "lower"


def seed_statistics(values: Sequence[float]) -> SeedStatistics | None:
    """Mean and spread of what seeds gave; None without any.

    >>> seed_statistics([1.0, 2.0, 3.0])
    SeedStatistics(mean=2.0, spread=1.0, seeds=3)
    """
    return (
        SeedStatistics(fmean(values), stdev(values) if len(values) > 1 else None, len(values))
        if values
        else None
    )


def against_claim(claim: float, found: SeedStatistics) -> str:
    """Whether our mean differs from a printed mean over three seeds by more than noise: `=`, `higher` or `lower`.

    >>> against_claim(98.0, SeedStatistics(97.9, 0.2, 3)), against_claim(98.0, SeedStatistics(90.0, 0.2, 3))
    ('=', 'lower')
    """
    if found.spread is None:
        return "one seed"
    error = found.spread * math.sqrt(1 / found.seeds + 1 / CLAIMED_SEEDS)
    if two_sided_p_value(_ratio(found.mean - claim, error), found.seeds - 1) >= SIGNIFICANCE_LEVEL:
        return "="
    return "higher" if found.mean > claim else "lower"


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float]
) -> PairedDifference | None:
    """First minus second over the seeds that both have; None where they share none.

    >>> paired_difference({0: 2.0, 1: 3.0, 2: 2.0}, {0: 1.0, 1: 2.0, 2: 1.0}).verdict
    'higher'
    """
    differences = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    found = seed_statistics(differences)
    if found is None or found.spread is None:
        return PairedDifference(found.mean, None, found.seeds, None) if found else None
    ratio = _ratio(found.mean, found.spread / math.sqrt(found.seeds))
    return PairedDifference(
        found.mean, found.spread, found.seeds, two_sided_p_value(ratio, found.seeds - 1)
    )


def _ratio(difference: float, error: float) -> float:
    if error > 0:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def two_sided_p_value(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is at least as far from 0.

    The finite sums for whole degrees of freedom: in the angle whose tangent is t / sqrt(freedom).

    >>> round(two_sided_p_value(4.302653, 2), 6), round(two_sided_p_value(2.228139, 10), 6)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for step in range(freedom % 2 + 1, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    within = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return max(0.0, 1 - within)
