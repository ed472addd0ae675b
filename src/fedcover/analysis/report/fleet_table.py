"""The devices of a run by capacity: how many there are, how they took part, and what became of their tasks."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedcover.analysis.report.downsample import compact_number
from fedcover.analysis.report.load import MetricsLine, RunRecord, natural_key
from fedcover.analysis.report.settings import devices_by_capacity
from fedcover.runs.metrics_log import EVENTS, event_subject

MAX_CAUSES, MAX_CLIENT_NAMES, MAX_CAUSE_LENGTH = 20, 5, 300
"""How many causes of missing answers are told, how many clients of each are named, and how long a cause may be."""


def fleet_table(record: RunRecord) -> list[dict[str, Any]]:
    """One row per capacity, largest first: its share of the fleet as written, and what its devices did so far."""
    devices = devices_by_capacity(str(record.settings.get("fleet", "1x1.0")))
    seen: dict[float, list[tuple[str, dict[str, Any]]]] = {capacity: [] for capacity in devices}
    for line in record.lines:
        for client, told in line.get("clients", {}).items():
            seen.setdefault(told["capacity"], []).append((client, told))
    return [
        {
            "capacity": compact_number(float(capacity)),
            "devices": devices.get(capacity, 0),
            "clients": len({client for client, _ in met}),
            "updates": len(met),
            "delta2": compact_number(fmean(told["delta2"] for _, told in met)) if met else None,
            "loss": compact_number(fmean(told["loss"] for _, told in met[-len(met) // 4 :]))
            if met
            else None,
        }
        for capacity, met in sorted(seen.items(), reverse=True)
    ]


def task_outcomes(events: Sequence[MetricsLine]) -> dict[str, Any] | None:
    """What became of the tasks of real devices: how many of each kind, and why others than answers; None without any.

    >>> found = task_outcomes([{"round": 0, "event": "late", "client": 3, "why": "no answer in 5 s"}])
    >>> found["counts"], found["causes"]
    ({'late': 1}, [{'event': 'late', 'why': 'no answer in 5 s', 'times': 1, 'who': 'client 3', 'rounds': '1'}])
    """
    if not events:
        return None
    counted = Counter(event["event"] for event in events)
    causes: dict[tuple[str, str], list[MetricsLine]] = {}
    for event in events:
        if event["event"] != "answered":
            causes.setdefault((event["event"], str(event.get("why", ""))), []).append(event)
    often = sorted(causes.items(), key=lambda cause: -len(cause[1]))
    return {
        "counts": {kind: counted[kind] for kind in EVENTS if counted[kind]},
        "causes": [_cause(*key, met) for key, met in often[:MAX_CAUSES]],
        "more": max(0, len(often) - MAX_CAUSES),
    }


def _cause(event: str, why: str, met: Sequence[MetricsLine]) -> dict[str, Any]:
    names = sorted({event_subject(event) for event in met}, key=natural_key)
    first, last = min(e["round"] for e in met) + 1, max(e["round"] for e in met) + 1
    return {
        "event": event,
        "why": why[:MAX_CAUSE_LENGTH],
        "times": len(met),
        "who": ", ".join(names[:MAX_CLIENT_NAMES])
        + (f" and {len(names) - MAX_CLIENT_NAMES} more" if len(names) > MAX_CLIENT_NAMES else ""),
        "rounds": str(first) if first == last else f"{first} to {last}",
    }
