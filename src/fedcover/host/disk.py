"""Safe reading and writing of files that others may have tampered with.

A run folder may come from anybody. A symbolic link in it could make fedcover read or empty another
file, and a pipe would block forever. So only regular files are opened, and no link is followed.
Writing is atomic: after a crash, the old or the new file is there, never half of one.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

from fedcover.errors import RunError

# O_NONBLOCK: opening a pipe without another end returns, or fails, at once.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


# ── reading and writing ─────────────────────────────────────────────────────────────────────────


def open_regular(path: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Open a file without emptying it.

    Raises:
        OSError: the file is missing, or a link, a folder, a pipe or a device.

    >>> open_regular(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is not a regular file: '/dev/null'
    """
    try:
        handle = os.open(path, flags | _SAFE_FLAGS, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise _is_symlink(path) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        raise _is_not_regular(path)
    modes = {
        os.O_RDONLY: "rb",
        os.O_WRONLY: "ab" if flags & os.O_APPEND else "wb",
        os.O_RDWR: "r+b",
    }
    return os.fdopen(handle, modes[flags & os.O_ACCMODE])


def read_bytes(path: Path) -> bytes:
    """Read a regular file; raise OSError if it is anything else."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a regular file as UTF-8."""
    return read_bytes(path).decode()


def append(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Append to a regular file, or create it; with `durable`, wait until it is on disk."""
    with open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new content, even after a crash.

    Raises:
        RunError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _check_replaceable(path)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # of a killed process with the same number, or planted by somebody
        with open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # it still exists after any failure, Ctrl-C included


def sync_folder(folder: Path) -> None:
    """Wait until the list of files in a folder is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ── checks and errors ───────────────────────────────────────────────────────────────────────────


def check_not_linked(path: Path) -> None:
    """Raise RunError for a symbolic link: writing would change the file that it points to."""
    if path.is_symlink():
        raise RunError(f"{path} is a symbolic link, which is not followed")


def check_regular(path: Path) -> None:
    """Raise OSError unless a path leads to a regular file; links are followed.

    >>> check_regular(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is not a regular file: '/dev/null'
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise _is_not_regular(path)


def reason(error: Exception) -> str:
    """Return what went wrong with a file, without the error number and the path."""
    return str(getattr(error, "strerror", None) or error)


def _check_replaceable(path: Path) -> None:
    """Raise OSError for a link, a pipe or a device: /dev/stdout, say, would become a file."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise _is_symlink(path)
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _is_not_regular(path)


def _is_symlink(path: Path) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path))


def _is_not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
