"""Memory of the processes that live for a whole run, so that what a round has needed is free for the next one."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""What glibc's `mallopt` calls the number of heaps, and the size from which a piece gets pages of its own."""
LARGE = 32 * 2**10
"""Bytes from which the heap does not grow for a piece; glibc would raise its own limit with every large piece freed."""
PIECE, RESERVE = 512, 4 * 2**20
"""Bytes of the largest pieces that Python keeps in memory of its own, and how much of that to have before it is
needed: a few times what the rounds of a run were seen to differ by."""
TENSOR = 2**20
"""Bytes from which a piece of a node's memory has pages of its own, which are free for others once it is freed."""
TUNABLES = "GLIBC_TUNABLES"
LIMIT = "glibc.malloc.mmap_threshold"
NO_CACHES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
"""Settings of glibc's, read when a program starts, without which every thread has a heap, and keeps up to seven freed
pieces of each size for itself."""


def tidy() -> None:
    """Look for garbage and give free pages back: messages hang in cycles, and the C library keeps pages until asked.

    Python's cache of attributes is emptied too: of names that C code makes anew for every lookup it keeps up to one in
    each of its 4,096 places, so that it fills for hundreds of messages.
    """
    empty_caches = (
        getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    )  # the first since Python 3.13
    empty_caches()
    gc.collect()
    if (library := _library()) is not None:
        library.malloc_trim(0)


@contextmanager
def reserve() -> Iterator[None]:
    """Have Python ask at once for the memory of its own that peaks will need, use all of it, and keep it.

    It asks by the megabyte, and gives back only megabytes in which nothing is left. So whenever a peak is a bit higher
    than all before it, which goes on for hundreds of rounds, pages of the last one are used for the first time, or
    another one comes, and they stay, though nothing more is held. Peaks within the reserve change nothing.
    """
    empty = sys.getsizeof(b"")
    peak = [bytes(PIECE - empty) for _ in range(RESERVE // PIECE)]
    _kept = peak[:: 2**18 // PIECE]  # some of every megabyte, which stays for their sake
    del peak
    yield


def one_heap() -> None:
    """Let all threads share one heap for small pieces; must be called before there are any threads.

    Else each keeps the most that it ever needed. Large pieces (tensors on their way) for which there is no room get
    pages of their own, which go back at once; the heap does not become larger for them.
    """
    if (library := _library()) is not None:
        library.mallopt(M_ARENA_MAX, 1)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)


def own_pages() -> None:
    """Let every large tensor have pages of its own, so that a device never holds the memory of one that it has freed.

    The heap would keep it, up to as much as is in use, for a tensor that fits the place.
    """
    if (library := _library()) is not None:
        library.mallopt(M_MMAP_THRESHOLD, TENSOR)


def no_caches(*, inherited: bool = False) -> None:
    """Start this program anew without the threads' caches, unless that has been done; must be the first thing it does.

    A cache fills for hundreds of rounds, and what is in it is in nobody's use. Programs that are started by this one
    have theirs as usual, unless they inherit this.
    """
    given = os.environ.get(TUNABLES, "")
    if given.endswith(NO_CACHES):
        if not inherited:
            os.environ[TUNABLES] = given.removesuffix(NO_CACHES).rstrip(":")
    elif _library() is not None:
        os.environ[TUNABLES] = f"{given}:{NO_CACHES}".lstrip(":")
        os.execv(sys.executable, sys.orig_argv)


def own_pages_in_children() -> None:
    """Let programs that this one starts give every large piece pages of its own, from their first message on.

    `own_pages` comes too late for the process of a message: by then Flower has fetched the message through a heap that
    keeps up to three times its bytes. Whoever has set this limit of glibc's keeps it.
    """
    given = os.environ.get(TUNABLES, "")
    if _library() is not None and LIMIT not in given:
        os.environ[TUNABLES] = f"{given}:{LIMIT}={TENSOR}".lstrip(":")


def _library() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
