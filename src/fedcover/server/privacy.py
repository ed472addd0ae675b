"""Client-level differential privacy for covered parameters: clip every update, add Gaussian noise to their sum.

Per round: S = sum of the clients' updates, each of length at most C over all the entries that the client holds.
Released is S plus noise of standard deviation z * C on every covered entry; the model moves by that, divided by the
number of clients that hold the entry. So the mean of an entry held by n clients has noise z * C / n, and an entry that
nobody holds neither moves nor needs noise. S and the noise are whole numbers of steps of a grid, so that no rounding of
floating-point numbers tells them apart. docs/security.md says what is guaranteed, and under what conditions.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, islice

import torch

from fedcover.errors import InvalidValue
from fedcover.server.clipping import change, global_norm
from fedcover.server.grid_noise import ByteStream, rounded_normal
from fedcover.types import Params, Reduction

LEAST_NOISE, MOST_NOISE = 0.01, 1e6
"""Less noise protects nobody, and more of it leaves nothing to learn: such numbers are typing errors."""
LEAST_DELTA = 1e-15
LEAST_CLIP, MOST_CLIP = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The Gaussian mechanism: noise of `noise` times the clipping length, and the delta at which epsilon is told."""

    noise: float
    delta: float

    def __post_init__(self) -> None:
        if not LEAST_NOISE <= self.noise <= MOST_NOISE:
            raise InvalidValue(
                f"privacy gaussian: noise must be in [{LEAST_NOISE:g}, {MOST_NOISE:g}]; got {self.noise:g}"
            )
        if not LEAST_DELTA <= self.delta < 1:
            raise InvalidValue(
                f"privacy gaussian: delta must be in [{LEAST_DELTA:g}, 1); got {self.delta:g}"
            )

    def epsilon(self, turns: int) -> float:
        """Epsilon, exactly, for a client that has taken part `turns` times.

        Neighbours are fleets in which one client's data is replaced by any other: its clipped update then changes by up
        to 2 C, so the noise is half as many times the sensitivity as it is times C. Turns are composed as they are:
        who takes part follows from the seed, and the masks show it, so nothing is gained from sampling. Together they
        are one Gaussian mechanism of sqrt(turns) times the sensitivity (Dong, Roth, Su 2022).

        >>> [round(Gaussian(noise=4.0, delta=1e-6).epsilon(turns), 3) for turns in (0, 1, 18)]
        [0.0, 2.254, 11.811]
        """
        return gaussian_epsilon(2 * math.sqrt(turns) / self.noise, self.delta)


def gaussian_delta(place: float, mu: float) -> float:
    """Delta of a Gaussian mechanism at the epsilon mu * (place + mu / 2); mu is sensitivity / standard deviation.

    Delta is Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (Balle, Wang 2018, theorem 8). Here both
    terms have the factor exp(-place^2 / 2), so that nothing overflows.
    """
    density = math.exp(-place * place / 2) / math.sqrt(2 * math.pi)
    return math.erfc(place / math.sqrt(2)) / 2 - density * tail_ratio(place + mu)


def tail_ratio(x: float) -> float:
    """The chance that a normal number is above x >= 0, divided by the density at x (Mills' ratio)."""
    if x < 5:
        return math.sqrt(math.pi / 2) * math.erfc(x / math.sqrt(2)) * math.exp(x * x / 2)
    ratio = x
    for n in range(60, 0, -1):  # Laplace's continued fraction
        ratio = x + n / ratio
    return 1 / ratio


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon at which a Gaussian mechanism has at most this delta."""
    low, high = -mu / 2, 40.0
    if gaussian_delta(low, mu) <= delta:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if gaussian_delta(middle, mu) <= delta:
            high = middle
        else:
            low = middle
    return mu * (high + mu / 2)


def no_privacy() -> None:
    """Updates are averaged as they are."""


def gaussian(*, noise: float, delta: float = 1e-5) -> Gaussian:
    """Add noise of `noise` times `clip_updates` to the sum of updates clipped to that; epsilon is told at `delta`."""
    return Gaussian(noise, delta)


PRIVACY: dict[str, Callable[..., Gaussian | None]] = {"none": no_privacy, "gaussian": gaussian}


def check_clip(clip: float) -> None:
    """Refuse a length that is not far from where floating point ends: the steps of its grid would have no size."""
    if not LEAST_CLIP <= clip <= MOST_CLIP:
        raise InvalidValue(
            f"clip_updates must be in [{LEAST_CLIP:g}, {MOST_CLIP:g}] with privacy; got {clip:g}"
        )


@dataclass(frozen=True)
class NoiseGrid:
    """The whole numbers in which updates and noise are counted: C is 2^30 to 2^31 steps, the noise 2^bits steps."""

    clip: float
    noise: float

    @property
    def bits(self) -> int:
        """The standard deviation of the noise is two to the power of this, in steps."""
        return 30 + math.frexp(self.noise)[1]

    @property
    def step(self) -> float:
        """The length of a step."""
        return self.noise * self.clip / 2.0**self.bits

    @cached_property
    def max_square_sum(self) -> int:
        """The most that the squares of a client's steps may sum to, exactly: (2^bits / noise)^2."""
        most = Fraction(2**self.bits) / Fraction(self.noise)
        return math.floor(most * most)

    def steps(self, moved: Params) -> Params:
        """A client's update in steps, rounded towards zero; all its tensors together are no longer than C.

        The sum of squares is compared in whole numbers. An update without a finite length counts as none.
        """
        far = global_norm(moved)
        if not math.isfinite(far):
            return {
                name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in moved.items()
            }
        scale = min(1.0, self.clip / far if far else 1.0) / self.step
        while True:
            found = {
                name: (tensor.double() * scale).trunc().to(torch.int64)
                for name, tensor in moved.items()
            }
            if sum(int(tensor.square().sum()) for tensor in found.values()) <= self.max_square_sum:
                return found
            scale *= 1 - 2.0**-20  # the length was rounded down


def private_mean(
    old: Params,
    parts: Sequence[tuple[Reduction, Params]],
    *,
    clip: float,
    noise: float,
    stream: ByteStream,
) -> Params:
    """Each entry moves by the noised sum of the clipped updates, divided by the number of clients that hold it."""
    grid = NoiseGrid(clip, noise)
    total = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in old.items()}
    counts = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
    for reduction, values in parts:
        for name, steps in grid.steps(change(old, reduction, values)).items():
            total[name].add_(steps)
        reduction.add_into(counts, None, 1)
    new: Params = {}
    for name, tensor in old.items():
        drawn = torch.from_numpy(rounded_normal(tensor.numel(), grid.bits, stream))
        # from here on nothing is secret any more: what is made of the noised sum is as private as that
        noised = 2 * total[name] + drawn.view(tensor.shape).to(tensor.device)
        mean = noised.double() * (grid.step / 2) / counts[name]
        new[name] = torch.where(counts[name] > 0, tensor.double() + mean, tensor.double()).to(
            tensor.dtype
        )
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
