"""Gaussian noise on a grid, drawn from a cryptographic stream that cannot be guessed or repeated.

The noise is a rounded normal number: floor(2^bits * Z). Karney's method (2016, algorithm N) draws Z
as a sign and k + x by rejection:

- k = 0, 1, ... with a probability proportional to exp(-k^2 / 2),
- x uniform in [0, 1),
- the trial is accepted with the probability exp(-x (2k + x) / 2).

Every decision compares a whole number from the stream with a probability that is known to 128 bits.
Floating point decides where it is far enough from the boundary; otherwise decimals of 60 digits do.
docs/security.md states how far the result can be from a normal number.
"""

import importlib.util
import os
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

import numpy as np

from fedcover.errors import InvalidValue

ByteStream = Callable[[int], bytes]
"""Returns the given number of fresh random bytes."""
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

KEY_BYTES = 32
NOISE_SOURCE = "aes-256-ctr, a key for each round"
"""How the manifest of a private run names the stream."""
MAX_NOISE_BITS = 52
"""The finest grid, as the logarithm of its steps per standard deviation: noise fits in 64 bits."""
CHUNK = 1 << 16
"""How many trials are computed at once."""
CLOSE = 2.0**-40
"""How far from the boundary floating point may decide; its error is below 2^-47."""
_FRACTION_BITS = 63


# ── the stream ──────────────────────────────────────────────────────────────────────────────────


def require_stream() -> None:
    """Raise InvalidValue if the library that makes the stream is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        raise InvalidValue(
            "privacy needs cryptography; in a checkout of fedcover: pip install '.[privacy]'"
        )


def fresh_stream() -> ByteStream:
    """Open a stream of AES-256 in counter mode under a fresh key from the operating system."""
    return keyed_stream(os.urandom(KEY_BYTES))


def keyed_stream(key: bytes) -> ByteStream:
    """Open the stream of a 256-bit key. Use a key only once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if len(key) != KEY_BYTES:
        raise InvalidValue(f"a key of noise must have {KEY_BYTES} bytes; got {len(key)}")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return lambda count: encryptor.update(bytes(count))


def _words(count: int, stream: ByteStream) -> Words:
    return np.frombuffer(stream(8 * count), dtype="<u8").astype(np.uint64, copy=False)


def _word(stream: ByteStream) -> int:
    return int.from_bytes(stream(8), "little")


# ── the noise ───────────────────────────────────────────────────────────────────────────────────


def rounded_normal(count: int, bits: int, stream: ByteStream) -> Numbers:
    """Draw 2 floor(2^bits Z) + 1 for `count` normal numbers Z.

    That is noise in half steps of the grid, symmetric around zero.

    >>> from statistics import pstdev
    >>> noise = rounded_normal(100_000, 30, keyed_stream(bytes(32)))
    >>> round(pstdev((noise / 2**31).tolist()), 2), bool((noise % 2 == 1).all())
    (1.0, True)
    """
    if not 0 <= bits <= MAX_NOISE_BITS:
        raise InvalidValue(f"bits of noise must be in 0..{MAX_NOISE_BITS}; got {bits}")
    noise = np.empty(count, np.int64)
    filled = 0
    while filled < count:
        missing = count - filled
        trials = min(CHUNK, missing * 3 // 2 + 8)
        words = _words(3 * trials, stream).reshape(3, trials)
        accepted = accepted_trials(words, bits, stream)[:missing]
        noise[filled : filled + len(accepted)] = accepted
        filled += len(accepted)
    return noise


def accepted_trials(words: Words, bits: int, stream: ByteStream, close: float = CLOSE) -> Numbers:
    """Return the results of the accepted trials.

    Args:
        words: three random words for each trial: for k, for the sign and x, and for acceptance.
        bits: the logarithm of the grid's steps per standard deviation.
        stream: more random words, where 64 bits cannot decide.
        close: how far from the boundary floating point may decide about acceptance.
    """
    whole = whole_parts(words[0], stream)
    sign = 1 - 2 * (words[1] & np.uint64(1)).astype(np.int64)
    fraction = words[1] >> np.uint64(1)
    x = (fraction.astype(np.float64) + 0.5) * 2.0**-_FRACTION_BITS
    probability = np.exp(-x * (2 * whole + x) / 2)
    threshold = (words[2] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    accepted = threshold < probability
    for trial in np.flatnonzero(np.abs(threshold - probability) < close):
        accepted[trial] = is_accepted(
            int(whole[trial]), int(fraction[trial]), int(words[2][trial]), stream
        )
    steps = (whole << bits) + (fraction >> np.uint64(_FRACTION_BITS - bits)).astype(np.int64)
    noise: Numbers = (sign * (2 * steps + 1))[accepted]
    return noise


def whole_parts(words: Words, stream: ByteStream) -> Numbers:
    """Return the number k of each trial.

    A word that equals the upper half of a boundary is extended by another word of the stream.
    """
    boundaries = _boundaries()
    upper_halves = np.array([boundary >> 64 for boundary in boundaries], np.uint64)
    whole = np.searchsorted(upper_halves, words, side="left").astype(np.int64)
    undecided = upper_halves[np.minimum(whole, len(upper_halves) - 1)] == words
    for trial in np.flatnonzero(undecided):
        extended_word = int(words[trial]) << 64 | _word(stream)
        whole[trial] = bisect_right(boundaries, extended_word)
    return whole


def is_accepted(whole: int, fraction: int, word: int, stream: ByteStream) -> bool:
    """Decide with 128 random bits and 60 digits whether a trial is accepted."""
    with localcontext(prec=60):
        x = (Decimal(fraction) + Decimal("0.5")) / 2**_FRACTION_BITS
        probability = (-x * (2 * whole + x) / 2).exp()
        return (word << 64 | _word(stream)) < int(probability * 2**128)


@cache
def _boundaries() -> list[int]:
    """Return 2^128 times the probability of at most k for k = 0, 1, ..., as far as below 2^128."""
    with localcontext(prec=60):
        densities = [(Decimal(-k * k) / 2).exp() for k in range(30)]
        total = sum(densities)
        boundaries = [int(sum(densities[: k + 1]) / total * 2**128) for k in range(14)]
    return [boundary for boundary in boundaries if boundary < 2**128]
