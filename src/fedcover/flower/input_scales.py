"""How inputs are scaled, in four coarse numbers: enough to see that two machines prepare them differently."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 3.0
"""Spreads that differ by more than this factor, or means by more than so many spreads, are another scale."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """The least and the largest input, their mean, and their spread (standard deviation).

    Each has one significant digit, but the mean, which is as exact as the spread.
    """

    low: float
    high: float
    mean: float
    spread: float

    @classmethod
    def coarse(cls, numbers: Sequence[float]) -> "InputScale":
        """Of exact numbers, rounded, so that they tell little of any row.

        >>> InputScale.coarse([0, 16, 4.884, 6.0176])
        InputScale(low=0.0, high=20.0, mean=5.0, spread=6.0)
        >>> InputScale.coarse([281, 303, 293.7, 5.2]).mean
        294.0
        """
        if not all(map(math.isfinite, numbers)):
            raise ValueError("no scale")
        low, high, mean, spread = (float(f"{number:.0e}") for number in numbers)
        if spread > 0:
            mean = round(numbers[2], -math.floor(math.log10(spread))) + 0.0  # no -0.0
        return cls(low, high, mean, spread)

    @classmethod
    def read(cls, told: object) -> "InputScale | None":
        """As a node tells it; None if it tells nothing, refused if that makes no sense."""
        if told is None:
            return None
        if (
            not isinstance(told, Sequence)
            or len(told) != 4
            or not all(type(number) is float for number in told)
        ):
            raise ValueError("no scale")
        found = cls.coarse(told)  # a node may tell more digits than it should; nobody needs them
        if found.low > found.high or found.spread < 0:
            raise ValueError("no scale")
        return found

    def differs(self, other: "InputScale") -> bool:
        """Whether inputs of these two scales can hardly mean the same.

        >>> InputScale(0, 1, 0.3, 0.4).differs(InputScale(0, 300, 80, 90)), InputScale(0, 1, 0.3, 0.4).differs(InputScale(0, 1, 0.1, 0.3))
        (True, False)
        """
        small, large = sorted((self.spread, other.spread))
        return large > MOST * small or abs(self.mean - other.mean) > MOST * large

    def __str__(self) -> str:
        return f"about {self.low:g} to {self.high:g}, mean {self.mean:g}, spread {self.spread:g}"
