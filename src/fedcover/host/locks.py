"""A lock that lets only one process at a time work in a folder.

The operating system releases it when the process ends, however it ends.
"""

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
"""How often to try: `is_locked` in another process holds the lock for a moment, too."""
RETRY_DELAY = 0.02


@contextlib.contextmanager
def lock_folder(folder: Path, name: str = LOCK_NAME) -> Iterator[None]:
    """Hold a folder's lock during a `with` block.

    Args:
        folder: The folder.
        name: The name of the lock file; locks of different names are independent.

    Raises:
        RunError: another process holds the lock, or the lock file cannot be written.
    """
    try:
        lock = open_regular(folder / name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunError(f"cannot write {folder / name}: {error.strerror}") from error
    with lock:
        for tries_left in reversed(range(TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not tries_left:
                    raise RunError(f"{folder} is in use by another process") from None
                time.sleep(RETRY_DELAY)
        yield


def is_locked(folder: Path, name: str = LOCK_NAME) -> bool:
    """Return whether a process of this computer holds a folder's lock."""
    try:
        with open_regular(folder / name) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, not a regular file, or a file system without locks
        return False
    return False
