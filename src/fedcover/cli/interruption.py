"""What is said when a command is stopped: how to go on."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedcover.cli import console
from fedcover.errors import FedcoverError
from fedcover.host import signals


@contextmanager
def resume_hint_when_stopped(sentence: Callable[[], str]) -> Iterator[None]:
    """Where a signal stops what is done here, say a sentence and leave with its exit code, 130 after Ctrl-C."""
    try:
        yield
    except FedcoverError:  # it tells what could not be kept
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = signals.exit_code(error)
        if code is None:
            raise
        console.notify(sentence())
        sys.exit(code)


def this_command() -> str:
    """The command as it was typed, for a shell, but without beginning anew."""
    return shlex.join(["fedcover", *(word for word in sys.argv[1:] if word != "--overwrite")])
