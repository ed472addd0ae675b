"""Randomness with an address: every draw says what it is for, so nothing depends on the order of calls."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Address = str | int


def key(seed: int, *address: Address) -> int:
    """The 63-bit number that belongs to one address under one seed.

    >>> key(0, "shuffle", 3, 17) == key(0, "shuffle", 3, 17)
    True
    >>> key(0, "shuffle", 3, 17) == key(0, "shuffle", 31, 7)
    False
    """
    return _digest(seed, *address, bits=64) >> 1


def _digest(seed: int, *address: Address, bits: int) -> int:
    text = "/".join([str(seed), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=bits // 8).digest(), "big")


def generator(seed: int, *address: Address) -> torch.Generator:
    """A fresh CPU generator for one address; CPU on purpose, so that every device sees the same draws.

    Of the key torch takes 32 bits, so of n addresses about n^2 / 2^33 pairs draw alike: no harm to shuffles of one
    round. What must differ between very many addresses is drawn by `wide_generator`.

    >>> torch.equal(torch.rand(3, generator=generator(0, "a", 1)), torch.rand(3, generator=generator(0, "a", 1)))
    True
    """
    return torch.Generator().manual_seed(key(seed, *address))


def numpy_generator(seed: int, *address: Address) -> np.random.Generator:
    """The same address for NumPy, which has the distributions that torch lacks (Dirichlet, choice).

    >>> int(numpy_generator(0, "cohort", 1).integers(100)) < 100
    True
    """
    return np.random.Generator(np.random.PCG64(key(seed, *address)))


def wide_generator(seed: int, *address: Address) -> np.random.Generator:
    """A NumPy generator for one address out of so many that 32 bits, or 63, would repeat: it takes 256.

    >>> float(wide_generator(0, "data", 1).random()) == float(wide_generator(0, "data", 1).random())
    True
    """
    return np.random.Generator(np.random.PCG64(_digest(seed, *address, bits=256)))


@contextmanager
def seeded(seed: int, *address: Address) -> Iterator[None]:
    """Run code that insists on torch's global generator (weight initialisation) without leaving a trace.

    >>> with seeded(0, "init"):
    ...     a = torch.rand(1)
    >>> with seeded(0, "init"):
    ...     b = torch.rand(1)
    >>> bool(a == b)
    True
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key(seed, *address))
        yield
