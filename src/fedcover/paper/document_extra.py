"""What stands in the document beside the paper's own rows: planned designs, the public code, other learning rates."""

from collections.abc import Callable

from fedcover.paper.cells import RATE, Cell, cell_id
from fedcover.paper.claims import COLUMNS, DATASETS, codename_rows
from fedcover.paper.evidence import Evidence
from fedcover.paper.wording import DISPLAY_NAMES, column_name, markdown_table, spread, verdict

HEADS = ["data", "column", "row", "last", "best", "seeds", "beside", "difference, same seeds"]


def obtained(evidence: Evidence, id: str, claim: float | None) -> list[object]:
    """Last, mean of the last ten rounds, best, seeds and verdict of a cell."""
    last, tail, best = (evidence.seed_statistics(id, figure) for figure in ("last", "tail", "best"))
    lost = evidence.diverged(id)
    seeds = f"{last.seeds if last else 0}" + (f" ({lost} diverged)" if lost else "")
    if last is None:
        return ["diverged" if lost else "not run", "", "", seeds, ""]
    return [spread(last), spread(tail), spread(best), seeds, verdict(claim, last)]


def other_rows(row: str) -> Callable[[Evidence], str]:
    """Extra rows, each beside the row of the main table or of the appendix that it goes with."""

    def block(evidence: Evidence) -> str:
        rows = [_other_row(evidence, cell) for cell in evidence.cells.values() if cell.row == row]
        return (
            markdown_table(HEADS, rows)
            if rows
            else "None yet: the learning rates have not been tried."
        )

    return block


def _other_row(evidence: Evidence, cell: Cell) -> list[object]:
    partner = _partner(cell)
    difference = evidence.difference(cell.id, partner)
    change = f"{difference.mean:+.2f} ({difference.verdict})" if difference else ""
    name = cell.design if cell.design.startswith(cell.level) else f"{cell.level}, {cell.design}"
    last, _, best, seeds, _ = obtained(evidence, cell.id, None)
    beside = spread(evidence.seed_statistics(partner))
    return [
        DISPLAY_NAMES[cell.dataset],
        column_name(cell.column),
        name,
        last,
        best,
        seeds,
        beside,
        change,
    ]


def public_code(evidence: Evidence) -> str:
    """The public code's departures beside the faithful algorithm and the printed accuracy: which of them is nearer?"""
    cells = [cell for cell in evidence.cells.values() if cell.row == "public-code"]
    heads = [*HEADS, "printed"]
    decided = [cell for cell in cells if _decided(evidence, cell)]
    nearer = sum(
        _away(evidence, cell.id, cell) < _away(evidence, _partner(cell), cell) for cell in decided
    )
    return (
        f"{markdown_table(heads, [[*_other_row(evidence, cell), f'{_printed_accuracy(cell):.2f}'] for cell in cells])}\n\n"
        f"Of the {len(decided)} places where the two differ by more than noise, the departures are nearer to "
        f"the printed accuracy than the faithful algorithm in {nearer}."
    )


def _decided(evidence: Evidence, cell: Cell) -> bool:
    found = evidence.difference(cell.id, _partner(cell))
    return found is not None and found.verdict in ("higher", "lower")


def _away(evidence: Evidence, id: str, cell: Cell) -> float:
    found = evidence.seed_statistics(id)
    return abs(found.mean - _printed_accuracy(cell)) if found else float("inf")


def _printed_accuracy(cell: Cell) -> float:
    """What the appendix prints for the codename of a cell."""
    [row] = [row for row in codename_rows("pruning") if cell.design.endswith(row.codename)]
    return row.iid if cell.column == "iid" else row.non_iid_global


def _partner(cell: Cell) -> str:
    """The cell that an extra row is compared with: the same design as the paper runs it."""
    if cell.row == "dirichlet":
        return cell_id(cell.dataset, COLUMNS[cell.dataset][-1], cell.design)
    design = cell.design.removesuffix("-planned")
    return cell_id(cell.dataset, cell.column, "full" if design.endswith("1" * 10) else design)


def rates(evidence: Evidence) -> str:
    """The learning rates that were tried, and which one was chosen."""
    rows = []
    for dataset in DATASETS:
        rate_scores = evidence.rate_scores(dataset)
        cells = ["not run" if score is None else f"{score:.2f}" for score in rate_scores.values()]
        best = (
            evidence.rates.get(dataset, RATE)
            if None not in rate_scores.values()
            else "not chosen yet"
        )
        rows.append([DISPLAY_NAMES[dataset], *cells, best])
    heads = ["data", *(f"{rate:g}" for rate in evidence.rate_scores("mnist")), "chosen"]
    return markdown_table(heads, rows)
