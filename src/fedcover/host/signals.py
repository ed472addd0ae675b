"""Orderly stops: what happens on Ctrl-C, on `kill`, and when the terminal is closed.

This module needs only the standard library. So a program can install its handlers before it imports
anything that takes long.
"""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The signals that ask a program to stop. Under `nohup`, SIGHUP is ignored, and stays so."""

AGAIN = 2.0
"""Seconds in which more signals count as the same stop.

A terminal, torchrun and a service manager may all send one.
"""

RETRY = 0.01
"""Seconds until a stop is raised again after Python has dropped it. See `_raise_dropped_again`."""

_last: list[int] = []
"""The signal that stopped the current block: a package may turn `Stopped` into another error."""


class Stopped(KeyboardInterrupt):
    """Raised in the main thread when a signal asks the program to stop.

    >>> Stopped(15).number
    15
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a program that was stopped: 128 plus the number of the signal.

    Returns:
        The exit code; None if the error was not caused by a stop.

    >>> exit_code(Stopped(15)), exit_code(KeyboardInterrupt()), exit_code(ValueError())
    (143, 130, None)
    """
    if isinstance(error, Stopped):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 128 + _last[0] if _last else None


def exit_quietly_on_signals() -> None:
    """Let signals end the program at once, without output: while it imports, nothing is lost."""
    for number in _unhandled():
        signal.signal(number, _exit_at_once)


def ignore_signals() -> None:
    """Ignore signals from now on, so that a program that is ending keeps its exit code."""
    for number in _unhandled():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Let signals raise `Stopped` during a `with` block, so that the block can save its work.

    Handlers of the program's own stay in place. A signal that would have ended the program does so
    after the block.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = _unhandled() if in_main_thread else []
    if not numbers:
        yield
        return
    main_thread = threading.get_ident()
    stopped_at = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_at
        if stopped_at and time.monotonic() - stopped_at <= AGAIN:
            return
        stopped_at = time.monotonic()
        _last[:] = [number]
        if number not in (signal.SIGINT, signal.SIGTERM):
            silence_closed_terminal()
        raise Stopped(number)

    def retry(number: int) -> None:
        nonlocal stopped_at
        stopped_at = 0.0
        signal.pthread_kill(main_thread, number)

    old_handlers = {number: signal.signal(number, stop) for number in numbers}
    fatal_signal = None
    try:
        with _raise_dropped_again(retry):
            yield
    except Stopped as stopped:
        if old_handlers.get(stopped.number) is signal.SIG_DFL:
            fatal_signal = stopped.number
        raise
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        _last.clear()
        if fatal_signal is not None:
            os.kill(os.getpid(), fatal_signal)


@contextmanager
def _raise_dropped_again(retry: Callable[[int], None]) -> Iterator[None]:
    """Call `retry` shortly after a `Stopped` that Python has dropped.

    Python drops what is raised in a `__del__` method or in the callback of a weak reference, and
    prints a traceback. A signal that arrives there would neither stop the program nor be quiet.
    """
    old_hook = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, Stopped):
            old_hook(unraisable)
            return
        timer = threading.Timer(RETRY, retry, [unraisable.exc_value.number])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = old_hook


def silence_closed_terminal() -> None:
    """Discard output to a terminal: after it was closed, writing would fail during the cleanup."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(null_device, stream)


def _unhandled() -> list[int]:
    """Return the signals for which the program has no handler of its own."""
    default_handlers = (signal.SIG_DFL, signal.default_int_handler, _exit_at_once)
    return [number for number in SIGNALS if signal.getsignal(number) in default_handlers]


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
