"""Signal that a fast engine cannot train some clients, so that another engine takes over."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedcover.errors import FedcoverError


class UnsupportedByEngine(FedcoverError):
    """A recipe or model whose step cannot be replayed; another engine trains its clients."""


class CompileFailed(UnsupportedByEngine):
    """A step that cannot be compiled; a second attempt would take seconds and fail again."""


@contextmanager
def reraise_as_unsupported() -> Iterator[None]:
    """Turn any exception of a user's model or recipe into `UnsupportedByEngine`.

    If the error is real, `sequential` raises it again with the original traceback.
    """
    try:
        yield
    except UnsupportedByEngine:
        raise
    except Exception as error:
        raise UnsupportedByEngine(f"its step cannot be replayed ({summarize(error)})") from error


def summarize(error: Exception) -> str:
    """Return the type of an error and the start of its first line.

    >>> summarize(ValueError("no such axis\\nsecond line"))
    'ValueError: no such axis'
    """
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.100}"
