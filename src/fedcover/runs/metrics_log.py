"""A run in a few numbers, from its lines; without torch, so that whoever only reads runs needs none."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import RunError
from fedcover.host import disk

Metrics = list[dict[str, Any]]
"""One line a round, as in metrics.jsonl."""

UNANSWERED = ("rejected", "late", "lost")
"""What may become of a task on a real device but an answer: refused, past the deadline, or its device is gone."""
EVENTS = ("answered", *UNANSWERED)
"""What may become of a client's task."""
WARNED = "warned"
"""What is told of a node that is taken, but may not be as it should."""
MEMBERSHIP_EVENTS = ("came", "left")
"""What a node that takes part may do between rounds."""

_NEEDED = ("gamma_round", "gamma_window", "bytes_down", "bytes_up")
_OF_ANSWERS = ("delta2_mean", "parameters", "multiply_adds")
"""None in a round without an answer, but written."""
_OPTIONAL = ("accuracy", "loss", "validation_accuracy", "validation_loss", *UNANSWERED)
_SHARES = ("accuracy", "validation_accuracy")
_MOST = 2**63
"""Larger whole numbers no run has counted, and they do not fit into a float."""
_NO_PICTURES: dict[str, Any] = {"layers": {}, "clients": {}}


def read_lines(path: Path) -> Metrics:
    """The lines of a file such as metrics.jsonl, each of some round; the last may be half written, any damaged."""
    lines: Metrics = []
    for text in read_raw_lines(path):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("round")) is int:
            lines.append(line)
    return lines


def read_raw_lines(path: Path) -> list[bytes]:
    """The lines of a file with what ends them; none where there is no file."""
    try:
        return disk.read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except IsADirectoryError as error:
        raise RunError(
            f"{path} is a folder, where a file with a line for each round should be"
        ) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def read_events(path: Path) -> Metrics:
    """What became of whom on real devices at last, by a file such as events.jsonl; there is none of other runs."""
    last: dict[tuple[int, str, bool], dict[str, Any]] = {}
    for event in read_lines(path):
        if event.get("event") in (*EVENTS, WARNED):
            key = event["round"], event_subject(event), event["event"] == WARNED
            last.pop(
                key, None
            )  # a round that is run again after a stop tells anew, and in the order of that
            last[key] = event
    return list(last.values())


def event_subject(event: Mapping[str, Any]) -> str:
    """Whom an event is about: a client, or a node where no client is named.

    >>> event_subject({"client": 3, "node": 7}), event_subject({"client": None, "node": 7})
    ('client 3', 'node 7')
    """
    return (
        f"node {event.get('node')}" if event.get("client") is None else f"client {event['client']}"
    )


def resume_command(engine: str, folder: Path) -> str:
    """The command that goes on with a run that was stopped.

    >>> resume_command("batched", Path("runs/a b"))
    "fedcover resume 'runs/a b'"
    """
    begin = "fedcover flower up --nodes N" if engine == "flower" else "fedcover resume"
    return f"{begin} {shlex.quote(str(folder))}"


def count_unanswered(metrics: Metrics) -> dict[str, int]:
    """How many tasks of a whole run were rejected, late or lost, where any were.

    >>> count_unanswered([{"rejected": 1, "late": 0}, {"rejected": 2}])
    {'rejected': 3}
    """
    counted = {event: sum(line.get(event, 0) for line in metrics) for event in UNANSWERED}
    return {event: count for event, count in counted.items() if count}


def most_common_failure(events: Metrics) -> str:
    """The most frequent reason for which tasks were not answered.

    >>> most_common_failure([{"event": "answered", "why": ""}, {"event": "lost", "why": "no node holds this client"}])
    'no node holds this client'
    """
    reasons = Counter(str(event.get("why")) for event in events if event["event"] in UNANSWERED)
    return reasons.most_common(1)[0][0] if reasons else "no node was there"


def is_complete_line(line: Mapping[str, Any]) -> bool:
    """Whether a line has every figure that a summary or a page is made of, and none of another kind.

    >>> is_complete_line({"round": 2})
    False
    """
    clients, seconds, pictures = (
        line.get("clients", {}),
        line.get("seconds"),
        line.get("pictures") or _NO_PICTURES,
    )
    return (
        0 <= line["round"] < _MOST
        and all(name in line for name in _OF_ANSWERS)
        and (line["parameters"] is None) == (line["multiply_adds"] is None)
        and ("accuracy" not in line or "loss" in line)
        and _numbers(line.get(name) for name in _NEEDED)
        and _numbers(line[name] for name in _OPTIONAL if name in line)
        and not any(line[name] < 0 or line[name] > 1 for name in _SHARES if name in line)
        and _numbers(
            line[name] for name in (*_OF_ANSWERS, "train_loss") if line.get(name) is not None
        )
        and (isinstance(seconds, dict) and _numbers(seconds.values()))
        and (isinstance(clients, dict) and all(_is_client(told) for told in clients.values()))
        and (isinstance(pictures, dict) and _are_pictures(pictures, clients))
    )


def _numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def is_number(value: object) -> bool:
    """Whether a value is a number that a run may have written.

    >>> is_number(0.5), is_number(10**400), is_number("1")
    (True, False, False)
    """
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST)


def _is_client(told: object) -> bool:
    return isinstance(told, dict) and _numbers(
        told.get(name) for name in ("capacity", "delta2", "loss")
    )


def _are_pictures(pictures: Mapping[str, Any], clients: Mapping[str, Any]) -> bool:
    drawn = pictures.get("clients")
    return "layers" in pictures and isinstance(drawn, dict) and drawn.keys() <= clients.keys()


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
    for name in (
        "epsilon",
        "accuracy_common",
        "accuracy_single",
        "accuracy_local",
        "accuracy_trained",
    ):
        if name in last:
            summary[name] = last[name]
    if validated := [line for line in evaluated if "validation_accuracy" in line]:
        best = max(validated, key=lambda line: float(line["validation_accuracy"]))
        summary |= {"accuracy_best": best["accuracy"], "best_round": best["round"]}
    return summary
