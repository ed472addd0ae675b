"""The devices of a run by capacity: how many there are, and how they took part."""

from statistics import fmean
from typing import Any

from fedcover.reporting.reading import Record
from fedcover.reporting.thinning import short


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


def shares(fleet: str) -> dict[float, int]:
    """Devices per capacity of a fleet as experiments write it out.

    >>> shares("4x1 + 6x0.75")
    {1.0: 4, 0.75: 6}
    """
    found: dict[float, int] = {}
    for term in fleet.split("+"):
        number, _, capacity = term.partition("x")
        found[float(capacity)] = found.get(float(capacity), 0) + int(number)
    return found
