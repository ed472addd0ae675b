"""A real disk that is small enough to be filled."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")
"""Bytes of the pieces in which such a disk is given away."""


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """An empty disk of so many bytes; the test is skipped where none can be had."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if (
        not shutil.which("mount")
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip(
            "a small disk can be mounted only by root, on Linux, where the container allows it"
        )
    try:
        yield place
    finally:
        subprocess.run(
            ["umount", "-l", place], check=True
        )  # at once, even if a killed process is still about to end


def fill(disk: Path, spare: int = 0) -> Path:
    """A file that takes all the room there is, but for some spare bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError:
            file.truncate(max(0, file.tell() - spare))
    return filler
