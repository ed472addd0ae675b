"""Memory of the processes that live for a whole run, so that what a round has needed is free for the next one."""

import ctypes
import gc
import os
import sys

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""What glibc's `mallopt` calls the number of heaps, and the size from which a piece gets pages of its own."""
LARGE = 32 * 2**10
"""Bytes from which the heap does not grow for a piece; glibc would raise its own limit with every large piece freed."""
SIZES, ROOM = range(48, 513, 16), 64 * 2**10
"""Bytes of the pieces that Python takes from its megabytes for small ones, and how much room there may be for each."""
TUNABLES = "GLIBC_TUNABLES"
NO_CACHES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
"""Settings of glibc's, read when a program starts, without which every thread has a heap, and keeps up to seven freed
pieces of each size for itself."""


def tidy() -> None:
    """Look for garbage and give free pages back: messages hang in cycles, and the C library keeps pages until asked."""
    gc.collect()
    settle()
    if (library := _library()) is not None:
        library.malloc_trim(0)


def settle() -> None:
    """Have Python use once, here and now, all the memory that it has asked for.

    It asks by the megabyte, keeps pages for pieces of each size, and gives back only megabytes in which nothing is
    left. So a page that one peak has used stays, and whenever a peak is a bit higher than all before it, which goes on
    for hundreds of rounds, there is one page more, though nothing more is held. After this there are all of them: up
    to a megabyte, but at once.
    """
    empty = sys.getsizeof(b"")
    peak = [bytes(size - empty) for size in SIZES for _ in range(ROOM // size)]
    del peak  # a megabyte that was asked for only now goes back


def one_heap() -> None:
    """Let all threads share one heap for small pieces; must be called before there are any threads.

    Else each keeps the most that it ever needed. Large pieces (tensors on their way) for which there is no room get
    pages of their own, which go back at once; the heap does not become larger for them.
    """
    if (library := _library()) is not None:
        library.mallopt(M_ARENA_MAX, 1)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)


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


def _library() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
