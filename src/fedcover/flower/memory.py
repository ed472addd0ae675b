"""Keep the memory of long-lived processes level, by settings of Python and of glibc."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""Options of glibc's `mallopt`: the number of heaps, and the size of pieces with own pages."""
HEAP_LIMIT = 32 * 2**10
"""Bytes from which a piece gets pages of its own if the heap has no room.

Without this setting glibc would raise its limit with every large piece that is freed.
"""
RESERVE_PIECE, RESERVE = 512, 4 * 2**20
"""Bytes of the largest pieces in Python's own memory, and bytes of that memory to reserve.

The reserve is a few times the difference that was measured between the rounds of a run.
"""
MAPPED_TENSOR = 2**20
"""Bytes from which a tensor on a node has pages of its own, which are free once it is freed."""
TUNABLES = "GLIBC_TUNABLES"
MMAP_SETTING = "glibc.malloc.mmap_threshold"
NO_CACHES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
"""Settings that glibc reads when a program starts: one heap, and no caches of threads.

Otherwise every thread keeps up to seven freed pieces of each size.
"""
_MEGABYTES_APART = 2**18 // RESERVE_PIECE


def release_memory() -> None:
    """Collect garbage, and return free pages to the system.

    Messages are parts of reference cycles, and the C library keeps free pages until asked.
    Python's cache of attributes is emptied too. It keeps names that C code makes anew for every
    lookup, up to one in each of its 4,096 entries, so it would grow for hundreds of messages.
    """
    # the first function exists since Python 3.13
    clear_caches = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear_caches()
    gc.collect()
    if (library := _load_glibc()) is not None:
        library.malloc_trim(0)


@contextmanager
def memory_reserve() -> Iterator[None]:
    """Let Python allocate at once the memory that peaks will need, and keep it.

    Python allocates by the megabyte, and returns only megabytes that are empty. So whenever a
    peak is a little higher than all before, new pages are used and stay in use, although nothing
    more is alive. That goes on for hundreds of rounds. Peaks within the reserve change nothing.
    """
    piece_bytes = RESERVE_PIECE - sys.getsizeof(b"")
    peak = [bytes(piece_bytes) for _ in range(RESERVE // RESERVE_PIECE)]
    _kept_pieces = peak[::_MEGABYTES_APART]  # some in every megabyte, so that none is returned
    del peak
    yield


def share_one_heap() -> None:
    """Let all threads share one heap; call it before any thread is started.

    Otherwise each thread keeps the most memory that it ever needed. Large pieces that do not fit
    into the heap get pages of their own, which are returned at once; the heap does not grow.
    """
    if (library := _load_glibc()) is not None:
        library.mallopt(M_ARENA_MAX, 1)
        library.mallopt(M_MMAP_THRESHOLD, HEAP_LIMIT)


def map_large_tensors() -> None:
    """Give every large tensor pages of its own, so that freeing it returns its memory.

    The heap would keep the memory, up to as much as is in use, for a tensor of the same size.
    """
    if (library := _load_glibc()) is not None:
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_TENSOR)


def disable_thread_caches(*, inherited: bool = False) -> None:
    """Restart this program without caches of threads, unless that was done; call it first.

    The caches fill for hundreds of rounds with memory that nobody uses.

    Args:
        inherited: Whether programs that this one starts do without caches, too.
    """
    settings = os.environ.get(TUNABLES, "")
    if settings.endswith(NO_CACHES):
        if not inherited:
            os.environ[TUNABLES] = settings.removesuffix(NO_CACHES).rstrip(":")
    elif _load_glibc() is not None:
        os.environ[TUNABLES] = f"{settings}:{NO_CACHES}".lstrip(":")
        os.execv(sys.executable, sys.orig_argv)


def map_large_tensors_in_children() -> None:
    """Let programs that this one starts give large pieces pages of their own from the start.

    `map_large_tensors` is too late for the process of a message. By then Flower has fetched the
    message through a heap that keeps up to three times its bytes. A limit that the user has set
    stays.
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
