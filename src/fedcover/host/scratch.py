"""Folders for a while, in the system's place for such; what a killed process has left is removed by the next."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcover.host import locks

SETTLED = 1.0
"""Seconds after which a folder that nobody holds is not one that somebody is just about to hold."""


@contextmanager
def folder(kind: str) -> Iterator[Path]:
    """Make a folder of some kind and remove it at the end, and before that those of dead processes.

    >>> with folder("example") as place:
    ...     place.is_dir()
    True
    >>> place.exists()
    False
    """
    for left in abandoned(kind):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_prefix(kind)))
    with locks.lock_folder(path):
        try:
            yield path
        finally:
            if (path / locks.LOCK_NAME).exists():
                shutil.rmtree(path, ignore_errors=True)


def keep(path: Path) -> None:
    """Leave a folder to be looked at: neither its end nor another process removes it."""
    (path / locks.LOCK_NAME).unlink()


def abandoned(kind: str) -> list[Path]:
    """Return this user's folders of a kind whose processes have ended without removing them."""
    return [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{_prefix(kind)}*")
        if _is_abandoned(path)
    ]


def _is_abandoned(path: Path) -> bool:
    with suppress(OSError):
        lock = (path / locks.LOCK_NAME).lstat()
        settled = time.time() - lock.st_mtime > SETTLED
        return lock.st_uid == os.getuid() and settled and not locks.is_locked(path)
    return False


def _prefix(kind: str) -> str:
    return f"fedcover-{kind}-"
