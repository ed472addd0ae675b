"""One small file for every cell: its settings, the runs that chose its rate, those that are judged,
who made them.

Runs are added as they end, so files of any machine and any moment can be copied beside each other.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.coverage.cells import Cell
from fedcover.errors import RunError
from fedcover.host.disk import write_atomically

Sheet = dict[str, Any]


def read(folder: Path, cell: Cell) -> Sheet:
    """What is known of a cell; nothing but its settings at first."""
    path = _path(folder, cell.id)
    if not path.exists():
        return {
            "id": cell.id,
            "fields": dict(cell.fields),
            "lr": None,
            "made": [],
            "tuning": [],
            "runs": [],
        }
    sheet: Sheet = json.loads(path.read_text())
    if sheet["fields"] != dict(cell.fields):
        raise RunError(f"{path} was made with other settings: move it away")
    return sheet


def add(folder: Path, cell: Cell, part: str, line: dict[str, Any], made: dict[str, Any]) -> None:
    """Keep a run in `tuning` or in `runs`, and with what it was made."""
    sheet = read(folder, cell)
    maker = {key: value for key, value in made.items() if key != "created"}
    if maker not in sheet["made"]:
        sheet["made"].append(maker)
    sheet[part].append({**line, "made": sheet["made"].index(maker)})
    _write(folder, sheet)


def untried_rates(folder: Path, cell: Cell, rates: tuple[float, ...]) -> list[float]:
    """The learning rates that are still to be tried: none where the rate is known, fixed, or that
    of another cell.
    """
    sheet = read(folder, cell)
    if sheet["lr"] is not None or cell.rate_of or "lr" in cell.fields:
        return []
    return [lr for lr in rates if lr not in [line["lr"] for line in sheet["tuning"]]]


def choose_rate(folder: Path, cell: Cell) -> float:
    """Fixed, that of another cell, or the best on validation data of those that were tried."""
    sheet = read(folder, cell)
    if sheet["lr"] is None:
        sheet["lr"] = _rate(folder, cell, sheet)
        _write(folder, sheet)
    return float(sheet["lr"])


def _rate(folder: Path, cell: Cell, sheet: Sheet) -> float:
    if "lr" in cell.fields:
        return float(cell.fields["lr"])
    if not cell.rate_of:
        return float(max(sheet["tuning"], key=lambda line: line["validation"])["lr"])
    other = _path(folder, cell.rate_of)
    tuned_rate = json.loads(other.read_text())["lr"] if other.exists() else None
    if tuned_rate is None:
        raise RunError(
            f"{cell.id} has the learning rate of {cell.rate_of}, which is "
            "not chosen yet: run that first"
        )
    return float(tuned_rate)


def missing_seeds(folder: Path, cell: Cell) -> list[int]:
    """The seeds that are still to be run."""
    return [
        seed
        for seed in cell.seeds
        if seed not in [line["seed"] for line in read(folder, cell)["runs"]]
    ]


def _path(folder: Path, id: str) -> Path:
    return folder / f"{id}.json"


def _write(folder: Path, sheet: Sheet) -> None:
    """One line for each thing and for each run, so that it can be read and compared."""
    texts = {key: json.dumps(value) for key, value in sheet.items()}
    for part in ("made", "tuning", "runs"):
        if sheet[part]:
            texts[part] = "[\n  " + ",\n  ".join(json.dumps(line) for line in sheet[part]) + "\n ]"
    path = _path(folder, sheet["id"])
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n ".join(f"{json.dumps(key)}: {text}" for key, text in texts.items())
    write_atomically(path, ("{\n " + body + "\n}\n").encode())
