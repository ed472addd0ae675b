"""Files of a run folder: regular ones only, no link followed, written so that a crash leaves the old or the new one.

A run folder may come from anybody. A link in it would have another file read or emptied, a pipe would wait for ever.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

from fedcover.errors import RunError

_SAFELY = (
    os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # a pipe without another end is opened, or refused, at once


def open_regular(path: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Open a file unless it is a link, a folder, a pipe or a device; the file is not emptied.

    >>> open_regular(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is no regular file: '/dev/null'
    """
    try:
        handle = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(
                errno.ELOOP, "it is a symbolic link, which is not followed", str(path)
            ) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    modes = {
        os.O_RDONLY: "rb",
        os.O_WRONLY: "ab" if flags & os.O_APPEND else "wb",
        os.O_RDWR: "r+b",
    }
    return os.fdopen(handle, modes[flags & os.O_ACCMODE])


def read_bytes(path: Path) -> bytes:
    """Read a regular file; an OSError tells what else it is."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a regular file as UTF-8."""
    return read_bytes(path).decode()


def append(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Add to the end of a regular file, which is made if it is not there, and if `durable` see it on disk."""
    with open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place all at once: a reader, or a crash, sees the old one or the new one, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _check_replaceable(path)
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()  # left by a process that was killed, or a link laid there
        with open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:  # it is still there if anything went wrong, Ctrl-C included
        with contextlib.suppress(OSError):
            beside.unlink()


def _check_replaceable(path: Path) -> None:
    """Complain about a link, a pipe or a device: /dev/stdout, say, would be a file from then on."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path))
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))


def sync_folder(folder: Path) -> None:
    """See on disk which files are in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """What went wrong with a file, without its number and path."""
    return str(getattr(error, "strerror", None) or error)


def check_not_linked(path: Path) -> None:
    """Complain if a file, or a folder inside of a run folder, is a link: what it points to would be written."""
    if path.is_symlink():
        raise RunError(f"{path} is a symbolic link, which is not followed")


def check_regular(path: Path) -> None:
    """Complain about a pipe, a device or a folder where a file is named, also by a link: a pipe is waited for for ever.

    >>> check_regular(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is no regular file: '/dev/null'
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
