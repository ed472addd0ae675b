"""Stops: how a command ends when it gets a signal, and what it prints."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcover.cli import console
from fedcover.errors import FedcoverError
from fedcover.host import signals


@contextmanager
def resume_hint_when_stopped(hint: Callable[[], str]) -> Iterator[None]:
    """Print a hint if a signal stops the block, and exit with its code (130 for Ctrl-C)."""
    try:
        yield
    except FedcoverError:  # its message already names what could not be saved
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = signals.exit_code(error)
        if code is None:
            raise
        console.notify(hint())
        sys.exit(code)


def stopped_hint(folder: Path, resume_command: str) -> str:
    """Return what to say about a run that was stopped, perhaps before it had a folder."""
    if not (folder / "experiment.toml").exists():
        return "stopped before the run began"
    return f"stopped; resume with: {resume_command}"


def this_command() -> str:
    """Return the command line as typed, quoted for a shell, without `--overwrite`."""
    return shlex.join(["fedcover", *(word for word in sys.argv[1:] if word != "--overwrite")])


def stop_once_on_signals() -> None:
    """Clean up after SIGTERM, a closed terminal and Ctrl-C, even where a shell ignores Ctrl-C.

    Under `nohup`, SIGHUP stays ignored.
    """
    for number in signals.SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_signal)


def _handle_signal(number: int, frame: object) -> None:
    """Begin to clean up. It takes seconds, and a second Ctrl-C must not interrupt it."""
    for other in signals.SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGHUP:
        signals.silence_closed_terminal()
    raise signals.Stopped(number)
