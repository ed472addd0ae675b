"""Learning rates over the rounds, as a factor of the first."""

import math
from collections.abc import Callable

from fedcover.errors import InvalidValue


def constant(round: int, rounds: int) -> float:
    """The same learning rate in every round."""
    return 1.0


def cosine(round: int, rounds: int) -> float:
    """Half a cosine from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * round / rounds))


def steps(round: int, rounds: int, *, at: list[int], factor: float = 0.1) -> float:
    """Multiplied by `factor` at each of the given rounds.

    >>> steps(7, 10, at=[5, 8])
    0.1
    """
    if factor <= 0:
        raise InvalidValue(f"schedule steps: factor must be positive; got {factor}")
    return float(factor ** sum(round >= milestone for milestone in at))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "steps": steps,
}
