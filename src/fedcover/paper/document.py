"""Write docs/reproduction.md and its figures from the results and the paper's numbers alone."""

from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.paper import comparisons
from fedcover.paper.cells import ROWS, Cell, cell_id
from fedcover.paper.claims import (
    COLUMNS,
    DATASETS,
    CodenameRow,
    claimed_accuracy,
    codename_rows,
    main_rows,
)
from fedcover.paper.designs import Design, designs
from fedcover.paper.document_extra import accuracy_cells, other_rows, public_code, rates
from fedcover.paper.evidence import Evidence
from fedcover.paper.figures import figure_links, write_figures
from fedcover.paper.tables import audit_tables
from fedcover.paper.wording import DISPLAY_NAMES, column_name, markdown_table, spread, verdict

MAX_DIFFERENCE = 5.0
"""Points by which a full model may differ from the printed one before its column is flagged."""


def write(results: Path, docs: Path) -> list[Path]:
    """Write the document and its figures. Parts without results say so."""
    if not any(results.glob("*.jsonl")):
        raise InvalidValue(
            f"out must be a folder with results of cells (.jsonl); got {str(results)!r}"
        )
    if docs.exists() and not docs.is_dir():
        raise InvalidValue(f"docs must be a folder; got {str(docs)!r}")
    evidence = Evidence(results)
    docs.mkdir(parents=True, exist_ok=True)
    figures = write_figures(evidence, docs / "reproduction")
    write_atomically(docs / "reproduction.md", render(evidence).encode())
    return [docs / "reproduction.md", *figures]


def render(evidence: Evidence) -> str:
    """Return the document: prose from a template, every number from the results."""
    text = (files("fedcover.paper") / "reproduction.md").read_text(encoding="utf-8")
    for name, block in BLOCKS.items():
        text = text.replace(f"{{{{{name}}}}}", block(evidence))
    return text


# ── the blocks ────────────────────────────────────────────────────────────────────────────────────


def progress(evidence: Evidence) -> str:
    """Return how many of the planned cells have been run."""
    cells_by_row: dict[tuple[str, str], list[Cell]] = {
        (dataset, row): [] for dataset in DATASETS for row in ROWS
    }
    for cell in evidence.cells.values():
        cells_by_row[cell.dataset, cell.row].append(cell)
    rows = []
    for (dataset, row), cells in cells_by_row.items():
        if not cells:
            continue
        num_runs = [len(evidence.results[cell.id]) for cell in cells]
        num_seeds = len(cells[0].seeds(3))
        with_a_run = sum(number > 0 for number in num_runs)
        complete = sum(number >= num_seeds for number in num_runs)
        rows.append([DISPLAY_NAMES[dataset], row, len(cells), with_a_run, complete])
    return markdown_table(["data", "rows", "cells", "with a run", "with all seeds"], rows)


def main_tables(evidence: Evidence) -> str:
    """Return the main table, split by data set and column."""
    lead = ["level", "setting", "design", "Γ printed", "Γ ours", "claimed"]
    heads = [*lead, "last", "last ten rounds", "best", "seeds", "against the claim"]
    parts = []
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            rows = [_main_row(evidence, dataset, column, design) for design in designs(dataset)]
            title = f"{DISPLAY_NAMES[dataset]}, {column_name(column)}"
            parts.append(f"### {title}\n\n{markdown_table(heads, rows)}")
    return "\n\n".join(parts)


def baselines(evidence: Evidence) -> str:
    """Compare the full model with the printed one, and name the columns with a large difference."""
    rows: list[list[object]] = []
    distant_columns: list[str] = []
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            id = cell_id(dataset, column, "full")
            claim = claimed_accuracy(dataset, column, "full", "full")
            tail, swing = evidence.seed_statistics(id, "tail"), evidence.swing(id)
            if tail is None or claim is None or swing is None:
                continue
            name = f"{DISPLAY_NAMES[dataset]} {column_name(column)}"
            last = spread(evidence.seed_statistics(id))
            difference = tail.mean - claim
            rows.append(
                [name, f"{claim:.2f}", last, spread(tail), f"{swing:.2f}", f"{difference:+.2f}"]
            )
            if abs(difference) > MAX_DIFFERENCE:
                distant_columns.append(name)
    heads = ["column", "claimed", "last", "last ten rounds", "swing", "last ten less claimed"]
    names = ", ".join(distant_columns) or "none"
    return f"{markdown_table(heads, rows)}\n\nMore than {MAX_DIFFERENCE:g} points away: {names}."


def summary_block(evidence: Evidence) -> str:
    """Return what the results say about the paper's claim, in a few lines."""
    lines = []
    for dataset in DATASETS:
        lines.append(_dataset_summary(evidence, dataset))
        for column in COLUMNS[dataset]:
            lines += _column_summary(evidence, dataset, column)
    return "\n".join(lines)


def _dataset_summary(evidence: Evidence, dataset: str) -> str:
    ids = [
        cell_id(dataset, column, design.name)
        for column in COLUMNS[dataset]
        for design in designs(dataset)
    ]
    with_runs = sum(bool(evidence.results[id]) for id in ids)
    planned = [pair for pair in comparisons.comparisons() if pair.dataset == dataset]
    compared = comparisons.with_results(evidence, planned)
    line = (
        f"- {DISPLAY_NAMES[dataset]}: {with_runs} of {len(ids)} cells of the main table have runs."
    )
    if compared:
        verdict_counts = comparisons.count_verdicts(compared)
        line += f" Optimised against greedy at equal capacity: {verdict_counts}."
    return line


