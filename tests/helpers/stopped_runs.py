"""Run folders as a crash would have left them."""

import shutil
from collections.abc import Callable
from pathlib import Path


def images(folder: Path, go: Callable) -> dict[int, Path]:
    """Run to the end; return a copy of the folder after each round, by the number of
    rounds done.
    """
    copies = {}

    def copy(report):
        rounds_done = report.round + 1
        copies[rounds_done] = Path(
            shutil.copytree(folder, folder.with_name(f"{folder.name}-{rounds_done}"))
        )

    go(watch=copy)
    return copies


def files(folder: Path) -> set[Path]:
    """The files of a folder, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
