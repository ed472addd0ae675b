"""The devices of a run by capacity, how they took part, and why tasks were not answered."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedcover.analysis.report.downsample import compact_number
from fedcover.analysis.report.load import MetricsLine, RunRecord, natural_key
from fedcover.analysis.report.settings import devices_by_capacity
from fedcover.runs.metrics_log import EVENTS, event_subject

MAX_CAUSES = 20
"""Number of causes of missing answers that are listed."""
MAX_CLIENT_NAMES = 5
"""Number of clients that are named for each cause."""
MAX_CAUSE_LENGTH = 300


def fleet_table(record: RunRecord) -> list[dict[str, Any]]:
    """Return one row per capacity, largest first: its devices, and what they did so far."""
    devices = devices_by_capacity(str(record.settings.get("fleet", "1x1.0")))
    updates_by_capacity: dict[float, list[dict[str, Any]]] = {capacity: [] for capacity in devices}
    for line in record.lines:
        for client, metrics in line.get("clients", {}).items():
            updates = updates_by_capacity.setdefault(metrics["capacity"], [])
            updates.append({**metrics, "client": client})
    return [
        _capacity_row(capacity, devices.get(capacity, 0), updates)
        for capacity, updates in sorted(
            updates_by_capacity.items(), key=lambda item: item[0], reverse=True
        )
    ]


def _capacity_row(
    capacity: float, num_devices: int, updates: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    delta2 = loss = None
    if updates:
        newest_quarter = updates[-len(updates) // 4 :]
        delta2 = compact_number(fmean(update["delta2"] for update in updates))
        loss = compact_number(fmean(update["loss"] for update in newest_quarter))
    return {
        "capacity": compact_number(float(capacity)),
        "devices": num_devices,
        "clients": len({update["client"] for update in updates}),
        "updates": len(updates),
        "delta2": delta2,
        "loss": loss,
    }


def task_outcomes(events: Sequence[MetricsLine]) -> dict[str, Any] | None:
    """Count the outcomes of tasks on real devices, and give the causes of missing answers.

    Return None if there are no events.

    >>> late = {"round": 0, "event": "late", "client": 3, "why": "no answer in 5 s"}
    >>> outcomes = task_outcomes([late])
    >>> outcomes["counts"]
    {'late': 1}
    >>> outcomes["causes"]
    [{'event': 'late', 'why': 'no answer in 5 s', 'times': 1, 'who': 'client 3', 'rounds': '1'}]
    """
    if not events:
        return None
    counts = Counter(event["event"] for event in events)
    events_by_cause: dict[tuple[str, str], list[MetricsLine]] = {}
    for event in events:
        if event["event"] != "answered":
            cause = event["event"], str(event.get("why", ""))
            events_by_cause.setdefault(cause, []).append(event)
    causes = sorted(events_by_cause.items(), key=lambda item: -len(item[1]))
    return {
        "counts": {kind: counts[kind] for kind in EVENTS if counts[kind]},
        "causes": [_cause_row(kind, why, alike) for (kind, why), alike in causes[:MAX_CAUSES]],
        "more": max(0, len(causes) - MAX_CAUSES),
    }


def _cause_row(kind: str, why: str, events: Sequence[MetricsLine]) -> dict[str, Any]:
    subjects = sorted({event_subject(event) for event in events}, key=natural_key)
    who = ", ".join(subjects[:MAX_CLIENT_NAMES])
    if len(subjects) > MAX_CLIENT_NAMES:
        who += f" and {len(subjects) - MAX_CLIENT_NAMES} more"
    rounds = [event["round"] + 1 for event in events]
    first, last = min(rounds), max(rounds)
    return {
        "event": kind,
        "why": why[:MAX_CAUSE_LENGTH],
        "times": len(events),
        "who": who,
        "rounds": str(first) if first == last else f"{first} to {last}",
    }
