"""Paired differences of equal seeds: Student's test, its interval, and Holm's correction for
several at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedcover.paper.statistics import SIGNIFICANCE_LEVEL, paired_difference, two_sided_p_value


@dataclass(frozen=True)
class Contrast:
    """One setting minus another over equal seeds: mean, spread, p-value, and that after Holm's
    correction.
    """

    name: str
    mean: float
    spread: float
    seeds: int
    p: float
    corrected: float

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval."""
        return (
            quantile(1 - SIGNIFICANCE_LEVEL, self.seeds - 1) * self.spread / math.sqrt(self.seeds)
        )

    def verdict(self, least: float, words: tuple[str, str] = ("helps", "hurts")) -> str:
        """In the plan's words, for more and for less; `least` is the difference that matters."""
        if self.corrected < SIGNIFICANCE_LEVEL and abs(self.mean) >= least:
            return words[self.mean < 0]
        if abs(self.mean) + self.half_width <= least:
            return "no difference"
        return "undecided"


def paired_contrast(
    name: str, first: Mapping[int, float], second: Mapping[int, float]
) -> list[Contrast]:
    """First minus second as a list: empty where fewer than two seeds have both."""
    difference = paired_difference(first, second)
    if difference is None or difference.spread is None or difference.p is None:
        return []
    return [
        Contrast(
            name, difference.mean, difference.spread, difference.seeds, difference.p, difference.p
        )
    ]


def quantile(probability: float, freedom: int) -> float:
    """The t within which Student's variable lies with this probability.

    >>> round(quantile(0.95, 4), 6)
    2.776445
    """
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if 1 - two_sided_p_value(middle, freedom) < probability
            else (low, middle)
        )
    return high


def holm(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """The same with p-values corrected for being several.

    >>> family = [Contrast("a", 1.0, 1.0, 5, 0.01, 0.01), Contrast("b", 1.0, 1.0, 5, 0.3, 0.3)]
    >>> [round(c.corrected / c.p, 6) for c in holm(family)]
    [2.0, 1.0]
    """
    order = sorted(range(len(contrasts)), key=lambda i: contrasts[i].p)
    corrected = [0.0] * len(contrasts)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * contrasts[i].p))
        corrected[i] = largest
    return [replace(c, corrected=p) for c, p in zip(contrasts, corrected, strict=True)]
