"""What a command prints when it is stopped: how to resume."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def this_command() -> str:
    """Return the command line as typed, quoted for a shell, without `--overwrite`."""
    return shlex.join(["fedcover", *(word for word in sys.argv[1:] if word != "--overwrite")])
