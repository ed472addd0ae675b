"""Read a run folder as plain values: settings, machine, metrics per round, certificate."""

import json
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.analysis.report.settings import check_settings
from fedcover.errors import RunError
from fedcover.host import disk
from fedcover.runs.metrics_log import (
    count_unanswered,
    is_complete_line,
    read_events,
    read_lines,
    read_raw_lines,
)

NUMBER = re.compile(r"((?:(?<!\w)-)?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")

MetricsLine = dict[str, Any]

UNCOMPARED_SETTINGS = frozenset({"name", "seed", "checkpoint_every", "keep_rounds"})
"""Settings that may differ between the runs of one group."""


def natural_key(text: str) -> tuple[str | float, ...]:
    """Return a key that sorts texts with numbers in them in natural order.

    >>> sorted(["lr 0.1", "lr 0.02", "lr 1e-05", "run10", "run9"], key=natural_key)
    ['lr 1e-05', 'lr 0.02', 'lr 0.1', 'run9', 'run10']
    """
    # Words and numbers alternate, so that each is compared with its own kind.
    parts = NUMBER.split(text)
    return tuple(float(part) if index % 2 else part for index, part in enumerate(parts))


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not, as read from its folder.

    Attributes:
        folder: The run folder.
        toml: The text of experiment.toml.
        settings: The fields of the experiment.
        manifest: The machine and the versions.
        lines: The metrics of each round, in order.
        certificate: The certificate, if there is one.
        damaged_lines: The number of lines of metrics.jsonl that hold no complete round.
        events: The final outcome of each task, if the clients were real devices.
    """

    folder: Path
    toml: str
    settings: dict[str, Any]
    manifest: dict[str, Any]
    lines: list[MetricsLine]
    certificate: dict[str, Any] | None
    damaged_lines: int
    events: list[MetricsLine]

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.settings.get("name", self.folder.name))

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        return int(self.settings.get("rounds", len(self.lines)))

    @property
    def custom(self) -> list[str]:
        """The names of objects that were passed in Python; the settings do not describe them."""
        custom = self.manifest.get("custom")
        return [str(name) for name in custom] if isinstance(custom, list) else []

    @property
    def differs_beyond_settings(self) -> bool:
        """Whether settings and seed do not determine the run.

        This is so if objects were passed in Python, or if devices left tasks unanswered.
        """
        return bool(self.custom or count_unanswered(self.lines))

    @property
    def not_finite(self) -> int | None:
        """The first round, counted from 1, with a loss that is not finite."""
        for line in self.lines:
            for loss in (line.get("loss"), line.get("train_loss")):
                if isinstance(loss, float) and not math.isfinite(loss):
                    return int(line["round"]) + 1
        return None


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the run folders among or below some paths, each once.

    Raises:
        RunError: if there is none at or below one of the paths, or no path is given.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        is_run = (path / "experiment.toml").is_file()
        runs = [path] if is_run else _runs_below(path)
        if not runs:
            raise RunError(
                f"{path} is not a run folder, and there is none below it: no experiment.toml"
            )
        folders.update(dict.fromkeys(runs))
    if not folders:
        raise RunError("there is no run to show: name at least one run folder")
    return list(folders)


def _runs_below(path: Path) -> list[Path]:
    folders = [file.parent for file in path.rglob("experiment.toml")]
    return sorted(folders, key=lambda folder: natural_key(str(folder)))


def folders_without_experiment(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders below some paths that have metrics but no experiment.toml."""
    folders = {file.parent for path in paths for file in Path(path).rglob("metrics.jsonl")}
    return sorted(folder for folder in folders if not (folder / "experiment.toml").is_file())


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. The run may still be active.

    Raises:
        RunError: if a file cannot be read, or the settings are invalid.
    """
    path = folder / "experiment.toml"
    try:
        toml = disk.read_text(path)
        settings = tomllib.loads(toml)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}") from error
    check_settings(path, settings)
    manifest = _read_json_object(folder / "manifest.json") or {}
    certificate = _read_json_object(folder / "certificate.json")
    # Count before reading: lines that the run adds in between are not damaged.
    num_lines = _count_complete_lines(folder / "metrics.jsonl")
    num_rounds = settings.get("rounds", math.inf)
    valid_lines = [
        line
        for line in read_lines(folder / "metrics.jsonl")
        if is_complete_line(line) and line["round"] < num_rounds
    ]
    line_by_round = {line["round"]: line for line in valid_lines}
    return RunRecord(
        folder=folder,
        toml=toml,
        settings=settings,
        manifest=manifest,
        lines=[line_by_round[round] for round in sorted(line_by_round)],
        certificate=certificate,
        damaged_lines=max(0, num_lines - len(valid_lines)),
        events=read_events(folder / "events.jsonl"),
    )


def _count_complete_lines(path: Path) -> int:
    """Count the lines that end; the run may still be writing a last line without an end."""
    return sum(line.endswith(b"\n") for line in read_raw_lines(path))


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is no such file."""
    try:
        value = json.loads(disk.read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} cannot be read: it must hold a JSON object")
    return value
