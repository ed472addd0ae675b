"""Write one HTML file about runs. It contains all it needs, and text of a run is never markup."""

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
from fedcover.analysis.report.curves import Ends, curves, last_rounds_of
from fedcover.analysis.report.downsample import (
    compact_number,
    evenly_spaced,
    pack_coverage_maps,
    points_for,
)
from fedcover.analysis.report.fleet_table import fleet_table, task_outcomes
from fedcover.analysis.report.load import UNCOMPARED_SETTINGS, MetricsLine, RunRecord, natural_key
from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.log import log
from fedcover.runs.metrics_log import resume_command, summarise
from fedcover.version import __version__

SCRIPTS = (
    "elements.js",
    "palette.js",
    "state.js",
    "cursor.js",
    "chart.js",
    "figures.js",
    "pixels.js",
    "coverage.js",
    "tables.js",
    "details.js",
    "certificate.js",
    "page.js",
)
"""The scripts of the page. Each may use what those before it define."""

MAX_ENTRIES = 50
"""Largest number of entries of a list or table in a certificate."""
MAX_DEPTH = 20
"""Largest depth of nested lists and tables in a certificate."""

MACHINE_OPTIONS = ("engine", "device", "threads", "precision", "processes")


def report(
    runs: str | Path | Iterable[str | Path],
    out: str | Path = "report.html",
    *,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page about runs, which opens without a network.

    Runs that differ only in the seed are shown as one, with a band from the lowest to the highest.
    Damaged runs and repetitions of a run are left out; the page and a log warning name them.

    Args:
        runs: Run folders, or folders that contain run folders.
        out: The page to write.
        title: The title of the page (default: made from the number of runs and the data set).

    Returns:
        The path of the page.

    Raises:
        InvalidValue: if `out` is not an .html file.
        RunError: if no run can be read.
    """
    collected = collect_runs([runs] if isinstance(runs, str | Path) else runs)
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidValue(f"out must be an .html file; got {str(out)!r}")
    text = page(collected, title or _default_title(collected.records))
    write_atomically(path, text.encode("utf-8", "replace"))
    for note in collected.notes:
        log.warning("%s", note)
    return path


def page(collected: CollectedRuns, title: str) -> str:
    """Return the page as text."""
    replacements = {
        "TITLE": html.escape(title),
        "STYLE": asset("page.css"),
        "DATA": as_script(page_data(collected, title)),
        "SCRIPT": "\n".join(asset(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replacements[match[1]], asset("page.html"))


def as_script(value: Any) -> str:
    """Return a value as JSON that is safe between script tags.

    No text in it can end the script or open a comment.

    >>> as_script({"name": "</script><!--"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def asset(name: str) -> str:
    """Return the text of a part of the page that ships with the package."""
    return files("fedcover.analysis.report").joinpath("assets", name).read_text(encoding="utf-8")


def page_data(collected: CollectedRuns, title: str) -> dict[str, Any]:
    """Return everything that the page shows."""
    records = collected.records
    groups = group_runs(records)
    ends_by_run: dict[int, Ends] = {}
    for group in groups:
        ends = last_rounds_of([records[index] for index in group.runs])
        ends_by_run.update(dict.fromkeys(group.runs, ends))
    return {
        "title": title,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "notes": collected.notes,
        "groups": [
            {"label": group.label, "settings": group.settings, "runs": list(group.runs)}
            for group in groups
        ],
        "values": values(groups),
        "runs": [
            run_entry(record, ends_by_run[index], len(records))
            for index, record in enumerate(records)
        ],
    }


def values(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Return the values of each setting in which groups differ, in natural order."""
    return {
        name: sorted({group.settings[name] for group in groups}, key=natural_key)
        for name in groups[0].settings
    }


def run_entry(record: RunRecord, ends: Ends, runs: int) -> dict[str, Any]:
    """Return one run for the page; its curves have points where runs of its group end."""
    settings = {
        name: setting_text(value)
        for name, value in record.settings.items()
        if name not in UNCOMPARED_SETTINGS
    }
    manifest = {
        key: setting_text(simplify(value))
        for key, value in record.manifest.items()
        if value not in (None, [])
    }
    return {
        "name": record.name,
        "folder": str(record.folder),
        "seed": record.settings.get("seed", 0),
        "rounds": record.rounds,
        "done": len(record.lines),
        "notFinite": record.not_finite,
        "settings": settings,
        **curves(record, ends, points_for(runs)),
        "totals": totals(record.lines),
        "fleet": fleet_table(record),
        "answers": task_outcomes(record.events),
        "toml": record.toml,
        "manifest": manifest,
        "custom": record.custom,
        "commands": commands(record),
        "certificate": simplify(record.certificate),
        "pictures": pack_coverage_maps(record.lines, runs),
    }


def totals(lines: Sequence[MetricsLine]) -> dict[str, Any]:
    """Return a run's summary, up to its last round."""
    if not lines:
        return {}
    summary = summarise(list(lines))
    summary["moved"] = (summary["bytes_down"] + summary["bytes_up"]) / 1e6
    return {name: compact_number(value) for name, value in summary.items()}


def commands(record: RunRecord) -> list[str]:
    """Return the commands that repeat a run and, if it is not finished, resume it."""
    manifest, engine = record.manifest, str(record.manifest.get("engine"))
    if engine == "flower":
        run_command = "fedcover flower up --nodes N experiment.toml"
    else:
        words = ["fedcover run experiment.toml"]
        for option in MACHINE_OPTIONS:
            if manifest.get(option) is not None:
                words.append(f"--{option} {shlex.quote(str(manifest[option]))}")
        if manifest.get("deterministic"):
            words.append("--deterministic")
        if manifest.get("data"):
            words.append("--data FOLDER")
        run_command = " ".join(words)
    if len(record.lines) >= record.rounds:
        return [run_command]
    return [run_command, resume_command(engine, record.folder)]


def simplify(value: Any, depth: int = 0) -> Any:
    """Return a value for the page: short numbers, thinned lists, names of non-finite numbers.

    >>> simplify({"bound": float("inf"), "terms": [0.123456789]})
    {'bound': 'inf', 'terms': [0.12346]}
    """
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            return "..."
        indices = evenly_spaced(len(value), MAX_ENTRIES)
        if isinstance(value, list):
            return [simplify(value[index], depth + 1) for index in indices]
        items = list(value.items())
        return {str(items[index][0]): simplify(items[index][1], depth + 1) for index in indices}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return compact_number(value)


def _default_title(records: Sequence[RunRecord]) -> str:
    datasets = list(
        dict.fromkeys(setting_text(record.settings.get("dataset")) for record in records)
    )
    what = f"{len(records)} runs" if len(records) > 1 else records[0].name
    where = datasets[0] if len(datasets) == 1 else f"{len(datasets)} data sets"
    return f"{what} on {where}"
