"""The figures of runs, round by round, as plain rows for spreadsheets, data frames and other programs."""

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from fedcover.reporting.reading import Record


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a run and round (counted from 0, as in metrics.jsonl): every figure that is a number.

    What was not measured in a round is not in its row; `seconds` is the sum over the phases.
    """
    return [
        {"run": record.name, "seed": record.settings.get("seed", 0), **_figures(line)}
        for record in records
        for line in record.lines
    ]


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
    return {**numbers, "clients": len(line.get("clients", {})), "seconds": sum(line.get("seconds", {}).values())}


def as_csv(found: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with a head line; what was not measured is empty, what is not finite says so (nan, inf).

    >>> print(as_csv([{"run": "a", "round": 0}, {"run": "a", "round": 1, "accuracy": 0.5}]), end="")
    run,round,accuracy
    a,0,
    a,1,0.5
    """
    columns = dict.fromkeys(key for row in found for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_json(found: Sequence[dict[str, Any]]) -> str:
    """Rows as a JSON list; what is not finite is null, since JSON has no word for it.

    >>> as_json([{"loss": float("nan")}]).split()
    ['[', '{', '"loss":', 'null', '}', ']']
    """
    finite = [{key: None if _endless(value) else value for key, value in row.items()} for row in found]
    return json.dumps(finite, indent=1, allow_nan=False)


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
