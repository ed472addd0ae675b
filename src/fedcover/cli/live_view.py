"""A live view of a run: rounds, accuracy, coverage and answers, read only from its folder."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedcover.cli.console import as_table, output
from fedcover.errors import printable
from fedcover.runs.metrics_log import EVENTS, UNANSWERED, WARNED, is_number, read_events, read_lines
from fedcover.runs.run_folder import Folder

ROUNDS_SHOWN = 10
FAILURES_SHOWN = 8
CURVE_LENGTH = 60
LONGEST_CELL = 300
_BARS = "▁▂▃▄▅▆▇█"

_ROUND_METRICS = ("accuracy", "train_loss", "gamma_round", "gamma_window")
_METRIC_TYPES: dict[str, type | UnionType] = {
    **dict.fromkeys((*_ROUND_METRICS, "epsilon"), int | float),
    **dict.fromkeys(("clients", "dropped"), dict | list),
}
"""The types of the metrics shown. A value of another type was not written by a run: skip it."""

_HEADINGS = {"gamma_round": "coverage", "gamma_window": "over window", "train_loss": "train loss"}

Line = dict[str, Any]


@dataclass(frozen=True)
class RunView:
    """The state of a run folder at one moment."""

    name: str
    rounds: int
    lines: Sequence[Line]
    events: Sequence[Line]
    finished: bool
    running: bool
    resume_hint: str

    @cached_property
    def by_round(self) -> dict[int, list[Line]]:
        """The events of clients, by round. Events of nodes are left out."""
        events_by_round: dict[int, list[Line]] = {}
        for event in self.events:
            if event.get("client") is not None:
                events_by_round.setdefault(event["round"], []).append(event)
        return events_by_round

    def clients(self, round: int) -> dict[str, list[Line]]:
        """Return the events of clients in one round, by kind of event."""
        events_by_kind: dict[str, list[Line]] = {kind: [] for kind in EVENTS}
        for event in self.by_round.get(round, []):
            if event["event"] in events_by_kind:
                events_by_kind[event["event"]].append(event)
        return events_by_kind

    @cached_property
    def failures(self) -> list[Line]:
        """The failures of tasks and nodes, oldest first."""
        return [event for event in self.events if event["event"] in UNANSWERED]

    @cached_property
    def warnings(self) -> list[Line]:
        """The warnings about nodes that were accepted, oldest first."""
        return [event for event in self.events if event["event"] == WARNED]

    def newest(self) -> dict[str, Any]:
        """Return the last measured accuracy, and coverage and privacy after the last round.

        A metric that was not measured is None.
        """
        accuracies = [line["accuracy"] for line in self.lines if "accuracy" in line]
        last_line = self.lines[-1] if self.lines else {}
        return {
            "accuracy": accuracies[-1] if accuracies else None,
            "gamma_round": last_line.get("gamma_round"),
            "gamma_window": last_line.get("gamma_window"),
            "epsilon": last_line.get("epsilon"),
        }

    def summary(self) -> dict[str, Any]:
        """Return the view as JSON. Events of clients and of nodes are counted separately."""
        client_events = [event for events in self.by_round.values() for event in events]
        node_events = [event for event in self.events if event.get("client") is None]
        return {
            "name": self.name,
            "round": len(self.lines),
            "rounds": self.rounds,
            "finished": self.finished,
            "running": self.running,
            **self.newest(),
            "history": [self.row(line) for line in self.lines],
            "events": dict(Counter(str(event["event"]) for event in client_events)),
            "nodes": dict(Counter(str(event["event"]) for event in node_events)),
            "trouble": self.failures,
            "warnings": self.warnings,
        }

    def row(self, line: Line) -> dict[str, Any]:
        """Return one finished round in a few numbers.

        A client that is missing without an event simply did not answer.
        """
        counts = {kind: len(events) for kind, events in self.clients(line["round"]).items()}
        del counts["answered"]
        num_silent = len(line.get("dropped", ())) - sum(counts.values())
        return {
            "round": line["round"],
            **{metric: line.get(metric) for metric in _ROUND_METRICS},
            "answered": len(line.get("clients", ())),
            **counts,
            "silent": max(0, num_silent),
            "seconds": sum(line["seconds"].values()) if "seconds" in line else None,
        }


def read_run_view(path: Path) -> RunView:
    """Read a run folder. The run may be active, stopped or finished; nothing is imported."""
    folder = Folder(path).read()
    planned_rounds = folder.planned_rounds
    lines = {line["round"]: _valid_entries(line) for line in read_lines(path / "metrics.jsonl")}
    return RunView(
        name=printable(str(folder.fields["name"])),
        rounds=planned_rounds,
        lines=[lines[round] for round in range(planned_rounds) if round in lines],
        events=read_events(path / "events.jsonl"),
        finished=(path / "summary.json").exists(),
        running=folder.in_use(),
        resume_hint=folder.resume_hint(),
    )


def _valid_entries(line: Line) -> Line:
    return {key: value for key, value in line.items() if _is_valid(key, value)}


def _is_valid(key: str, value: object) -> bool:
    """Check that a value is of the type that a run writes, and can be shown."""
    if key == "seconds":
        return isinstance(value, dict) and all(map(is_number, value.values()))
    if isinstance(value, int) and not is_number(value):
        return False
    if key not in _METRIC_TYPES:
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _METRIC_TYPES[key])


def render(view: RunView) -> Group:
    """Return what is shown of a run: headings, recent rounds, warnings and failures."""
    node_failures, client_failures = [], []
    for event in view.failures:
        if event.get("client") is None:
            node_failures.append(event)
        else:
            client_failures.append(event)
    # Failures of nodes have a table of their own: one of them may cause many of clients.
    return Group(
        *[Text(line) for line in _heading(view)],
        *_round_table(view),
        *_event_table("warnings", ["node", "why"], view.warnings),
        *_event_table("rejected nodes", ["event", "node", "why"], node_failures),
        *_event_table("failed client tasks", ["event", "client", "node", "why"], client_failures),
    )


def _round_table(view: RunView) -> list[Table]:
    """Return a table of the last rounds, or nothing before the first one."""
    rows = [view.row(line) for line in view.lines[-ROUNDS_SHOWN:]]
    if not rows:
        return []
    # There is no room for columns of zeros.
    failures = [kind for kind in (*UNANSWERED, "silent") if any(row[kind] for row in rows)]
    columns = ["round", *_ROUND_METRICS, "answered", *failures, "seconds"]
    cells = []
    for row in rows:
        shown_row = {**row, "round": row["round"] + 1}  # files count from 0, people from 1
        cells.append([shown_row[column] for column in columns])
    return [as_table("", [_HEADINGS.get(column, column) for column in columns], cells)]


def _event_table(what: str, columns: list[str], events: list[Line]) -> list[Table]:
    """Return a table of the last events, or nothing if there are none."""
    if not events:
        return []
    rows = []
    for event in events[-FAILURES_SHOWN:]:
        cells = [_safe_text(event.get(column)) for column in columns]
        rows.append([event["round"] + 1, *cells])
    title = what
    if len(rows) < len(events):
        title += f": the last {len(rows)} of {len(events)}"
    return [as_table(title, ["round", *columns], rows)]


def _heading(view: RunView) -> Iterator[str]:
    rounds_done = view.lines[-1]["round"] + 1 if view.lines else 0
    yield f"{view.name}   round {rounds_done} of {view.rounds}{_state(view)}"
    titles = {
        "accuracy": "accuracy",
        "gamma_round": "coverage",
        "gamma_window": "over window",
        "epsilon": "epsilon",
    }
    newest = view.newest()
    metrics = [
        f"{title} {newest[metric]:.4g}"
        for metric, title in titles.items()
        if newest[metric] is not None
    ]
    if metrics:
        yield "   ".join(metrics)
    curve = [line["accuracy"] for line in view.lines if "accuracy" in line][-CURVE_LENGTH:]
    if len(curve) > 1:
        yield f"accuracy {min(curve):.3f} {sparkline(curve)} {max(curve):.3f}"
    counts = [
        f"{len(events)} {kind}" for kind, events in view.clients(rounds_done).items() if events
    ]
    if counts and not view.finished:
        yield f"round {rounds_done + 1} so far: {', '.join(counts)}"


def _state(view: RunView) -> str:
    if view.finished:
        return "   finished"
    if view.running:
        return ""
    return f"   stopped; resume with {view.resume_hint}"


def sparkline(values: Sequence[float]) -> str:
    """Return a curve as one line of text.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale + 1e-9)] for value in values)


def _safe_text(value: object) -> str:
    """Return a value of an event without characters that would control the terminal."""
    return printable("-" if value is None else str(value))[:LONGEST_CELL]


def watch_live(path: Path, every: float) -> None:
    """Show a run on the terminal until it is finished, or until Ctrl-C."""
    view, stamps = read_run_view(path), _file_stamps(path)
    with Live(render(view), console=output(), auto_refresh=False) as live:
        while not view.finished:
            time.sleep(every)
            new_stamps = _file_stamps(path)
            if new_stamps != stamps or Folder(path).in_use() != view.running:
                view, stamps = read_run_view(path), new_stamps
                live.update(render(view), refresh=True)


def _file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return sizes and times of the files shown; they change with every write."""
    stamps = []
    for name in ("metrics.jsonl", "events.jsonl", "summary.json"):
        if (path / name).exists():
            status = (path / name).stat()
            stamps.append((name, status.st_size, status.st_mtime_ns))
    return stamps
