"""Client-level differential privacy for covered parameters: clip every update, add Gaussian noise to their sum.

Per round: S = sum of the clients' updates, each of length at most C over all the entries that the client holds.
Released is S plus noise of standard deviation z * C on every covered entry; the model moves by that, divided by the
number of clients that hold the entry. So the mean of an entry held by n clients has noise z * C / n, and an entry that
nobody holds neither moves nor needs noise. docs/security.md says what is guaranteed, and under what conditions.
"""

import importlib.util
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

from fedcover.aggregation import change, length
from fedcover.errors import InvalidValue
from fedcover.types import Params, Reduction


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The Gaussian mechanism: noise of `noise` times the clipping length, and the delta at which epsilon is told."""

    noise: float
    delta: float

    def epsilon(self, turns: int) -> float:
        """Epsilon for a client that has taken part `turns` times, by the accountant of dp-accounting.

        Neighbours are fleets in which one client's data is replaced by any other: its clipped update then changes by up
        to 2 C, so the noise is half as many times the sensitivity as it is times C. Turns are composed as they are:
        who takes part follows from the seed, and the masks show it, so nothing is gained from sampling.
        """
        if not turns:
            return 0.0
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp_accounting.GaussianDpEvent(self.noise / 2), turns)
        return float(accountant.get_epsilon(self.delta))


def no_privacy() -> None:
    """Updates are averaged as they are."""


def gaussian(*, noise: float, delta: float = 1e-5) -> Gaussian:
    """Add noise of `noise` times `clip_updates` to the sum of updates clipped to that; epsilon is told at `delta`."""
    if not 0 < noise < float("inf"):
        raise InvalidValue(f"privacy gaussian: noise must be a number above 0; got {noise}")
    if not 0 < delta < 1:
        raise InvalidValue(f"privacy gaussian: delta must be in (0, 1); got {delta}")
    return Gaussian(noise, delta)


PRIVACY: dict[str, Callable[..., Gaussian | None]] = {"none": no_privacy, "gaussian": gaussian}


def require_accountant() -> None:
    """Complain if the library that accounts for privacy is not there."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise InvalidValue("privacy needs dp-accounting; in a checkout of fedcover: pip install '.[privacy]'")


def fresh_generator() -> torch.Generator:
    """Noise that nobody can draw again: from the operating system's randomness, not from the experiment's seed."""
    return torch.Generator().manual_seed(secrets.randbits(63))


def private_mean(
    old: Params, parts: Sequence[tuple[Reduction, Params]], *, clip: float, noise: float, draw: torch.Generator
) -> Params:
    """Each entry moves by the noised sum of the clipped updates, divided by the number of clients that hold it."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
    counts = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
    for reduction, values in parts:
        moved = change(old, reduction, values)
        scale = clip / max(length(moved), clip)
        for name, tensor in moved.items():
            total[name].add_(tensor, alpha=scale)
        reduction.add_into(counts, None, 1)
    new: Params = {}
    for name, tensor in old.items():
        random = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device)
        mean = (total[name] + noise * clip * random) / counts[name]
        new[name] = torch.where(counts[name] > 0, tensor.double() + mean, tensor.double()).to(tensor.dtype)
    return new


def most_turns(cohorts: Iterable[Sequence[int]]) -> Iterator[int]:
    """After each round, how often the client that was asked most often has been asked.

    >>> list(most_turns([[1, 2], [3, 4], [2, 3], [2, 5]]))
    [1, 1, 2, 3]
    """
    turns: Counter[int] = Counter()

    def most(known: int, cohort: Sequence[int]) -> int:
        turns.update(cohort)
        return max([known, *(turns[client] for client in cohort)])

    return islice(accumulate(cohorts, most, initial=0), 1, None)
