"""What a run folder says, as plain values: settings, machine, one line a round, the certificate if there is one."""

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


def natural_key(text: str) -> tuple[str | float, ...]:
    """A key to sort texts by.

    >>> sorted(["lr 0.1", "lr 0.02", "lr 1e-05", "run10", "run9"], key=natural_key)
    ['lr 1e-05', 'lr 0.02', 'lr 0.1', 'run9', 'run10']
    """
    # words and numbers take turns, so that like is always compared with like
    return tuple(
        float(part) if place % 2 else part for place, part in enumerate(NUMBER.split(text))
    )


MetricsLine = dict[str, Any]

UNCOMPARED_SETTINGS = frozenset({"name", "seed", "checkpoint_every", "keep_rounds"})
"""Settings in which runs of one group may differ."""


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not, as its folder tells it."""

    folder: Path
    toml: str
    settings: dict[str, Any]
    manifest: dict[str, Any]
    lines: list[MetricsLine]
    certificate: dict[str, Any] | None
    damaged_lines: int
    """Lines of metrics.jsonl that hold no round, or not all of one."""
    events: list[MetricsLine]
    """What became of every task at last, if the clients were real devices."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.settings.get("name", self.folder.name))

    @property
    def rounds(self) -> int:
        """How many rounds it is meant to have."""
        return int(self.settings.get("rounds", len(self.lines)))

    @property
    def custom(self) -> list[str]:
        """What was made in Python, so that the settings do not tell it."""
        custom = self.manifest.get("custom")
        return [str(name) for name in custom] if isinstance(custom, list) else []

    @property
    def differs_beyond_settings(self) -> bool:
        """Whether settings and seed do not tell all: something was made in Python, or devices left tasks unanswered."""
        return bool(self.custom or count_unanswered(self.lines))

    @property
    def not_finite(self) -> int | None:
        """The first round, counted from 1, with a loss that is no number."""
        for line in self.lines:
            losses = [line.get(key) for key in ("loss", "train_loss")]
            if any(isinstance(loss, float) and not math.isfinite(loss) for loss in losses):
                return int(line["round"]) + 1
        return None


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that are named, or that lie below a folder that is named; each one once."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        here = [path] if (path / "experiment.toml").is_file() else _below(path)
        if not here:
            raise RunError(
                f"{path} is no run folder, and there is none below it: no experiment.toml"
            )
        found.update(dict.fromkeys(here))
    if not found:
        raise RunError("there is no run to show: name at least one run folder")
    return list(found)


def _below(path: Path) -> list[Path]:
    return sorted(
        (file.parent for file in path.rglob("experiment.toml")),
        key=lambda folder: natural_key(str(folder)),
    )


def folders_without_experiment(paths: Iterable[str | Path]) -> list[Path]:
    """Folders below those that are named with the figures of a run, but nothing that says what was run."""
    below = {file.parent for path in map(Path, paths) for file in path.rglob("metrics.jsonl")}
    return sorted(folder for folder in below if not (folder / "experiment.toml").is_file())


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; the run may still be going on."""
    path = folder / "experiment.toml"
    try:
        toml = disk.read_text(path)
        settings = tomllib.loads(toml)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}") from error
    check_settings(path, settings)
    manifest, certificate = _json(folder / "manifest.json"), _json(folder / "certificate.json")
    ended = _count_complete_lines(
        folder / "metrics.jsonl"
    )  # before reading: lines that a run adds meanwhile are no damage
    last = settings.get("rounds", math.inf)
    read = [
        line
        for line in read_lines(folder / "metrics.jsonl")
        if is_complete_line(line) and line["round"] < last
    ]
    lines = {line["round"]: line for line in read}
    return RunRecord(
        folder, toml, settings, manifest or {}, [lines[round] for round in sorted(lines)], certificate,
        damaged_lines=max(0, ended - len(read)), events=read_events(folder / "events.jsonl"),
    )  # fmt: skip


def _count_complete_lines(path: Path) -> int:
    """How many lines have their end; a last one without it may still be being written, which is no damage."""
    return sum(line.endswith(b"\n") for line in read_raw_lines(path))


def _json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file."""
    try:
        read = json.loads(disk.read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}") from error
    if not isinstance(read, dict):
        raise RunError(f"{path} cannot be read: it must hold a JSON object")
    return read
