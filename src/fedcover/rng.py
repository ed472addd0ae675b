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
    text = "/".join([str(seed), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *address: Address) -> torch.Generator:
    """A fresh CPU generator for one address; CPU on purpose, so that every device sees the same draws.

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
