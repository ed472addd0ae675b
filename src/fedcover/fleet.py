"""Describe the fleet of devices, sample cohorts and simulate drop-outs."""

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
    """Describe a mixture of device kinds.

    Attributes:
        counts: The number of devices of each kind.
        capacities: The capacity of each kind, in (0, 1].
    """

    counts: tuple[int, ...]
    capacities: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Fleet":
        """Parse a text such as "4x1.0 + 6x0.75"; fractions such as 6x1/4 are allowed.

        >>> Fleet.parse("4x1.0 + 6x3/4")
        Fleet(counts=(4, 6), capacities=(1.0, 0.75))
        """
        counts, capacities = [], []
        for term in text.split("+"):
            count_and_capacity = _parse_term(term.strip())
            if count_and_capacity is None:
                raise InvalidValue(
                    "fleet must look like '4x1.0 + 6x0.75' (how many x capacity in (0, 1]); "
                    f"got {text!r}"
                )
            count, capacity = count_and_capacity
            counts.append(count)
            capacities.append(capacity)
        return cls(tuple(counts), tuple(capacities))

    def __str__(self) -> str:
        terms = []
        for count, capacity in zip(self.counts, self.capacities, strict=True):
            all_digits = np.format_float_positional(capacity, trim="-")
            terms.append(f"{count}x{all_digits}")
        return " + ".join(terms)

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the distinct capacities, largest first."""
        return tuple(sorted(set(self.capacities), reverse=True))

    def scaled(self, clients: int) -> "Fleet":
        """Return the same mixture with another number of devices, by the largest-remainder method.

        Kinds of equal capacity are apportioned as one kind first.

        >>> str(Fleet.parse("1x1.0 + 2x0.5").scaled(100))
        '33x1 + 67x0.5'
        >>> str(Fleet.parse("1x0.5 + 8x1 + 8x1").scaled(10))  # as 1x0.5 + 16x1
        '1x0.5 + 5x1 + 4x1'
        """
        kinds_by_capacity: dict[float, list[int]] = {}
        for kind, capacity in enumerate(self.capacities):
            kinds_by_capacity.setdefault(capacity, []).append(kind)
        kind_groups = list(kinds_by_capacity.values())
        group_weights = [sum(self.counts[kind] for kind in kinds) for kinds in kind_groups]
        group_counts = _apportion(clients, group_weights)
        counts = [0] * len(self.counts)
        for kinds, group_count in zip(kind_groups, group_counts, strict=True):
            kind_counts = _apportion(group_count, [self.counts[kind] for kind in kinds])
            for kind, count in zip(kinds, kind_counts, strict=True):
                counts[kind] = count
        present_kinds = [kind for kind, count in enumerate(counts) if count]
        return Fleet(
            tuple(counts[kind] for kind in present_kinds),
            tuple(self.capacities[kind] for kind in present_kinds),
        )

    def capacity(self, device: int) -> float:
        """Return the capacity of a device; the devices are numbered kind by kind.

        >>> [Fleet.parse("2x1.0 + 1x0.5").capacity(device) for device in range(3)]
        [1.0, 1.0, 0.5]
        """
        first_device_of_next_kind = list(itertools.accumulate(self.counts))
        return self.capacities[bisect_right(first_device_of_next_kind, device)]


def _parse_term(term: str) -> tuple[int, float] | None:
    """Parse "count x capacity"; return None if it is malformed or out of range."""
    match = _TERM.fullmatch(term)
    if match is None:
        return None
    try:
        count = int(match[1])
        capacity = float(match[2]) / int(match[3] or 1)
    except (ArithmeticError, ValueError):  # a zero denominator, or thousands of digits
        return None
    if count < 1 or not 0 < capacity <= 1:
        return None
    return count, capacity


def _apportion(number: int, weights: Sequence[int]) -> list[int]:
    """Divide a number by weights: round down, then add one for the largest remainders.

    >>> _apportion(10, [1, 16])
    [1, 9]
    """
    total = sum(weights)
    parts = [weight * number // total for weight in weights]
    by_remainder = sorted(range(len(parts)), key=lambda part: -(weights[part] * number % total))
    for part in by_remainder[: number - sum(parts)]:
        parts[part] += 1
    return parts


def sample_cohort(clients: int, active: int, seed: int, round: int) -> list[int]:
    """Draw the ids of the clients that take part in a round.

    >>> sample_cohort(100, 3, seed=0, round=1) == sample_cohort(100, 3, seed=0, round=1)
    True
    """
    cohort = numpy_generator(seed, "cohort", round).choice(clients, size=active, replace=False)
    return [int(client) for client in cohort]


def drops_out(client: int, probability: float, seed: int, round: int) -> bool:
    """Return whether a client of the cohort drops out of this round."""
    return float(numpy_generator(seed, "drop-out", round, client).random()) < probability
