"""Permission to call functions that a run folder names: by a flag, or by asking the user."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.cli import console
from fedcover.cli.options import add_working_folder_to_path
from fedcover.runs import trust
from fedcover.runs.run_folder import Folder

Trust = Annotated[
    bool,
    Parameter(
        name="--trust",
        help="Import and call the user-defined functions that the run names.",
        negative="",
    ),
]


def is_trusted(folder: Path, flag: bool) -> bool:
    """Decide whether the functions that a run folder names may be called.

    If so, make modules in the working folder importable.
    """
    functions = trust.custom_functions(Folder(folder).read().fields)
    if not functions:
        return False
    if not flag and not _ask_user(folder, list(functions.values())):
        return False
    add_working_folder_to_path()
    return True


def _ask_user(folder: Path, functions: list[str]) -> bool:
    """Ask the user at the terminal. Without a terminal the answer is no."""
    if not (sys.stdin and sys.stdin.isatty() and console.errors.is_terminal):
        return False
    names = ", ".join(map(repr, functions))
    console.notify(f"{folder} wants to import and call: {names}")
    console.errors.print("do you trust the source of this folder? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
