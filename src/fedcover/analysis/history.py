"""The figures of runs, round by round, as plain rows for spreadsheets, data frames and other programs."""

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from fedcover.analysis.report.load import RunRecord
from fedcover.errors import printable

_FORMULA = ("=", "+", "-", "@")
"""Signs with which a formula begins; tabs and ends of lines are no printable signs."""


def metric_rows(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
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
    return {
        **numbers,
        "clients": len(line.get("clients", {})),
        "seconds": sum(line.get("seconds", {}).values()),
    }


def as_csv(found: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with a head line; what was not measured is empty, what is not finite says so (nan, inf).

    A text that a spreadsheet would compute, or a terminal obey, is changed so that it is only a text.

    >>> print(as_csv([{"run": "a", "round": 0}, {"run": "a", "round": 1, "accuracy": 0.5}]), end="")
    run,round,accuracy
    a,0,
    a,1,0.5
    """
    columns = list(dict.fromkeys(key for row in found for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_as_text(column) for column in columns])
    for row in found:
        cells = [row.get(column, "") for column in columns]
        writer.writerow([_as_text(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def _as_text(cell: str) -> str:
    r"""A text with a quote before what would begin a formula.

    >>> _as_text('=HYPERLINK("x")'), _as_text("-lr"), _as_text("a-1")
    ('\'=HYPERLINK("x")', "'-lr", 'a-1')
    """
    plain = printable(cell)
    return f"'{plain}" if plain.lstrip().startswith(_FORMULA) else plain


def as_json(found: Sequence[dict[str, Any]]) -> str:
    """Rows as a JSON list; what is not finite is null, since JSON has no word for it.

    >>> as_json([{"loss": float("nan")}]).split()
    ['[', '{', '"loss":', 'null', '}', ']']
    """
    finite = [
        {key: None if _endless(value) else value for key, value in row.items()} for row in found
    ]
    return json.dumps(finite, indent=1, allow_nan=False)


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
