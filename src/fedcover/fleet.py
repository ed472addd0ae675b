"""The devices: how much of the model each can hold, who takes part in a round, who drops out of it."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcover.errors import InvalidValue
from fedcover.rng import numpy_generator

_TERM = re.compile(r"(\d+)\s*x\s*(\d*\.?\d+)(?:\s*/\s*(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Device kinds and how many there are of each, in the proportions of `counts`."""

    counts: tuple[int, ...]
    capacities: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Fleet":
        """Read "4x1.0 + 6x0.75"; fractions such as 6x1/4 are understood.

        >>> Fleet.parse("4x1.0 + 6x3/4")
        Fleet(counts=(4, 6), capacities=(1.0, 0.75))
        """
        matches = [_TERM.fullmatch(term.strip()) for term in text.split("+")]
        wrong = InvalidValue(
            f"fleet must look like '4x1.0 + 6x0.75' (how many x capacity in (0, 1]); got {text!r}"
        )
        terms = []
        for match in matches:
            if match is None:
                raise wrong
            try:
                terms.append((int(match[1]), float(match[2]) / int(match[3] or 1)))
            except (ArithmeticError, ValueError):  # a zero below the line, or thousands of digits
                raise wrong from None
        if any(count < 1 or not 0 < capacity <= 1 for count, capacity in terms):
            raise wrong
        return cls(tuple(c for c, _ in terms), tuple(v for _, v in terms))

    def __str__(self) -> str:
        shares = [
            np.format_float_positional(capacity, trim="-") for capacity in self.capacities
        ]  # all digits
        return " + ".join(f"{n}x{share}" for n, share in zip(self.counts, shares, strict=True))

    @property
    def levels(self) -> tuple[float, ...]:
        """The distinct capacities, largest first."""
        return tuple(sorted(set(self.capacities), reverse=True))

    def scaled(self, clients: int) -> "Fleet":
        """The same mixture with `clients` devices, by largest remainder; kinds of one capacity count as one.

        >>> str(Fleet.parse("1x1.0 + 2x0.5").scaled(100))
        '33x1 + 67x0.5'
        >>> str(Fleet.parse("1x0.5 + 8x1 + 8x1").scaled(10))  # as 1x0.5 + 16x1
        '1x0.5 + 5x1 + 4x1'
        """
        kinds: dict[float, list[int]] = {}
        for place, capacity in enumerate(self.capacities):
            kinds.setdefault(capacity, []).append(place)
        totals = _apportion(
            clients, [sum(self.counts[place] for place in alike) for alike in kinds.values()]
        )
        counts = [0] * len(self.counts)
        for alike, total in zip(kinds.values(), totals, strict=True):
            for place, count in zip(
                alike, _apportion(total, [self.counts[p] for p in alike]), strict=True
            ):
                counts[place] = count
        present = [(n, c) for n, c in zip(counts, self.capacities, strict=True) if n]
        return Fleet(tuple(n for n, _ in present), tuple(c for _, c in present))

    def capacity(self, place: int) -> float:
        """The capacity of the device at a place: kinds stand one after another.

        >>> [Fleet.parse("2x1.0 + 1x0.5").capacity(place) for place in range(3)]
        [1.0, 1.0, 0.5]
        """
        return self.capacities[bisect_right(list(itertools.accumulate(self.counts)), place)]


def _apportion(number: int, weights: Sequence[int]) -> list[int]:
    """A number shared out by weights: rounded down, then one more each for the largest remainders.

    >>> _apportion(10, [1, 16])
    [1, 9]
    """
    total = sum(weights)
    parts = [weight * number // total for weight in weights]
    by_remainder = sorted(range(len(parts)), key=lambda place: -(weights[place] * number % total))
    for place in by_remainder[: number - sum(parts)]:
        parts[place] += 1
    return parts


def sample_cohort(clients: int, active: int, seed: int, round: int) -> list[int]:
    """The ids of the clients that take part in a round, in the order in which they were drawn.

    >>> sample_cohort(100, 3, seed=0, round=1) == sample_cohort(100, 3, seed=0, round=1)
    True
    """
    drawn = numpy_generator(seed, "cohort", round).choice(clients, size=active, replace=False)
    return [int(client) for client in drawn]


def drops_out(client: int, probability: float, seed: int, round: int) -> bool:
    """Whether a client of the cohort never answers in this round."""
    return float(numpy_generator(seed, "drop-out", round, client).random()) < probability
