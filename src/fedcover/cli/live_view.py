"""A run as it goes: rounds, accuracy, coverage, who answered and who did not, read from its folder and nothing else."""

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

ROUNDS_SHOWN, FAILURES_SHOWN, CURVE = 10, 8, 60
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN: dict[str, type | UnionType] = {
    **dict.fromkeys(
        ("accuracy", "train_loss", "gamma_round", "gamma_window", "epsilon"), int | float
    ),
    **dict.fromkeys(("clients", "dropped"), dict | list),
}
"""What is shown of a round; a figure of another kind was not written by a run, and is none."""

Line = dict[str, Any]


@dataclass(frozen=True)
class RunView:
    """What a run folder says at one moment."""

    name: str
    rounds: int
    lines: Sequence[Line]
    events: Sequence[Line]
    finished: bool
    running: bool
    resume_hint: str

    @cached_property
    def by_round(self) -> dict[int, list[Line]]:
        """What became of the clients of each round; what nodes did beside is no client's."""
        found: dict[int, list[Line]] = {}
        for event in self.events:
            if event.get("client") is not None:
                found.setdefault(event["round"], []).append(event)
        return found

    def clients(self, round: int) -> dict[str, list[Line]]:
        """What became of every client in one round, by what it was."""
        mine = self.by_round.get(round, [])
        return {kind: [event for event in mine if event["event"] == kind] for kind in EVENTS}

    @cached_property
    def failures(self) -> list[Line]:
        """Every task and every node that failed, oldest first."""
        return [event for event in self.events if event["event"] in UNANSWERED]

    @cached_property
    def warnings(self) -> list[Line]:
        """What is told of nodes that were taken all the same, oldest first."""
        return [event for event in self.events if event["event"] == WARNED]

    def newest(self) -> dict[str, Any]:
        """The accuracy of the last evaluation, and coverage and privacy after the last round; None if not measured."""
        last = self.lines[-1] if self.lines else {}
        known = [line for line in self.lines if "accuracy" in line]
        figures = {
            figure: last.get(figure) for figure in ("gamma_round", "gamma_window", "epsilon")
        }
        return {"accuracy": known[-1]["accuracy"] if known else None, **figures}

    def summary(self) -> dict[str, Any]:
        """The same as numbers and words, for other programs; what became of clients and of nodes is counted apart."""
        clients = (event for mine in self.by_round.values() for event in mine)
        nodes = (event for event in self.events if event.get("client") is None)
        return {
            "name": self.name,
            "round": len(self.lines),
            "rounds": self.rounds,
            "finished": self.finished,
            "running": self.running,
            **self.newest(),
            "history": [self.row(line) for line in self.lines],
            "events": dict(Counter(str(event["event"]) for event in clients)),
            "nodes": dict(Counter(str(event["event"]) for event in nodes)),
            "trouble": self.failures,
            "warnings": self.warnings,
        }

    def row(self, line: Line) -> dict[str, Any]:
        """One finished round in a few numbers; whoever is missing without an event has simply not answered."""
        became = {
            kind: len(events)
            for kind, events in self.clients(line["round"]).items()
            if kind != "answered"
        }
        missing = len(line.get("dropped", ())) - sum(became.values())
        figures = {
            name: line.get(name)
            for name in ("accuracy", "train_loss", "gamma_round", "gamma_window")
        }
        return {
            "round": line["round"],
            **figures,
            "answered": len(line.get("clients", ())),
            **became,
            "silent": max(0, missing),
            "seconds": sum(line["seconds"].values()) if "seconds" in line else None,
        }


def read_run_view(path: Path) -> RunView:
    """Read a run folder, whether its run is going on, has stopped, or is done; nothing that it names is imported."""
    folder = Folder(path).read()
    planned = folder.planned_rounds
    lines = {line["round"]: _trusted(line) for line in read_lines(path / "metrics.jsonl")}
    rounds = [lines[round] for round in range(planned) if round in lines]
    events = read_events(path / "events.jsonl")
    finished = (path / "summary.json").exists()
    name = printable(str(folder.fields["name"]))
    return RunView(name, planned, rounds, events, finished, folder.in_use(), folder.resume_hint())


