"""The metrics of runs, round by round, as plain rows for spreadsheets and other programs."""

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from fedcover.analysis.report.load import RunRecord
from fedcover.errors import printable

_FORMULA_SIGNS = ("=", "+", "-", "@")
"""Characters that begin a formula. `printable` removes tabs and line ends, which also can."""


def metric_rows(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return one row per run and round (counted from 0), with every metric that is a number.

    A metric that was not measured is not in the row. `seconds` is the sum over all phases.
    """
    rows = []
    for record in records:
        for line in record.lines:
            seed = record.settings.get("seed", 0)
            rows.append({"run": record.name, "seed": seed, **_numbers(line)})
    return rows


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
    return {
        **numbers,
        "clients": len(line.get("clients", {})),
        "seconds": sum(line.get("seconds", {}).values()),
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV with a header.

    A metric that was not measured is empty, and one that is not finite is nan or inf. Text that a
    spreadsheet would compute, or that would control a terminal, is made harmless.

    >>> print(as_csv([{"run": "a", "round": 0}, {"run": "a", "round": 1, "accuracy": 0.5}]), end="")
    run,round,accuracy
    a,0,
    a,1,0.5
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_harmless(column) for column in columns])
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        writer.writerow([_harmless(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def _harmless(cell: str) -> str:
    r"""Put a quote before text that a spreadsheet would take for a formula.

    >>> _harmless('=HYPERLINK("x")'), _harmless("-lr"), _harmless("a-1")
    ('\'=HYPERLINK("x")', "'-lr", 'a-1')
    """
    text = printable(cell)
    return f"'{text}" if text.lstrip().startswith(_FORMULA_SIGNS) else text


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a JSON list. A number that is not finite becomes null, as JSON has none.

    >>> as_json([{"loss": float("nan")}]).split()
    ['[', '{', '"loss":', 'null', '}', ']']
    """
    json_rows = [{key: _finite_or_none(value) for key, value in row.items()} for row in rows]
    return json.dumps(json_rows, indent=1, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
