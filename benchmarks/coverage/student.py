"""Paired differences of equal seeds: Student's test, its interval, and Holm's correction for several at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Contrast:
    """Differences of equal seed, and what they say; `corrected` is the p-value after Holm's correction."""

    name: str
    differences: tuple[float, ...]
    corrected: float | None = None

    @property
    def mean(self) -> float:
        """The mean difference."""
        return fmean(self.differences)

    @property
    def spread(self) -> float:
        """The standard deviation of the differences."""
        return stdev(self.differences)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval."""
        count = len(self.differences)
        return quantile(0.95, count - 1) * self.spread / math.sqrt(count)

    @property
    def p(self) -> float:
        """The two-sided paired t-test."""
        if not self.spread:
            return 1.0 if not self.mean else 0.0
        count = len(self.differences)
        return 1 - inside(abs(self.mean) / (self.spread / math.sqrt(count)), count - 1)

    def verdict(self, least: float, words: tuple[str, str] = ("helps", "hurts")) -> str:
        """In the plan's words, for more and for less; `least` is the difference that matters."""
        sure = (self.p if self.corrected is None else self.corrected) < 0.05
        if sure and abs(self.mean) >= least:
            return words[self.mean < 0]
        if abs(self.mean) + self.half_width <= least:
            return "no difference"
        return "undecided"


def inside(t: float, freedom: int) -> float:
    """The probability that Student's t lies in -t .. t, by its finite sums for whole degrees of freedom.

    >>> round(inside(2.776445, 4), 6), round(inside(12.7062, 1), 4)
    (0.95, 0.95)
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(probability: float, freedom: int) -> float:
    """The t within which Student's variable lies with this probability."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < probability else (low, middle)
    return high


def holm(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """The same with p-values corrected for being several.

    >>> family = [Contrast("a", (1.0, 1.1, 1.2)), Contrast("b", (1.0, -1.0, 0.5))]
    >>> [round(c.corrected / c.p, 6) for c in holm(family)]
    [2.0, 1.0]
    """
    order = sorted(range(len(contrasts)), key=lambda i: contrasts[i].p)
    corrected = [0.0] * len(contrasts)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * contrasts[i].p))
        corrected[i] = largest
    return [Contrast(c.name, c.differences, p) for c, p in zip(contrasts, corrected, strict=True)]
