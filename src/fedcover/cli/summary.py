"""The table at the end of a run."""

from collections.abc import Mapping
from typing import Any

from fedcover.cli import conclusions, console


def show_summary(name: str, summary: Mapping[str, Any], json: bool) -> None:
    """Print the summary of a run as a table and a sentence, or as JSON."""
    if json:
        return console.show_json(summary)
    rows = [[metric, value] for metric, value in summary.items()]
    console.table(name, ["metric", "value"], rows)
    return print(conclusions.of_run(summary))
