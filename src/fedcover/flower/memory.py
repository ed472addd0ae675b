"""Return memory to the system: after a round, and from the processes of a node's messages."""

import ctypes
import gc
import os
import sys

TUNABLES = "GLIBC_TUNABLES"
"""The environment variable with settings that glibc reads when a program starts."""
MMAP_SETTING = "glibc.malloc.mmap_threshold"
MAPPED_TENSOR = 2**20
"""Bytes from which a tensor on a node has pages of its own, which are free once it is freed."""


def release_memory() -> None:
    """Collect garbage, and return free pages to the system.

    Messages are parts of reference cycles, and the C library keeps free pages until asked.
    """
    gc.collect()
    if (library := _load_glibc()) is not None:
        library.malloc_trim(0)


def map_large_tensors_in_children() -> None:
    """Let programs that this one starts give every large tensor pages of its own.

    Freeing the tensor then returns its memory. Otherwise the process of a message keeps the heap
    through which Flower has fetched the message. A limit that the user has set stays.
    """
    settings = os.environ.get(TUNABLES, "")
    if _load_glibc() is not None and MMAP_SETTING not in settings:
        os.environ[TUNABLES] = f"{settings}:{MMAP_SETTING}={MAPPED_TENSOR}".lstrip(":")


def _load_glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
