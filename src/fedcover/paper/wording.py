"""How numbers are written in the document: names, tables, mean and spread, verdicts."""

from collections.abc import Iterable, Sequence

from fedcover.paper.statistics import SeedStatistics, against_claim

DISPLAY_NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "iid": "IID",
    "dirichlet": "Dirichlet",
    "all": "all columns",
}


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [_table_line(heads), "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(_table_line(row) for row in rows)])


def _table_line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def column_name(column: str) -> str:
    """Return the paper's name of a column."""
    return DISPLAY_NAMES.get(column, column.replace("L", "L="))


def spread(statistics: SeedStatistics | None) -> str:
    """Return mean and standard deviation as text."""
    if statistics is None:
        return "not run"
    if statistics.spread is None:
        return f"{statistics.mean:.2f}"
    return f"{statistics.mean:.2f} ± {statistics.spread:.2f}"


def verdict(claim: float | None, ours: SeedStatistics | None) -> str:
    """Return how our mean compares with a printed one; empty if one of them is missing."""
    if claim is None or ours is None:
        return ""
    return against_claim(claim, ours)
