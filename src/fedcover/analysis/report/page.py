"""Records of runs -> one HTML file: everything it needs is inside, and nothing that a run says can become markup."""

import html
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedcover.analysis.report.collect import (
    CollectedRuns,
    RunGroup,
    collect_runs,
    group_runs,
    setting_text,
)
from fedcover.analysis.report.downsample import (
    compact_number,
    downsample_columns,
    evenly_spaced,
    lowest,
    pack_coverage_maps,
    points_for,
    sample_ends,
)
from fedcover.analysis.report.fleet_table import fleet_table, task_outcomes
from fedcover.analysis.report.load import UNCOMPARED_SETTINGS, MetricsLine, RunRecord, natural_key
from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.log import log
from fedcover.runs.metrics_log import resume_command, summarise
from fedcover.version import __version__

SCRIPTS = (
    "elements.js", "palette.js", "state.js", "cursor.js", "chart.js", "figures.js", "pixels.js", "coverage.js",
    "tables.js", "details.js", "certificate.js", "page.js",
)  # fmt: skip
"""In the order of reading; a later one may use what stands above."""


Ends = dict[str, frozenset[int]]
MAX_ENTRIES = 50
"""Of a list or table in a certificate."""
MAX_DEPTH = 20
"""How many lists and tables may lie in each other there."""


