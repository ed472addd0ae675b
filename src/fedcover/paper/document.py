"""docs/reproduction.md and its figures, made from the results and the paper's printed numbers and nothing else."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.paper import comparisons
from fedcover.paper.cells import ROWS, SETS, cell_id
from fedcover.paper.claims import (
    COLUMNS,
    DATASETS,
    CodenameRow,
    claimed_accuracy,
    codename_rows,
    main_rows,
)
from fedcover.paper.designs import Design, designs
from fedcover.paper.document_extra import obtained, other_rows, public_code, rates
from fedcover.paper.evidence import Evidence
from fedcover.paper.svg_chart import Series, chart
from fedcover.paper.tables import audit_tables
from fedcover.paper.wording import DISPLAY_NAMES, column_name, markdown_table, spread, verdict

FIGURES = {
    "medium-iid": ("MNIST, IID, medium level", "iid", "main"),
    "medium-L2": ("MNIST, L=2, medium level", "L2", "main"),
    "pruning-iid": ("MNIST, IID, weights pruning", "iid", "mnist-pruning"),
    "pruning-L2": ("MNIST, L=2, weights pruning", "L2", "mnist-pruning"),
    "subnet-iid": ("MNIST, IID, fixed sub-networks", "iid", "mnist-subnet"),
    "subnet-L2": ("MNIST, L=2, fixed sub-networks", "L2", "mnist-subnet"),
}

FAR = 5.0
"""Points by which a full model may miss the printed one before its column is said to be another experiment."""


def write(results: Path, docs: Path) -> list[Path]:
    """Write the document and its figures; what has no results yet says so."""
    if not any(results.glob("*.jsonl")):
        raise InvalidValue(
            f"out must be a folder with results of cells (.jsonl); got {str(results)!r}"
        )
    if docs.exists() and not docs.is_dir():
        raise InvalidValue(f"docs must be a folder; got {str(docs)!r}")
    evidence = Evidence(results)
    docs.mkdir(parents=True, exist_ok=True)
    write_atomically(docs / "reproduction.md", render(evidence).encode())
    return [docs / "reproduction.md", *write_figures(evidence, docs / "reproduction")]


def write_figures(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the curves that there are."""
    drawn = draw_figures(evidence)
    if drawn:
        folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        write_atomically(folder / f"{name}.svg", svg.encode())
    return [folder / f"{name}.svg" for name in drawn]


def render(evidence: Evidence) -> str:
    """The document: prose from a template, every number from the results."""
    text = (files("fedcover.paper") / "reproduction.md").read_text(encoding="utf-8")
    for name, block in BLOCKS.items():
        text = text.replace(f"{{{{{name}}}}}", block(evidence))
    return text


# ── the blocks ──────────────────────────────────────────────────────────────────────────────────────────


def progress(evidence: Evidence) -> str:
    """How much of what is planned has been run."""
    rows = []
    for dataset in DATASETS:
        for row in ROWS:
            of = [
                cell
                for cell in evidence.cells.values()
                if (cell.dataset, cell.row) == (dataset, row)
            ]
            if of:
                done = [len(evidence.results[cell.id]) for cell in of]
                need = len(of[0].seeds(3))
                rows.append(
                    [
                        DISPLAY_NAMES[dataset],
                        row,
                        len(of),
                        sum(n > 0 for n in done),
                        sum(n >= need for n in done),
                    ]
                )
    return markdown_table(["data", "rows", "cells", "with a run", "with all seeds"], rows)


def main_tables(evidence: Evidence) -> str:
    """The main table, one table for each data set and column."""
    lead = ["level", "setting", "design", "Γ printed", "Γ ours", "claimed"]
    heads = [*lead, "last", "last ten rounds", "best", "seeds", "against the claim"]
    parts = []
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            rows = [_main_row(evidence, dataset, column, design) for design in designs(dataset)]
            parts.append(
                f"### {DISPLAY_NAMES[dataset]}, {column_name(column)}\n\n{markdown_table(heads, rows)}"
            )
    return "\n\n".join(parts)


def baselines(evidence: Evidence) -> str:
    """The full model, of which nothing is cut, beside the printed one; and the columns where it is far away."""
    rows, far = [], []
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            id, claim = (
                cell_id(dataset, column, "full"),
                claimed_accuracy(dataset, column, "full", "full"),
            )
            tail, swing = evidence.seed_statistics(id, "tail"), evidence.swing(id)
            if tail is None or claim is None or swing is None:
                continue
            name = f"{DISPLAY_NAMES[dataset]} {column_name(column)}"
            rows.append([name, f"{claim:.2f}", spread(evidence.seed_statistics(id)), spread(tail), f"{swing:.2f}",
                         f"{tail.mean - claim:+.2f}"])  # fmt: skip
            far += [name] if abs(tail.mean - claim) > FAR else []
    heads = ["column", "claimed", "last", "last ten rounds", "swing", "last ten less claimed"]
    return f"{markdown_table(heads, rows)}\n\nMore than {FAR:g} points away: {', '.join(far) or 'none'}."