def _column_summary(evidence: Evidence, dataset: str, column: str) -> list[str]:
    """Return the range of the final accuracies of a column, or nothing without runs."""
    ids = [
        cell_id(dataset, column, design.name)
        for design in designs(dataset)
        if design.setting != "homogeneous"
    ]
    all_statistics = [evidence.seed_statistics(id) for id in ids]
    means = [statistics.mean for statistics in all_statistics if statistics is not None]
    if not means:
        return []
    share = f"{len(means)} of {len(ids)} designs that are not homogeneous have runs"
    span = f"between {min(means):.2f} and {max(means):.2f}"
    return [f"  - {column_name(column)}: {share}; they end {span}."]


def verdicts(evidence: Evidence) -> str:
    """Count how our results compare with the claims of the main table."""
    words = ("=", "higher", "lower", "one seed", "diverged", "not run")
    rows = []
    for dataset in DATASETS:
        counts = Counter(
            verdict(
                claimed_accuracy(dataset, column, design.level, design.setting),
                evidence.seed_statistics(id),
            )
            or ("diverged" if evidence.diverged(id) else "not run")
            for column in COLUMNS[dataset]
            for design in designs(dataset)
            for id in [cell_id(dataset, column, design.name)]
        )
        rows.append([DISPLAY_NAMES[dataset], *(counts[word] for word in words)])
    return markdown_table(["data", "within noise of the claim", *words[1:]], rows)


def _main_row(evidence: Evidence, dataset: str, column: str, design: Design) -> list[object]:
    id = cell_id(dataset, column, design.name)
    claim = claimed_accuracy(dataset, column, design.level, design.setting)
    printed = next(
        r.gamma for r in main_rows() if (r.level, r.setting) == (design.level, design.setting)
    )
    ours = "" if design.setting == "homogeneous" else evidence.gamma(id)
    name = design.name if dataset == "mnist" else ""
    return [
        design.level, design.setting, name, printed, "" if ours is None else ours, f"{claim:.2f}",
        *accuracy_cells(evidence, id, claim),
    ]  # fmt: skip


def appendix_table(kind: str) -> Callable[[Evidence], str]:
    """Return the block of an appendix table, with global and local accuracy."""

    def block(evidence: Evidence) -> str:
        columns = [
            head
            for name in ("IID", "L=2 global", "L=2 local")
            for head in (f"{name} claimed", "ours", "")
        ]
        heads = ["codename", *columns, "seeds (IID, L=2)"]
        return markdown_table(
            heads, [_appendix_row(evidence, kind, row) for row in codename_rows(kind)]
        )

    return block


def _appendix_row(evidence: Evidence, kind: str, row: CodenameRow) -> list[object]:
    design = "full" if set(row.codename) == {"1"} else f"{kind}-{row.codename}"
    iid, skewed = (cell_id("mnist", column, design) for column in ("iid", "L2"))
    claims = [
        (row.iid, iid, "last"),
        (row.non_iid_global, skewed, "last"),
        (row.non_iid_local, skewed, "local"),
    ]
    cells: list[object] = []
    for claim, id, figure in claims:
        statistics = evidence.seed_statistics(id, figure)
        cells += [claim, spread(statistics), verdict(claim, statistics)]
    return [row.codename, *cells, f"{len(evidence.of(iid))}, {len(evidence.of(skewed))}"]


def audit_block(evidence: Evidence) -> str:
    """Return what is wrong in the printed tables."""
    audit = audit_tables()
    wrong_figures = [
        [row["table"], row["codename"], name.replace("_", " "), row["printed"][name],
         f"{(row['closed_form'] | row['shares'])[name]:.6g}"]
        for row in audit["rows"]
        for name in row["wrong"]
    ]  # fmt: skip
    heads = ["table", "codename", "figure", "printed", "right"]
    equal = "equal" if audit["equal_to_closed_form"] else "DIFFER FROM"
    contradictions = "\n".join(f"- {sentence}." for sentence in audit["contradictions"])
    return (
        f"Our figures for all {len(audit['rows'])} rows {equal} the closed form. "
        f"Printed cells that do not:\n\n{markdown_table(heads, wrong_figures)}\n\n"
        f"And:\n\n{contradictions}"
    )


def provenance_table(evidence: Evidence) -> str:
    """Return the computers and the source that the results were made with."""
    rows = [[name, runs, f"{seconds / 3600:.2f}"] for name, runs, seconds in evidence.machines()]
    if not rows:
        return "Nothing has been run yet."
    states = evidence.states()
    source = (
        f"{states['commit']} runs were made from a commit, {states['changed']} from one with "
        f"changes beside it, {states['copy']} from a copy without git; `made` in each file names "
        "the commit, and the source by digest."
    )
    return f"{markdown_table(['computer', 'runs', 'hours in rounds'], rows)}\n\n{source}"


BLOCKS: dict[str, Callable[[Evidence], str]] = {
    "short": summary_block,
    "progress": progress,
    "baselines": baselines,
    "verdicts": verdicts,
    "main": main_tables,
    "ranks": comparisons.block,
    "pruning": appendix_table("pruning"),
    "subnet": appendix_table("subnet"),
    "planned": other_rows("planned"),
    "public-code": public_code,
    "dirichlet": other_rows("dirichlet"),
    "rates": rates,
    "second-rate": other_rows("second-rate"),
    "second-ranks": comparisons.second_rate_block,
    "audit": audit_block,
    "figures": figure_links,
    "machines": provenance_table,
}
"""The block for each {{name}} in the template."""
