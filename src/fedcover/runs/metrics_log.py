"""Read the metrics and events of a run and summarise them; torch is not needed for that."""

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
"""One line for each round, as in metrics.jsonl."""

UNANSWERED = ("rejected", "late", "lost")
"""Outcomes of a task without a valid answer: rejected, past the deadline, or device gone."""

EVENTS = ("answered", *UNANSWERED)
"""Outcomes of a client's task."""

WARNED = "warned"
"""The event of a node that is accepted with a warning."""

MEMBERSHIP_EVENTS = ("came", "left")
"""Events of nodes between rounds."""

_REQUIRED = ("gamma_round", "gamma_window", "bytes_down", "bytes_up")
_NULL_WITHOUT_ANSWERS = ("delta2_mean", "parameters", "multiply_adds")
"""Metrics that every line has, but that are null in a round without answers."""
AVERAGED = ("accuracy_averaged", "loss_averaged")
"""Metrics of the averaged model."""
_SHARES = (
    "accuracy",
    "validation_accuracy",
    "accuracy_averaged",
    "validation_accuracy_averaged",
)
_OPTIONAL = (
    *_SHARES,
    "loss",
    "validation_loss",
    "loss_averaged",
    "validation_loss_averaged",
    *UNANSWERED,
)
_CLIENT_METRICS = ("capacity", "delta2", "loss")
_FINAL_METRICS = (
    "epsilon",
    "accuracy_common",
    "accuracy_single",
    "accuracy_local",
    "accuracy_trained",
)
"""Metrics that a summary takes from the last round, if it has them."""
_INT_LIMIT = 2**63
"""No run counts as far; larger integers do not fit into a float."""
_NO_PICTURES: dict[str, Any] = {"layers": {}, "clients": {}}


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def read_lines(path: Path) -> Metrics:
    """Read the lines of a file such as metrics.jsonl, without damaged or half-written ones."""
    lines: Metrics = []
    for raw_line in read_raw_lines(path):
        try:
            line = json.loads(raw_line)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("round")) is int:
            lines.append(line)
    return lines


