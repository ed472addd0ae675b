"""Learning-rate schedules: the factor of the initial learning rate in each round."""

import math
from collections.abc import Callable

from fedcover.errors import InvalidValue


def constant(round: int, rounds: int) -> float:
    """Return 1 in every round."""
    return 1.0


def cosine(round: int, rounds: int) -> float:
    """Return half a cosine that falls from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * round / rounds))


def steps(round: int, rounds: int, *, at: list[int], factor: float = 0.1) -> float:
    """Multiply the learning rate by `factor` at each of the given rounds.

    Args:
        round: The current round, from 0.
        rounds: The number of rounds.
        at: The rounds at which the learning rate changes.
        factor: What it is multiplied by.

    >>> steps(7, 10, at=[5, 8])
    0.1
    """
    if factor <= 0:
        raise InvalidValue(f"schedule steps: factor must be positive; got {factor}")
    milestones_passed = sum(round >= milestone for milestone in at)
    return float(factor**milestones_passed)


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "steps": steps,
}
