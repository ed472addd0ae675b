"""Seed every random draw by its purpose (an address), so that the order of calls is irrelevant."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Address = str | int


def key(seed: int, *address: Address) -> int:
    """Derive a 63-bit seed from a seed and an address.

    >>> key(0, "shuffle", 3, 17) == key(0, "shuffle", 3, 17)
    True
    >>> key(0, "shuffle", 3, 17) == key(0, "shuffle", 31, 7)
    False
    """
    return _digest(seed, *address, bits=64) >> 1


def _digest(seed: int, *address: Address, bits: int) -> int:
    text = "/".join([str(seed), *map(str, address)])
    digest = hashlib.blake2b(text.encode(), digest_size=bits // 8).digest()
    return int.from_bytes(digest, "big")


def generator(seed: int, *address: Address) -> torch.Generator:
    """Create a torch generator for an address, on the CPU so that draws do not depend on devices.

    Torch uses 32 bits of a seed, so among n addresses about n^2 / 2^33 pairs draw alike. This does
    no harm to the shuffles of one round. Use `wide_generator` for very many addresses.

    >>> first, second = (torch.rand(3, generator=generator(0, "a", 1)) for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    return torch.Generator().manual_seed(key(seed, *address))


def numpy_generator(seed: int, *address: Address) -> np.random.Generator:
    """Create a NumPy generator for an address, for draws that torch lacks (Dirichlet, choice).

    >>> int(numpy_generator(0, "cohort", 1).integers(100)) < 100
    True
    """
    return np.random.Generator(np.random.PCG64(key(seed, *address)))


def wide_generator(seed: int, *address: Address) -> np.random.Generator:
    """Create a NumPy generator with a 256-bit seed, for millions of addresses.

    With so many addresses, seeds of 32 bits would repeat.

    >>> wide_generator(0, "data", 1).random() == wide_generator(0, "data", 1).random()
    True
    """
    return np.random.Generator(np.random.PCG64(_digest(seed, *address, bits=256)))


@contextmanager
def seeded(seed: int, *address: Address) -> Iterator[None]:
    """Seed torch's global generator inside a block (weight initialisation), then restore it.

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