def read_raw_lines(path: Path) -> list[bytes]:
    """Read the lines of a file with their line ends; a missing file has none."""
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
    """Read the last event of each task and warning from a file such as events.jsonl.

    Only runs on real devices have one.
    """
    latest: dict[tuple[int, str, bool], dict[str, Any]] = {}
    for event in read_lines(path):
        if event.get("event") not in (*EVENTS, WARNED):
            continue
        key = event["round"], event_subject(event), event["event"] == WARNED
        # a round that ran again after an interruption has new events, in a new order
        latest.pop(key, None)
        latest[key] = event
    return list(latest.values())


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Return a line as it is written to metrics.jsonl."""
    return (json.dumps(line) + "\n").encode()


def event_subject(event: Mapping[str, Any]) -> str:
    """Return whom an event is about: a client, or a node if no client is named.

    >>> event_subject({"client": 3, "node": 7}), event_subject({"client": None, "node": 7})
    ('client 3', 'node 7')
    """
    if event.get("client") is None:
        return f"node {event.get('node')}"
    return f"client {event['client']}"


def resume_command(engine: str, folder: Path) -> str:
    """Return the command that resumes a run.

    >>> resume_command("batched", Path("runs/a b"))
    "fedcover resume 'runs/a b'"
    """
    command = "fedcover flower up --nodes N" if engine == "flower" else "fedcover resume"
    return f"{command} {shlex.quote(str(folder))}"


# ── checking ────────────────────────────────────────────────────────────────────────────────────


def is_complete_line(line: Mapping[str, Any]) -> bool:
    """Return whether a line has everything that summaries and reports use, with the right types.

    >>> is_complete_line({"round": 2})
    False
    """
    if not 0 <= line["round"] < _INT_LIMIT or not _has_valid_metrics(line):
        return False
    seconds = line.get("seconds")
    if not isinstance(seconds, dict) or not _all_numbers(seconds.values()):
        return False
    clients = line.get("clients", {})
    if not isinstance(clients, dict) or not all(map(_is_client, clients.values())):
        return False
    pictures = line.get("pictures") or _NO_PICTURES
    return isinstance(pictures, dict) and _are_pictures(pictures, clients)


def _has_valid_metrics(line: Mapping[str, Any]) -> bool:
    """Return whether the numbers of a round are there, and are numbers."""
    if any(name not in line for name in _NULL_WITHOUT_ANSWERS):
        return False
    if (line["parameters"] is None) != (line["multiply_adds"] is None):
        return False
    if "accuracy" in line and "loss" not in line:
        return False
    numbers = [line.get(name) for name in _REQUIRED]
    numbers += [line[name] for name in _OPTIONAL if name in line]
    nullable = [line.get(name) for name in (*_NULL_WITHOUT_ANSWERS, "train_loss")]
    numbers += [value for value in nullable if value is not None]
    if not _all_numbers(numbers):
        return False
    # unlike `0 <= share <= 1`, this accepts NaN
    return not any(line[name] < 0 or line[name] > 1 for name in _SHARES if name in line)


def _all_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def is_number(value: object) -> bool:
    """Return whether a value is a number that a run may have written.

    >>> is_number(0.5), is_number(10**400), is_number("1")
    (True, False, False)
    """
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _INT_LIMIT)


def _is_client(metrics: object) -> bool:
    return isinstance(metrics, dict) and _all_numbers(map(metrics.get, _CLIENT_METRICS))


def _are_pictures(pictures: Mapping[str, Any], clients: Mapping[str, Any]) -> bool:
    pictured_clients = pictures.get("clients")
    if "layers" not in pictures or not isinstance(pictured_clients, dict):
        return False
    return pictured_clients.keys() <= clients.keys()


# ── summarising ─────────────────────────────────────────────────────────────────────────────────


def summarise(metrics: Metrics) -> dict[str, Any]:
    """Summarise a run in a few numbers.

    The best round is selected on validation data, or not at all.
    """
    if not metrics:
        raise RunError("there is no finished round to summarise yet")
    last = metrics[-1]
    evaluated = [line for line in metrics if "accuracy" in line]
    answered = [line for line in metrics if line["parameters"] is not None]
    noises = [line["delta2_mean"] for line in metrics if line["delta2_mean"] is not None]
    summary: dict[str, Any] = {
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "loss": evaluated[-1]["loss"] if evaluated else None,
        "gamma_min": min(line["gamma_round"] for line in metrics),
        "gamma_window": last["gamma_window"],
        "delta2_mean": fmean(noises) if noises else None,
        "rounds": len(metrics),
        "seconds": sum(sum(line["seconds"].values()) for line in metrics),
        "parameters": fmean(line["parameters"] for line in answered) if answered else None,
        "multiply_adds": fmean(line["multiply_adds"] for line in answered) if answered else None,
        "bytes_down": sum(line["bytes_down"] for line in metrics),
        "bytes_up": sum(line["bytes_up"] for line in metrics),
    }
    averaged = [line for line in evaluated if "accuracy_averaged" in line]
    if averaged:
        summary |= {name: averaged[-1][name] for name in AVERAGED if name in averaged[-1]}
    summary |= {name: last[name] for name in _FINAL_METRICS if name in last}
    validated = [line for line in evaluated if "validation_accuracy" in line]
    if validated:
        best = max(validated, key=lambda line: float(line["validation_accuracy"]))
        summary |= {"accuracy_best": best["accuracy"], "best_round": best["round"]}
    return summary


def count_unanswered(metrics: Metrics) -> dict[str, int]:
    """Return how many tasks of a run were rejected, late or lost, without the zeros.

    >>> count_unanswered([{"rejected": 1, "late": 0}, {"rejected": 2}])
    {'rejected': 3}
    """
    counts = {event: sum(line.get(event, 0) for line in metrics) for event in UNANSWERED}
    return {event: count for event, count in counts.items() if count}


def most_common_failure(events: Metrics) -> str:
    """Return the most frequent reason why tasks were not answered.

    >>> lost = {"event": "lost", "why": "no node holds this client"}
    >>> most_common_failure([{"event": "answered", "why": ""}, lost])
    'no node holds this client'
    """
    reasons = Counter(str(event.get("why")) for event in events if event["event"] in UNANSWERED)
    return reasons.most_common(1)[0][0] if reasons else "no node was there"