def _trusted(line: Line) -> Line:
    seconds = line.get("seconds")
    timed = isinstance(seconds, dict) and all(map(is_number, seconds.values()))
    return {
        key: value
        for key, value in line.items()
        if (timed if key == "seconds" else isinstance(value, _SHOWN.get(key, object)))
        and not (isinstance(value, int) and not is_number(value))
        and not (key in _SHOWN and isinstance(value, float) and not math.isfinite(value))
    }


def render(seen: RunView) -> Group:
    """What is shown of a run."""
    parts = [Text(line) for line in _heading(seen)]
    rows = [seen.row(line) for line in seen.lines[-ROUNDS_SHOWN:]]
    rows = [{**row, "round": row["round"] + 1} for row in rows]  # people count from 1, files from 0
    missing = [
        why for why in (*UNANSWERED, "silent") if any(row[why] for row in rows)
    ]  # else there is no room for all
    columns = [
        "round",
        "accuracy",
        "train_loss",
        "gamma_round",
        "gamma_window",
        "answered",
        *missing,
    ]
    heads = {"gamma_round": "coverage", "gamma_window": "over window", "train_loss": "train loss"}
    shown = [*columns, "seconds"]
    tables = (
        [as_table("", [heads.get(c, c) for c in shown], [[row[c] for c in shown] for row in rows])]
        if rows
        else []
    )
    nodes = [
        event for event in seen.failures if event.get("client") is None
    ]  # one is the cause of much of the rest
    clients = [event for event in seen.failures if event.get("client") is not None]
    tables += _failure_tables("warnings", ["node", "why"], seen.warnings)
    tables += _failure_tables("nodes that were not taken", ["event", "node", "why"], nodes)
    tables += _failure_tables(
        "that did not answer as asked", ["event", "client", "node", "why"], clients
    )
    return Group(*parts, *tables)


def _failure_tables(what: str, words: list[str], events: list[Line]) -> list[Table]:
    """The last of some events, each a row; no table if there are none."""
    cells = [
        [e["round"] + 1, *(_plain(e.get(word)) for word in words)] for e in events[-FAILURES_SHOWN:]
    ]
    return (
        [as_table(f"the last of {len(events)} {what}", ["round", *words], cells)] if events else []
    )


def _heading(seen: RunView) -> Iterator[str]:
    done, now = seen.lines[-1]["round"] + 1 if seen.lines else 0, seen.newest()
    how = (
        "   finished"
        if seen.finished
        else ""
        if seen.running
        else f"   stopped; go on with {seen.resume_hint}"
    )
    yield f"{seen.name}   round {done} of {seen.rounds}{how}"
    figures = {
        "accuracy": "accuracy",
        "gamma_round": "coverage",
        "gamma_window": "over window",
        "epsilon": "epsilon",
    }
    known = [f"{word} {now[name]:.4g}" for name, word in figures.items() if now[name] is not None]
    if known:
        yield "   ".join(known)
    curve = [line["accuracy"] for line in seen.lines if "accuracy" in line][-CURVE:]
    if len(curve) > 1:
        yield f"accuracy {min(curve):.3f} {sparkline(curve)} {max(curve):.3f}"
    present = {kind: len(events) for kind, events in seen.clients(done).items() if events}
    if present and not seen.finished:
        yield f"round {done + 1} so far: " + ", ".join(
            f"{count} {kind}" for kind, count in present.items()
        )


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale + 1e-9)] for value in values)


def _plain(value: object) -> str:
    """A word of an event without anything that a terminal would obey."""
    return printable("-" if value is None else str(value))[:300]


def watch_live(path: Path, every: float) -> None:
    """Show a run on the terminal until it is finished, or until Ctrl-C."""
    seen, known = read_run_view(path), _stamps(path)
    with Live(render(seen), console=output(), auto_refresh=False) as live:
        while not seen.finished:
            time.sleep(every)
            if known != (now := _stamps(path)) or seen.running != Folder(path).in_use():
                seen, known = read_run_view(path), now
                live.update(render(seen), refresh=True)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """What changes when anything is written that is shown."""
    names = ("metrics.jsonl", "events.jsonl", "summary.json")
    return [
        (name, s.st_size, s.st_mtime_ns)
        for name in names
        if (path / name).exists() and (s := (path / name).stat())
    ]