def report(
    runs: str | Path | Iterable[str | Path],
    out: str | Path = "report.html",
    *,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page about run folders (or all that lie below a folder); needs no network to open.

    Runs that differ only in the seed are shown as one, with a band from the lowest to the highest. What is damaged or
    the same run again is left out; the page and a warning in the log name it.
    """
    gathered = collect_runs([runs] if isinstance(runs, str | Path) else runs)
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidValue(f"out must be an .html file; got {str(out)!r}")
    write_atomically(
        path, page(gathered, title or _title(gathered.records)).encode("utf-8", "replace")
    )
    for note in gathered.notes:
        log.warning("%s", note)
    return path


def page(gathered: CollectedRuns, title: str) -> str:
    """The page as text."""
    filled = {
        "TITLE": html.escape(title),
        "STYLE": asset("page.css"),
        "DATA": as_script(page_data(gathered, title)),
        "SCRIPT": "\n".join(asset(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], asset("page.html"))


def as_script(value: Any) -> str:
    """A value as JSON that can stand between script tags: no text in it can end the script or open a comment.

    >>> as_script({"name": "</script><!--"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    packed = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return packed


@cache
def asset(name: str) -> str:
    """A part of the page that ships with the package."""
    return files("fedcover.analysis.report").joinpath("assets", name).read_text(encoding="utf-8")


def page_data(gathered: CollectedRuns, title: str) -> dict[str, Any]:
    """All that the page shows."""
    records = gathered.records
    groups = group_runs(records)
    ends = {
        place: found
        for g in groups
        for found in [last_rounds_of([records[n] for n in g.runs])]
        for place in g.runs
    }
    return {
        "title": title,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "notes": gathered.notes,
        "groups": [
            {"label": g.label, "settings": g.settings, "runs": list(g.runs)} for g in groups
        ],
        "values": values(groups),
        "runs": [
            run_entry(record, ends[place], len(records)) for place, record in enumerate(records)
        ],
    }


def values(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """The values of every setting in which groups differ, in natural order."""
    return {
        name: sorted({each.settings[name] for each in groups}, key=natural_key)
        for name in groups[0].settings
    }


def run_entry(record: RunRecord, ends: Ends, runs: int) -> dict[str, Any]:
    """One run as the page wants it, with points where the seeds of its group end."""
    return {
        "name": record.name,
        "folder": str(record.folder),
        "seed": record.settings.get("seed", 0),
        "rounds": record.rounds,
        "done": len(record.lines),
        "notFinite": record.not_finite,
        "settings": {
            name: setting_text(value)
            for name, value in record.settings.items()
            if name not in UNCOMPARED_SETTINGS
        },
        **curves(record, ends, points_for(runs)),
        "totals": totals(record.lines),
        "fleet": fleet_table(record),
        "answers": task_outcomes(record.events),
        "toml": record.toml,
        "manifest": {
            key: setting_text(simplify(value))
            for key, value in record.manifest.items()
            if value not in (None, [])
        },
        "custom": record.custom,
        "commands": commands(record),
        "certificate": simplify(record.certificate),
        "pictures": pack_coverage_maps(record.lines, runs),
    }


def last_rounds_of(seeds: Sequence[RunRecord]) -> Ends:
    """The last rounds, counted from 1, that the runs of one group have, of those with an evaluation and of all."""
    parts = {"scores": [_scored(seed) for seed in seeds], "every": [seed.lines for seed in seeds]}
    return {
        part: sample_ends(lines[-1]["round"] + 1 for lines in found if lines)
        for part, found in parts.items()
    }


def curves(record: RunRecord, ends: Ends, most: int) -> dict[str, Any]:
    """The figures of every round, and of the rounds with an evaluation, each beside what had been paid by then."""
    lines, moved, seconds, paid = record.lines, 0.0, 0.0, {}
    for line in lines:
        moved += (line.get("bytes_down", 0) + line.get("bytes_up", 0)) / 1e6
        seconds += sum(line.get("seconds", {}).values())
        paid[line["round"]] = (moved, seconds)

    def columns(names: Sequence[str], some: Sequence[MetricsLine]) -> dict[str, list[Any]]:
        found = {name: [line.get(name) for line in some] for name in names}
        return {
            "round": [line["round"] + 1 for line in some],
            "moved": [paid[line["round"]][0] for line in some],
            "seconds": [paid[line["round"]][1] for line in some],
            **{
                name: values
                for name, values in found.items()
                if any(value is not None for value in values)
            },
        }

    scores = columns(
        ("accuracy", "loss", "validation_accuracy", "validation_loss"), _scored(record)
    )
    every = columns(("train_loss", "gamma_round", "gamma_window", "delta2_mean"), lines)
    minima = {"gamma_round": lowest, "gamma_window": lowest}
    evaluations = -(-record.rounds // int(record.settings.get("evaluate_every", 1)))
    return {
        "scores": downsample_columns(scores, evaluations, most, {}, ends["scores"]),
        "every": downsample_columns(every, record.rounds, most, minima, ends["every"]),
        "thinned": record.rounds > most,
    }


def _scored(record: RunRecord) -> list[MetricsLine]:
    return [line for line in record.lines if "accuracy" in line]


def totals(lines: Sequence[MetricsLine]) -> dict[str, Any]:
    """The run in a few numbers, as far as it has come."""
    if not lines:
        return {}
    found = summarise(list(lines))
    found["moved"] = (found["bytes_down"] + found["bytes_up"]) / 1e6
    return {name: compact_number(value) for name, value in found.items()}


def commands(record: RunRecord) -> list[str]:
    """How to run it again, and how to go on with it."""
    machine, engine = record.manifest, str(record.manifest.get("engine"))
    keys = ("engine", "device", "threads", "precision", "processes")
    options = [
        f"--{key} {shlex.quote(str(machine[key]))}" for key in keys if machine.get(key) is not None
    ]
    options += ["--deterministic"] if machine.get("deterministic") else []
    options += ["--data FOLDER"] if machine.get("data") else []
    again = " ".join(["fedcover run experiment.toml", *options])
    if engine == "flower":
        again = "fedcover flower up --nodes N experiment.toml"
    go_on = resume_command(engine, record.folder)
    return [again] if len(record.lines) >= record.rounds else [again, go_on]


def simplify(value: Any, depth: int = 0) -> Any:
    """The same value for the page: short numbers, names for those that are not finite, long lists thinned.

    >>> simplify({"bound": float("inf"), "terms": [0.123456789]})
    {'bound': 'inf', 'terms': [0.12346]}
    """
    if isinstance(value, dict | list) and depth == MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        entries = [list(value.items())[place] for place in evenly_spaced(len(value), MAX_ENTRIES)]
        return {str(key): simplify(entry, depth + 1) for key, entry in entries}
    if isinstance(value, list):
        return [
            simplify(value[place], depth + 1) for place in evenly_spaced(len(value), MAX_ENTRIES)
        ]
    return (
        str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else compact_number(value)
    )


def _title(records: Sequence[RunRecord]) -> str:
    datasets = list(
        dict.fromkeys(setting_text(record.settings.get("dataset")) for record in records)
    )
    what = f"{len(records)} runs" if len(records) > 1 else records[0].name
    return (
        f"{what} on {datasets[0]}" if len(datasets) == 1 else f"{what} on {len(datasets)} data sets"
    )
