"""One process at a time in a folder: a lock that the system takes back when its process ends, however it ends."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fedcover.errors import RunError
from fedcover.host.disk import open_regular

LOCK_NAME = ".lock"
TRIES = 5
"""Who only looks whether a folder is in use holds its lock, too, but for a moment."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock for this process alone."""
    try:
        lock = open_regular(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunError(f"cannot write {folder / LOCK_NAME}: {error.strerror}") from error
    with lock:
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not left:
                    raise RunError(f"{folder} is in use by another process") from None
                time.sleep(0.02)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process is at work in a folder, as far as this computer can tell."""
    try:
        with open_regular(folder / LOCK_NAME) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, something else in its place, or a file system without locks
        return False
    return False
