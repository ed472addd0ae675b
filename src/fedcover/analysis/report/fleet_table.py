"""The devices of a run by capacity: how many there are, how they took part, and what became of their tasks."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedcover.analysis.report.downsample import short
from fedcover.analysis.report.load import Line, Record
from fedcover.analysis.report.ordering import natural
from fedcover.analysis.report.settings import shares
from fedcover.runs.metrics_log import EVENTS, whose

CAUSES, NAMES, LETTERS = 20, 5, 300
"""How many causes of missing answers are told, how many clients of each are named, and how long a cause may be."""


def fleet_table(record: Record) -> list[dict[str, Any]]:
    """One row per capacity, largest first: its share of the fleet as written, and what its devices did so far."""
    devices = shares(str(record.settings.get("fleet", "1x1.0")))
    seen: dict[float, list[tuple[str, dict[str, Any]]]] = {capacity: [] for capacity in devices}
    for line in record.lines:
        for client, told in line.get("clients", {}).items():
            seen.setdefault(told["capacity"], []).append((client, told))
    return [
        {
            "capacity": short(float(capacity)),
            "devices": devices.get(capacity, 0),
            "clients": len({client for client, _ in met}),
            "updates": len(met),
            "delta2": short(fmean(told["delta2"] for _, told in met)) if met else None,
            "loss": short(fmean(told["loss"] for _, told in met[-len(met) // 4 :])) if met else None,
        }
        for capacity, met in sorted(seen.items(), reverse=True)
    ]


def answers(events: Sequence[Line]) -> dict[str, Any] | None:
    """What became of the tasks of real devices: how many of each kind, and why others than answers; None without any.

    >>> found = answers([{"round": 0, "event": "late", "client": 3, "why": "no answer in 5 s"}])
    >>> found["counts"], found["causes"]
    ({'late': 1}, [{'event': 'late', 'why': 'no answer in 5 s', 'times': 1, 'who': 'client 3', 'rounds': '1'}])
    """
    if not events:
        return None
    counted = Counter(event["event"] for event in events)
    causes: dict[tuple[str, str], list[Line]] = {}
    for event in events:
        if event["event"] != "answered":
            causes.setdefault((event["event"], str(event.get("why", ""))), []).append(event)
    often = sorted(causes.items(), key=lambda cause: -len(cause[1]))
    return {
        "counts": {kind: counted[kind] for kind in EVENTS if counted[kind]},
        "causes": [_cause(*key, met) for key, met in often[:CAUSES]],
        "more": max(0, len(often) - CAUSES),
    }


def _cause(event: str, why: str, met: Sequence[Line]) -> dict[str, Any]:
    names = sorted({whose(event) for event in met}, key=natural)
    first, last = min(e["round"] for e in met) + 1, max(e["round"] for e in met) + 1
    return {
        "event": event,
        "why": why[:LETTERS],
        "times": len(met),
        "who": ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else ""),
        "rounds": str(first) if first == last else f"{first} to {last}",
    }
