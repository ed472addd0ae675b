"""Memory of the processes that live for a whole run, so that what a round has needed is free for the next one."""

import ctypes
import gc
import sys

M_ARENA_MAX = -8
"""What glibc's `mallopt` calls the number of heaps."""


def tidy() -> None:
    """Look for garbage and give free pages back: messages hang in cycles, and the C library keeps pages until asked."""
    gc.collect()
    if (library := _library()) is not None:
        library.malloc_trim(0)


def one_heap() -> None:
    """Let all threads share one heap; must be called before there are any, else each keeps the most it ever needed."""
    if (library := _library()) is not None:
        library.mallopt(M_ARENA_MAX, 1)


def _library() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
