"""Gaussian noise on a grid, from a cryptographic stream that nobody can search or draw again.

Drawn is a normal number Z, rounded: floor(2^bits * Z). Karney's method (2016, algorithm N) gives Z = k + x and a sign:
k = 0, 1, ... in proportion to exp(-k^2 / 2), x uniform in [0, 1), kept with probability exp(-x (2k + x) / 2). Every
decision compares whole numbers of the stream with a probability known to 128 bits: floating point proposes it, and
decimals of 60 digits decide where that is too close to a boundary. docs/security.md says how far all that is from a
normal number.
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
"""As many fresh bytes as are asked for."""
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

KEY_BYTES = 32
NOISE_SOURCE = "aes-256-ctr, a key for each round"
"""How the manifest of a private run calls this."""
MOST_BITS = 52
"""The grid has at most so many steps in a standard deviation: all whole numbers drawn then fit in 64 bits."""
CHUNK = 1 << 16
CLOSE = 2.0**-40
"""Floating point decides only where it is further from the boundary than this; its error is below 2^-47."""
_FRACTION = 63


def require_stream() -> None:
    """Complain if the library that makes the stream is not there."""
    if importlib.util.find_spec("cryptography") is None:
        raise InvalidValue(
            "privacy needs cryptography; in a checkout of fedcover: pip install '.[privacy]'"
        )


def fresh_stream() -> ByteStream:
    """AES-256 in counter mode under a key that the operating system makes for this stream alone."""
    return keyed_stream(os.urandom(KEY_BYTES))


def keyed_stream(key: bytes) -> ByteStream:
    """The stream of one key of 256 bits; a key must serve once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if len(key) != KEY_BYTES:
        raise InvalidValue(f"a key of noise must have {KEY_BYTES} bytes; got {len(key)}")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return lambda count: encryptor.update(bytes(count))


def rounded_normal(count: int, bits: int, stream: ByteStream) -> Numbers:
    """Draw 2 floor(2^bits Z) + 1 for normal numbers Z: noise in half steps of the grid, symmetric around zero.

    >>> from statistics import pstdev
    >>> drawn = rounded_normal(100_000, 30, keyed_stream(bytes(32)))
    >>> round(pstdev((drawn / 2**31).tolist()), 2), bool((drawn % 2 == 1).all())
    (1.0, True)
    """
    if not 0 <= bits <= MOST_BITS:
        raise InvalidValue(f"bits of noise must be in 0..{MOST_BITS}; got {bits}")
    drawn = np.empty(count, np.int64)
    done = 0
    while done < count:
        size = min(CHUNK, (count - done) * 3 // 2 + 8)
        kept = accepted_trials(_words(3 * size, stream).reshape(3, size), bits, stream)[
            : count - done
        ]
        drawn[done : done + len(kept)] = kept
        done += len(kept)
    return drawn


def accepted_trials(words: Words, bits: int, stream: ByteStream, close: float = CLOSE) -> Numbers:
    """What is kept of trials: each has a word for k, a word for the sign and x, and a word that keeps or rejects."""
    whole = whole_parts(words[0], stream)
    fraction = words[1] >> np.uint64(1)
    sign = 1 - 2 * (words[1] & np.uint64(1)).astype(np.int64)
    x = (fraction.astype(np.float64) + 0.5) * 2.0**-_FRACTION
    chance = np.exp(-x * (2 * whole + x) / 2)
    level = (words[2] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    kept = level < chance
    for place in np.flatnonzero(np.abs(level - chance) < close):
        kept[place] = keeps(int(whole[place]), int(fraction[place]), int(words[2][place]), stream)
    steps = (whole << bits) + (fraction >> np.uint64(_FRACTION - bits)).astype(np.int64)
    drawn: Numbers = (sign * (2 * steps + 1))[kept]
    return drawn


def whole_parts(words: Words, stream: ByteStream) -> Numbers:
    """The number k of each trial; a word that meets the first half of a boundary is compared with its second half."""
    boundaries = _boundaries()
    first = np.array([boundary >> 64 for boundary in boundaries], np.uint64)
    whole = np.searchsorted(first, words, side="left").astype(np.int64)
    met = first[np.minimum(whole, len(first) - 1)] == words
    for place in np.flatnonzero(met):
        whole[place] = bisect_right(boundaries, int(words[place]) << 64 | _word(stream))
    return whole


def keeps(whole: int, fraction: int, word: int, stream: ByteStream) -> bool:
    """Whether a trial is kept, decided by 128 bits of the stream and 60 digits."""
    with localcontext(prec=60):
        x = (Decimal(fraction) + Decimal("0.5")) / 2**_FRACTION
        chance = (-x * (2 * whole + x) / 2).exp()
        return (word << 64 | _word(stream)) < int(chance * 2**128)


@cache
def _boundaries() -> list[int]:
    """2^128 times the probability of at most k, for k = 0, 1, ... up to the last boundary below 2^128."""
    with localcontext(prec=60):
        shares = [(Decimal(-k * k) / 2).exp() for k in range(30)]
        below = [int(sum(shares[: k + 1]) / sum(shares) * 2**128) for k in range(14)]
    return [boundary for boundary in below if boundary < 2**128]


def _words(count: int, stream: ByteStream) -> Words:
    return np.frombuffer(stream(8 * count), dtype="<u8").astype(np.uint64, copy=False)


def _word(stream: ByteStream) -> int:
    return int.from_bytes(stream(8), "little")
