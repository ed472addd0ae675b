"""A run in a few numbers, from its lines; without torch, so that whoever only reads runs needs none."""

import json
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import RunError

Metrics = list[dict[str, Any]]
"""One line a round, as in metrics.jsonl."""

UNANSWERED = ("rejected", "late", "lost")
"""What may become of a task on a real device but an answer: refused, past the deadline, or its device is gone."""
EVENTS = ("answered", *UNANSWERED)
"""What may become of a client's task."""


def read_lines(path: Path) -> Metrics:
    """The lines of a file such as metrics.jsonl, each of some round; the last may be half written, any damaged."""
    lines: Metrics = []
    if path.is_dir():
        raise RunError(f"{path} is a folder, where a file with a line for each round should be")
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("round"), int):
            lines.append(line)
    return lines


def read_events(path: Path) -> Metrics:
    """What became of whom on real devices, by a file such as events.jsonl; there is none of other runs."""
    return [event for event in read_lines(path) if event.get("event") in EVENTS]


def command_to_go_on(engine: str, folder: Path) -> str:
    """The command that goes on with a run that was stopped.

    >>> command_to_go_on("batched", Path("runs/a b"))
    "fedcover resume 'runs/a b'"
    """
    begin = "fedcover flower up --nodes N" if engine == "flower" else "fedcover resume"
    return f"{begin} {shlex.quote(str(folder))}"


def unanswered(metrics: Metrics) -> dict[str, int]:
    """How many tasks of a whole run were rejected, late or lost, where any were.

    >>> unanswered([{"rejected": 1, "late": 0}, {"rejected": 2}])
    {'rejected': 3}
    """
    counted = {event: sum(line.get(event, 0) for line in metrics) for event in UNANSWERED}
    return {event: count for event, count in counted.items() if count}


def summarise(metrics: Metrics) -> dict[str, Any]:
    """A run in a few numbers; what is selected is selected on validation data, or not at all."""
    if not metrics:
        raise RunError("there is no finished round to summarise yet")
    evaluated = [line for line in metrics if "accuracy" in line]
    noises = [line["delta2_mean"] for line in metrics if line["delta2_mean"] is not None]
    paid = [line for line in metrics if line["parameters"] is not None]
    last = metrics[-1]
    summary: dict[str, Any] = {
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "loss": evaluated[-1]["loss"] if evaluated else None,
        "gamma_min": min(line["gamma_round"] for line in metrics),
        "gamma_window": last["gamma_window"],
        "delta2_mean": fmean(noises) if noises else None,
        "rounds": len(metrics),
        "seconds": sum(sum(line["seconds"].values()) for line in metrics),
        "parameters": fmean(line["parameters"] for line in paid) if paid else None,
        "multiply_adds": fmean(line["multiply_adds"] for line in paid) if paid else None,
        "bytes_down": sum(line["bytes_down"] for line in metrics),
        "bytes_up": sum(line["bytes_up"] for line in metrics),
    }
    for name in ("epsilon", "accuracy_common", "accuracy_single", "accuracy_local", "accuracy_trained"):
        if name in last:
            summary[name] = last[name]
    if any("validation_accuracy" in line for line in evaluated):
        best = max(evaluated, key=lambda line: float(line["validation_accuracy"]))
        summary |= {"accuracy_best": best["accuracy"], "best_round": best["round"]}
    return summary
