"""Stop in order when the system asks for it: by Ctrl-C, by `kill`, by a terminal that is closed.

Only the standard library is needed, so that a program can prepare for it before it imports anything that takes long.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""What asks a program to stop; who uses `nohup` has SIGHUP ignored, and is left that."""

AGAIN = 2.0
"""Seconds in which further signals mean the same stop: a terminal, torchrun and a service manager send several."""

_last: list[int] = []
"""The signal that has stopped what is done now: packages make other errors of an exception raised in them."""


class Stopped(KeyboardInterrupt):
    """Raised wherever the program is when a signal asks it to stop.

    >>> Stopped(15).number
    15
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(error: BaseException) -> int | None:
    """The exit code of a program that was stopped: 128 and the signal; None if this error is no stop.

    >>> exit_code(Stopped(15)), exit_code(KeyboardInterrupt()), exit_code(ValueError())
    (143, 130, None)
    """
    if isinstance(error, Stopped):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 128 + _last[0] if _last else None


def quietly() -> None:
    """Let signals end the program at once and without a word: nothing is to be saved while it imports."""
    for number in _ours():
        signal.signal(number, _leave)


def ignore_signals() -> None:
    """Ignore signals from now on: a program that is ending keeps its exit code, whoever presses Ctrl-C again."""
    for number in _ours():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Let signals raise `Stopped` in the main thread for a while, so that what was begun is kept.

    A handler of the program's own stays. Where a signal would have ended the program, it does so when all is kept.
    """
    numbers = _ours() if threading.current_thread() is threading.main_thread() else []
    if not numbers:
        yield
        return
    asked = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked or time.monotonic() - asked > AGAIN:
            asked = time.monotonic()
            _last[:] = [number]
            if number not in (signal.SIGINT, signal.SIGTERM):
                silence_closed_terminal()
            raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    ending = 0
    try:
        yield
    except Stopped as stopped:
        ending = stopped.number if before.get(stopped.number) is signal.SIG_DFL else 0
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _last.clear()
        if ending:
            os.kill(os.getpid(), ending)


def silence_closed_terminal() -> None:
    """Say nothing more to a terminal that was closed: an error from it would end the cleaning up."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)


def _ours() -> list[int]:
    """The signals that nobody else has a handler for."""
    return [
        n
        for n in SIGNALS
        if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler, _leave)
    ]


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
