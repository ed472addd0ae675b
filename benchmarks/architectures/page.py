"""The results as the table of docs/tracing.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "tracing.md"
MARKS = (
    "<!-- architectures: written by `python -m benchmarks.architectures --docs` -->\n",
    "<!-- end -->\n",
)
PLAIN = 1e-9
"""Up to what difference plain zeros count as the same."""

HEAVY = 0.45
"""A share of parameters at width 0.5 that is worth a word: a quarter is usual."""

Row = dict[str, Any]


def share_cut(rows: Sequence[Row], library: str = "timm") -> tuple[int, int]:
    """How many families of a library are cut, of how many that run."""
    running = [row for row in rows if row["library"] == library and row["outcome"] != "unable"]
    return sum(row["outcome"] == "cut" for row in running), len(running)


def page(rows: Sequence[Row]) -> str:
    """Give what is cut, what stays whole and why, and what does not run on such images."""
    rows = sorted(rows, key=lambda row: (row["library"], row["family"]))
    cut_rows = [row for row in rows if row["outcome"] == "cut"]
    whole = [row for row in rows if row["outcome"] not in ("cut", "unable")]
    unable = [row for row in rows if row["outcome"] == "unable"]
    return "\n".join(
        [
            _summary(rows, cut_rows),
            "",
            *_cut(cut_rows),
            "",
            *_reasons("refused, or not known", whole),
            *_reasons("does not run on 64 x 64 images", unable),
        ]
    )


def _summary(rows: Sequence[Row], done: Sequence[Row]) -> str:
    cut, running = share_cut(rows)
    alike = sum(row["difference"] <= PLAIN for row in done)
    dates = dict.fromkeys(sorted({row["date"] for row in rows}))
    fedcover_version = rows[0]["fedcover"]
    others = [
        f"{share_cut(rows, name)[0]} of {share_cut(rows, name)[1]} of {name}"
        for name in _others(rows)
    ]
    used = ", ".join(
        f"{name} {_version(rows, name)}"
        for name in ("torch", "timm", *_others(rows))
        if _version(rows, name)
    )
    heavy = [f"{row['family']} {row['half']:.0%}" for row in done if row["half"] > HEAVY]
    more = f" Much stays whole in {', '.join(heavy)}." if heavy else ""
    return (
        f"Of timm's {sum(row['library'] == 'timm' for row in rows)} families "
        f"{running} run on 64 x 64 images, and "
        f"**{cut} of these {running} ({100 * cut / running:.1f} %)** are traced, "
        "cut and equal to the mask; so are "
        f"{' and '.join(others)} ({used}, fedcover {fedcover_version}; {' and '.join(dates)}). "
        f"With {alike} of the {len(done)} models the half also gives the outputs "
        "of the whole with plain zeros, when "
        "evaluated in float64; the others average over units (layer norms and "
        "their like), which plain zeros change." + more
    )


def _others(rows: Sequence[Row]) -> list[str]:
    return sorted({row["library"] for row in rows} - {"timm"})


def _version(rows: Sequence[Row], name: str) -> str:
    return next((str(row[name]) for row in rows if name in row), "")


def _cut(rows: Sequence[Row]) -> list[str]:
    lines = ["| cut | model | groups | parameters at width 0.5 |", "|---|---|---|---|"]
    return lines + [
        f"| {_name(row)} | {_model(row)} | {row['groups']} | {row['half']:.0%} |" for row in rows
    ]


def _reasons(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {title} | model | why |", "|---|---|---|"]
    return [*lines, *(f"| {_name(row)} | {_model(row)} | {_why(row)} |" for row in rows), ""]


def _name(row: Row) -> str:
    return row["family"] if row["library"] == "timm" else f"{row['family']} ({row['library']})"


def _model(row: Row) -> str:
    if row["library"] == "transformers":
        return f"`AutoModelFor{row['model']}`, tiny"
    return f"`{row['model']}`" + (", smaller" if row["options"] else "")


def _why(row: Row) -> str:
    return (
        row["reason"]
        .partition("; keep its units whole")[0]
        .partition("; keep th")[0]
        .replace("|", "\\|")[:240]
    )


def written(text: str, rows: Sequence[Row]) -> str:
    """Put the table between its marks."""
    start, end = MARKS
    before, rest = text.split(start)
    return before + start + page(rows) + end + rest.split(end, 1)[1]
