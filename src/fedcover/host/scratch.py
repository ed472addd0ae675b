"""Temporary folders that are removed even if their process is killed: by the next process."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcover.host import locks

SETTLED = 1.0
"""Seconds that a new folder may be without a lock: its process is about to lock it."""


@contextmanager
def folder(kind: str) -> Iterator[Path]:
    """Make a temporary folder for a `with` block; first remove those of dead processes.

    >>> with folder("example") as path:
    ...     path.is_dir()
    True
    >>> path.exists()
    False
    """
    for old_path in abandoned(kind):
        shutil.rmtree(old_path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_prefix(kind)))
    with locks.lock_folder(path):
        try:
            yield path
        finally:
            if (path / locks.LOCK_NAME).exists():  # otherwise `keep` was called
                shutil.rmtree(path, ignore_errors=True)


def keep(path: Path) -> None:
    """Keep a temporary folder: neither the end of its block nor another process removes it."""
    (path / locks.LOCK_NAME).unlink()


def abandoned(kind: str) -> list[Path]:
    """Return this user's temporary folders whose processes ended without removing them."""
    return [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{_prefix(kind)}*")
        if _is_abandoned(path)
    ]


def _is_abandoned(path: Path) -> bool:
    with suppress(OSError):
        lock = (path / locks.LOCK_NAME).lstat()
        is_settled = time.time() - lock.st_mtime > SETTLED
        return lock.st_uid == os.getuid() and is_settled and not locks.is_locked(path)
    return False


def _prefix(kind: str) -> str:
    return f"fedcover-{kind}-"
