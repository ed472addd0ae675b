"""The scale of inputs in four coarse numbers, to notice inputs that were prepared differently."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RATIO = 3.0
"""The largest ratio of two spreads of the same scale.

Their means may differ by at most as many spreads.
"""


@dataclass(frozen=True, slots=True)
class InputScale:
    """The least and the largest input, their mean, and their spread (standard deviation).

    All have one significant digit, except the mean, which is as exact as the spread.
    """

    low: float
    high: float
    mean: float
    spread: float

    @classmethod
    def coarse(cls, numbers: Sequence[float]) -> "InputScale":
        """Round exact numbers, so that they reveal little about any row.

        >>> InputScale.coarse([0, 16, 4.884, 6.0176])
        InputScale(low=0.0, high=20.0, mean=5.0, spread=6.0)
        >>> InputScale.coarse([281, 303, 293.7, 5.2]).mean
        294.0
        """
        if not all(map(math.isfinite, numbers)):
            raise ValueError("no scale")
        low, high, mean, spread = (float(f"{number:.0e}") for number in numbers)
        if spread > 0:
            exact_mean = numbers[2]
            mean = round(exact_mean, -math.floor(math.log10(spread))) + 0.0  # no -0.0
        return cls(low, high, mean, spread)

    @classmethod
    def read(cls, numbers: object) -> "InputScale | None":
        """Read the scale that a node reports, or None; raise a ValueError if it makes no sense."""
        if numbers is None:
            return None
        if (
            not isinstance(numbers, Sequence)
            or len(numbers) != 4
            or not all(type(number) is float for number in numbers)
        ):
            raise ValueError("no scale")
        scale = cls.coarse(numbers)  # a node may report more digits than it should
        if scale.low > scale.high or scale.spread < 0:
            raise ValueError("no scale")
        return scale

    def differs(self, other: "InputScale") -> bool:
        """Return whether inputs of these two scales can hardly mean the same.

        >>> InputScale(0, 1, 0.3, 0.4).differs(InputScale(0, 300, 80, 90))
        True
        >>> InputScale(0, 1, 0.3, 0.4).differs(InputScale(0, 1, 0.1, 0.3))
        False
        """
        small, large = sorted((self.spread, other.spread))
        return large > MAX_RATIO * small or abs(self.mean - other.mean) > MAX_RATIO * large

    def __str__(self) -> str:
        return f"about {self.low:g} to {self.high:g}, mean {self.mean:g}, spread {self.spread:g}"
