"""Client-level differential privacy: clip every update, and add Gaussian noise to their sum.

In each round, S is the sum of the clients' updates, each clipped to length C over all the entries
that the client holds. The server releases S plus noise of standard deviation z * C on every covered
entry. An entry then moves by the noised sum divided by the number n of clients that hold it, so its
mean has noise z * C / n. An entry that nobody holds does not move and needs no noise.

S and the noise are whole numbers of steps of a grid, so no floating-point rounding can reveal S.
docs/security.md states the guarantee and its conditions.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch

from fedcover.errors import InvalidValue
from fedcover.server.clipping import change
from fedcover.server.grid_noise import ByteStream, rounded_normal
from fedcover.tensors import norm, zeros_like
from fedcover.types import Params, Reduction

MIN_NOISE, MAX_NOISE = 0.01, 1e6
"""Limits against typing errors: less noise protects nobody, more leaves nothing to learn."""
MIN_DELTA = 1e-15
MIN_CLIP, MAX_CLIP = 1e-30, 1e30


# ── the privacy loss ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The Gaussian mechanism.

    `noise`: the standard deviation of the noise, as a multiple of the clipping length.
    `delta`: the delta for which epsilon is reported.
    """

    noise: float
    delta: float

    def __post_init__(self) -> None:
        if not MIN_NOISE <= self.noise <= MAX_NOISE:
            raise InvalidValue(
                f"privacy gaussian: noise must be in [{MIN_NOISE:g}, {MAX_NOISE:g}]; "
                f"got {self.noise:g}"
            )
        if not MIN_DELTA <= self.delta < 1:
            raise InvalidValue(
                f"privacy gaussian: delta must be in [{MIN_DELTA:g}, 1); got {self.delta:g}"
            )

    def epsilon(self, participations: int) -> float:
        """Return the exact epsilon of a client that has taken part that many times.

        Two fleets are neighbours if they differ in the data of one client. Its clipped update then
        differs by up to 2 C, so the noise is z / 2 times the sensitivity. There is no amplification
        by sampling: who takes part follows from the seed, and the masks show it. After k
        participations all rounds together are one Gaussian mechanism of sqrt(k) times the
        sensitivity (Dong, Roth, Su 2022).

        >>> [round(Gaussian(noise=4.0, delta=1e-6).epsilon(k), 3) for k in (0, 1, 18)]
        [0.0, 2.254, 11.811]
        """
        return gaussian_epsilon(2 * math.sqrt(participations) / self.noise, self.delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which a Gaussian mechanism has at most this delta.

    `mu` is the sensitivity divided by the standard deviation of the noise.
    """
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


def gaussian_delta(t: float, mu: float) -> float:
    """Return delta of a Gaussian mechanism at epsilon = mu * (t + mu / 2).

    Delta is Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (Balle, Wang 2018,
    theorem 8). Here both terms have the factor exp(-t^2 / 2), so that nothing overflows.
    """
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return math.erfc(t / math.sqrt(2)) / 2 - density * tail_ratio(t + mu)


def tail_ratio(x: float) -> float:
    """Return the probability that a normal number exceeds x >= 0, divided by the density at x.

    This is Mills' ratio.
    """
    if x < 5:
        return math.sqrt(math.pi / 2) * math.erfc(x / math.sqrt(2)) * math.exp(x * x / 2)
    ratio = x
    for n in range(60, 0, -1):  # Laplace's continued fraction
        ratio = x + n / ratio
    return 1 / ratio


def max_participations(cohorts: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield, after each round, how often the most often sampled client has been sampled.

    >>> list(max_participations([[1, 2], [3, 4], [2, 3], [2, 5]]))
    [1, 1, 2, 3]
    """
    participations: Counter[int] = Counter()
    most = 0
    for cohort in cohorts:
        participations.update(cohort)
        most = max([most, *(participations[client] for client in cohort)])
        yield most


class PrivacyAccountant:
    """Report the privacy loss of a run, whose rounds may be asked for in any order.

    The loss follows from how often the most often sampled client has been sampled. Each cohort is
    counted once.
    """

    def __init__(self, privacy: Gaussian, cohorts: Iterable[Sequence[int]]) -> None:
        self._privacy = privacy
        self._max_by_round: list[int] = []
        self._remaining = max_participations(cohorts)

    def max_participations(self, round: int) -> int:
        """Return how often the most often sampled client has been sampled after a round."""
        missing = max(0, round + 1 - len(self._max_by_round))
        self._max_by_round.extend(itertools.islice(self._remaining, missing))
        return self._max_by_round[round]

    def epsilon(self, round: int) -> float:
        """Return the epsilon of that client after a round."""
        return self._privacy.epsilon(self.max_participations(round))


# ── the table ───────────────────────────────────────────────────────────────────────────────────


def no_privacy() -> None:
    """Average the updates as they are."""


def gaussian(*, noise: float, delta: float = 1e-5) -> Gaussian:
    """Add noise of `noise` times `clip_updates` to the clipped sum; report epsilon at `delta`."""
    return Gaussian(noise, delta)


PRIVACY: dict[str, Callable[..., Gaussian | None]] = {"none": no_privacy, "gaussian": gaussian}
"""All privacy mechanisms, by the name that an experiment gives them."""


def check_clip(clip: float) -> None:
    """Raise InvalidValue for a clipping length whose grid floating point cannot represent."""
    if not MIN_CLIP <= clip <= MAX_CLIP:
        raise InvalidValue(
            f"clip_updates must be in [{MIN_CLIP:g}, {MAX_CLIP:g}] with privacy; got {clip:g}"
        )


# ── the private mean ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NoiseGrid:
    """The grid in whose steps updates and noise are counted.

    The clipping length is 2^30 to 2^31 steps; the standard deviation of the noise is 2^bits steps.
    """

    clip: float
    noise: float

    @property
    def bits(self) -> int:
        """The logarithm of the standard deviation of the noise, in steps."""
        return 30 + math.frexp(self.noise)[1]

    @property
    def step(self) -> float:
        """The length of a step."""
        return self.noise * self.clip / 2.0**self.bits

    @cached_property
    def max_square_sum(self) -> int:
        """The largest sum of squares of a client's steps, exactly: (2^bits / noise)^2."""
        clip_in_steps = Fraction(2**self.bits) / Fraction(self.noise)
        return math.floor(clip_in_steps * clip_in_steps)

    def steps(self, difference: Params) -> Params:
        """Return a client's update in steps, clipped, each entry rounded towards zero.

        The clipped length is checked in whole numbers. An update whose length is not finite becomes
        zero.
        """
        length = norm(difference.values())
        if not math.isfinite(length):
            return zeros_like(difference, torch.int64)
        scale = min(1.0, self.clip / length if length else 1.0) / self.step
        while True:
            steps = {
                name: (tensor.double() * scale).trunc().to(torch.int64)
                for name, tensor in difference.items()
            }
            square_sum = sum(int(tensor.square().sum()) for tensor in steps.values())
            if square_sum <= self.max_square_sum:
                return steps
            scale *= 1 - 2.0**-20  # the length was rounded down: clip a little more


def private_mean(
    old: Params,
    parts: Sequence[tuple[Reduction, Params]],
    *,
    clip: float,
    noise: float,
    stream: ByteStream,
) -> Params:
    """Move each entry by the noised sum of the clipped updates, divided by its number of holders.

    Args:
        old: the global parameters.
        parts: for each client, the part that it trained and its values.
        clip: the clipping length.
        noise: the standard deviation of the noise, as a multiple of `clip`.
        stream: a fresh cryptographic stream, which nobody else may have.

    Returns:
        The new global parameters; entries that nobody holds keep their value.
    """
    grid = NoiseGrid(clip, noise)
    total_steps = zeros_like(old, torch.int64)
    counts = zeros_like(old, torch.float64)
    for reduction, values in parts:
        for name, steps in grid.steps(change(old, reduction, values)).items():
            total_steps[name].add_(steps)
        reduction.add_into(counts, None, 1)
    new: Params = {}
    for name, tensor in old.items():
        half_steps = torch.from_numpy(rounded_normal(tensor.numel(), grid.bits, stream))
        noise_tensor = half_steps.view(tensor.shape).to(tensor.device)
        # From here on nothing is secret: any function of the noised sum is as private as the sum.
        noised = 2 * total_steps[name] + noise_tensor
        mean = noised.double() * (grid.step / 2) / counts[name]
        moved = torch.where(counts[name] > 0, tensor.double() + mean, tensor.double())
        new[name] = moved.to(tensor.dtype)
    return new
