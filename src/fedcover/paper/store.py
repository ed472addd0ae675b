"""Stored results: one JSON-lines file per data set, one line per cell and seed."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.errors import RunError
from fedcover.host.disk import read_text, reason, write_atomically
from fedcover.paper.cells import Cell

SUFFIX = ".jsonl"

Key = tuple[str, int]
"""A cell's id and a seed."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One stored result, and where it was read."""

    result: Mapping[str, Any]
    path: Path
    line: int

    @property
    def key(self) -> Key:
        """The cell and seed of the result."""
        return self.result["cell"], self.result["seed"]

    def __str__(self) -> str:
        return f"{self.path}, line {self.line} ({self.result['cell']}, seed {self.result['seed']}),"


StoredResults = Mapping[Key, StoredResult]


def path_of(folder: Path, cell: Cell) -> Path:
    """Return the file that holds a cell's results: one for each data set."""
    return folder / f"{cell.experiment.dataset}{SUFFIX}"


def load(folder: Path) -> StoredResults:
    """Read every result in a folder.

    Raises:
        RunError: if a line is not a result, or repeats one.
    """
    records: dict[Key, StoredResult] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        for record in _read_lines(path):
            first = records.setdefault(record.key, record)
            if first is not record:
                raise RunError(
                    f"{record} repeats line {first.line} of {first.path}; remove one of them"
                )
    return records


def write(folder: Path, cell: Cell, result: Mapping[str, Any]) -> Path:
    """Add a result to its file, or replace that of the same cell and seed.

    Lines are sorted by key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, cell)
    with _locked(folder):
        results: dict[Key, Mapping[str, Any]] = {}
        if path.exists():
            results = {record.key: record.result for record in _read_lines(path)}
        results[result["cell"], result["seed"]] = result
        text = "".join(_to_line(results[key]) for key in sorted(results))
        write_atomically(path, text.encode())
    return path


def other_files(folder: Path) -> list[Path]:
    """List the JSON files below a folder that hold no results, except those of unfinished runs."""
    result_files = set(folder.glob(f"*{SUFFIX}"))
    candidates = {*folder.rglob("*.json"), *folder.rglob(f"*{SUFFIX}")} - result_files
    return sorted(path for path in candidates if not (path.parent / "metrics.jsonl").exists())


def _read_lines(path: Path) -> Iterator[StoredResult]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield StoredResult(_checked_keys(json.loads(line)), path, number)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path}, line {number}, is not a result of a cell: {error};"
                " remove it to run the cell again"
            ) from error


def _checked_keys(result: Any) -> Mapping[str, Any]:
    if (
        not isinstance(result, dict)
        or not isinstance(result["cell"], str)
        or type(result["seed"]) is not int
    ):
        raise TypeError("it must be an object with a cell and a seed")
    return result


def _to_line(result: Mapping[str, Any]) -> str:
    return json.dumps(result) + "\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the files of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