def summary_block(evidence: Evidence) -> str:
    """What the results say about the paper's claim, in a few lines."""
    lines = []
    for dataset in DATASETS:
        ids = [
            cell_id(dataset, column, design.name)
            for column in COLUMNS[dataset]
            for design in designs(dataset)
        ]
        run = f"{sum(bool(evidence.results[id]) for id in ids)} of {len(ids)} cells of the main table have runs"
        of_dataset = [where for where in comparisons.comparisons() if where.dataset == dataset]
        known = comparisons.with_results(evidence, of_dataset)
        ranked = (
            f" Optimised against greedy at equal capacity: {comparisons.count_verdicts(known)}."
            if known
            else ""
        )
        lines.append(f"- {DISPLAY_NAMES[dataset]}: {run}.{ranked}")
        for column in COLUMNS[dataset]:
            of = [
                cell_id(dataset, column, d.name)
                for d in designs(dataset)
                if d.setting != "homogeneous"
            ]
            ends = [found.mean for id in of if (found := evidence.seed_statistics(id)) is not None]
            if ends:
                most = f"between {min(ends):.2f} and {max(ends):.2f}"
                share = f"{len(ends)} of {len(of)} designs that are not homogeneous have runs"
                lines.append(f"  - {column_name(column)}: {share}; they end {most}.")
    return "\n".join(lines)


def verdicts(evidence: Evidence) -> str:
    """How the main table's claims fared, counted."""
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
        *obtained(evidence, id, claim),
    ]  # fmt: skip


def appendix_table(kind: str) -> Callable[[Evidence], str]:
    """One of the appendix tables, with global and local accuracy."""

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
    places = [
        (row.iid, iid, "last"),
        (row.non_iid_global, skewed, "last"),
        (row.non_iid_local, skewed, "local"),
    ]
    found = [(claim, evidence.seed_statistics(id, figure)) for claim, id, figure in places]
    cells = [
        text
        for claim, obtained in found
        for text in (claim, spread(obtained), verdict(claim, obtained))
    ]
    return [row.codename, *cells, f"{len(evidence.of(iid))}, {len(evidence.of(skewed))}"]


def audit_block(evidence: Evidence) -> str:
    """What is wrong in the printed tables."""
    found = audit_tables()
    wrong = [
        [row["table"], row["codename"], name.replace("_", " "), row["printed"][name],
         f"{(row['closed_form'] | row['shares'])[name]:.6g}"]
        for row in found["rows"]
        for name in row["wrong"]
    ]  # fmt: skip
    equal = "equal" if found["equal_to_closed_form"] else "DIFFER FROM"
    listed = "\n".join(f"- {sentence}." for sentence in found["contradictions"])
    lead = f"Our figures for all {len(found['rows'])} rows {equal} the closed form. Printed cells that do not:"
    return f"{lead}\n\n{markdown_table(['table', 'codename', 'figure', 'printed', 'right'], wrong)}\n\nAnd:\n\n{listed}"


def provenance_table(evidence: Evidence) -> str:
    """On what the results were made."""
    rows = [[name, runs, f"{seconds / 3600:.2f}"] for name, runs, seconds in evidence.machines()]
    if not rows:
        return "Nothing has been run yet."
    states = evidence.states()
    source = (
        f"{states['commit']} runs were made from a commit, {states['changed']} from one with changes beside it, "
        f"{states['copy']} from a copy without git; `made` in each file names the commit, and the source by digest."
    )
    return f"{markdown_table(['computer', 'runs', 'hours in rounds'], rows)}\n\n{source}"


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────


def draw_figures(evidence: Evidence) -> dict[str, str]:
    """The paper's figures as SVG, by name; those without any run are left out."""
    return {name: chart(FIGURES[name][0], panels) for name, panels in _panels(evidence).items()}


def _panels(evidence: Evidence) -> dict[str, list[tuple[str, list[Series]]]]:
    """What each figure shows, for those that have any run."""
    found = {}
    for name, (_, column, of) in FIGURES.items():
        runs = {
            evidence.cells[id].design: evidence.results[id] for id in _lines(evidence, column, of)
        }
        panels = [(label, _series(runs, label)) for label in ("loss", "accuracy")]
        if all(lines for _, lines in panels):
            found[name] = panels
    return found


def _lines(evidence: Evidence, column: str, of: str) -> list[str]:
    """The cells that a figure shows: the medium level of the main table, or an appendix table."""
    return [
        id
        for id, cell in evidence.cells.items()
        if cell.dataset == "mnist"
        and cell.column == column
        and cell.row in ("main", "appendix")
        and (
            of in cell.sets
            if of in SETS
            else cell.row == "main" and cell.level in ("full", "medium")
        )
    ]


def _series(lines: Mapping[str, Sequence[Mapping[str, Any]]], label: str) -> list[Series]:
    made = []
    for name, runs in lines.items():
        curves = [run["curve"] for run in runs if not run["diverged"] and run["curve"].get(label)]
        if curves:
            rounds = [int(r) for r in curves[0]["round"]]
            made.append(
                Series(
                    name,
                    rounds,
                    [curve[label] for curve in curves if len(curve["round"]) == len(rounds)],
                )
            )
    return made


def figure_links(evidence: Evidence) -> str:
    """The figures where they are, and a word where they are not."""
    there = _panels(evidence)
    return "\n\n".join(
        f"![{title}: loss and accuracy by round](reproduction/{name}.svg)"
        if name in there
        else f"{title}: not run."
        for name, (title, _, _) in FIGURES.items()
    )


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
"""What the template's {{names}} stand for."""
