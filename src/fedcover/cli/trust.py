"""Whether functions that a run folder names are called: by a flag, or by what a person at the terminal answers."""

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
        help="Import and call the functions of its own that the run names.",
        negative="",
    ),
]


def is_trusted(folder: Path, flag: bool) -> bool:
    """Whether what a run folder names may be called; modules are then looked for in the current folder, too."""
    named = trust.custom_functions(Folder(folder).read().fields)
    if not named or not (flag or _ask_user(folder, list(named.values()))):
        return False
    add_working_folder_to_path()
    return True


def _ask_user(folder: Path, texts: list[str]) -> bool:
    """What a person says who is asked; where nobody can be asked, no."""
    if not (sys.stdin and sys.stdin.isatty() and console.errors.is_terminal):
        return False
    console.notify(f"{folder} would have this imported and called: {', '.join(map(repr, texts))}")
    console.errors.print("do you trust where it comes from? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
