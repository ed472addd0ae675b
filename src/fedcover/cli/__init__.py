"""The command-line interface. Errors are reported in one sentence."""

import os
import sys

from cyclopts import CycloptsError

from fedcover.cli import audit as audit
from fedcover.cli import bench as bench
from fedcover.cli import certify as certify
from fedcover.cli import console
from fedcover.cli import data as data
from fedcover.cli import device as device
from fedcover.cli import flower as flower
from fedcover.cli import list_names as list_names
from fedcover.cli import plan as plan
from fedcover.cli import report as report
from fedcover.cli import reproduce as reproduce
from fedcover.cli import run as run
from fedcover.cli import sweep as sweep
from fedcover.cli.options import app
from fedcover.errors import FedcoverError, InvalidValue, RunError
from fedcover.host.disk import reason
from fedcover.runs.launch import torchrun_rank
from fedcover.runs.worker import join_torchrun


def main() -> None:
    """Run the command line. Exit with code 2 if the input is wrong, and 1 on other errors."""
    # Only the first process of torchrun reads the arguments; the others wait for work.
    if torchrun_rank() and sys.argv[1:2] in (["run"], ["resume"]):
        return join_torchrun()
    try:
        with console.show_log():
            app(sys.argv[1:], exit_on_error=False, print_error=False)
        if sys.stdout:
            sys.stdout.flush()  # so that an error is raised here, where it can be reported
    except InvalidValue as error:
        _leave(error, 2)
    except FedcoverError as error:
        _leave(error, 1)
    except CycloptsError as error:
        _leave(error, 2)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        _leave(RunError(f"cannot write the output: {reason(error)}"), 1)


def _discard_output() -> None:
    """Redirect pending output to nowhere; Python would fail again when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(error: Exception, code: int) -> None:
    console.notify(f"fedcover: {error}")
    sys.exit(code)
