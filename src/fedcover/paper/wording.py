"""How figures are written in the document: names, tables, mean and spread, the verdict on a claim."""

from collections.abc import Iterable, Sequence

from fedcover.paper.statistics import SeedStatistics, against_claim

DISPLAY_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "iid": "IID", "dirichlet": "Dirichlet",
         "all": "all columns"}  # fmt: skip


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    body = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *body])


def column_name(column: str) -> str:
    """A column as the paper calls it."""
    return DISPLAY_NAMES.get(column, column.replace("L", "L="))


def spread(found: SeedStatistics | None) -> str:
    """Mean and standard deviation as they are written; an empty cell says that nothing was run."""
    if found is None:
        return "not run"
    return f"{found.mean:.2f}" + (f" ± {found.spread:.2f}" if found.spread is not None else "")


def verdict(claim: float | None, found: SeedStatistics | None) -> str:
    """Our mean against a printed one."""
    return against_claim(claim, found) if claim is not None and found else ""
