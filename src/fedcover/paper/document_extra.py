"""Rows of the document that the paper does not have: planned designs, public code, rates."""

from collections.abc import Callable

from fedcover.paper.cells import RATE, Cell, cell_id
from fedcover.paper.claims import COLUMNS, DATASETS, codename_rows
from fedcover.paper.evidence import Evidence
from fedcover.paper.wording import DISPLAY_NAMES, column_name, markdown_table, spread, verdict

HEADS = ["data", "column", "row", "last", "best", "seeds", "beside", "difference, same seeds"]


def accuracy_cells(evidence: Evidence, id: str, claim: float | None) -> list[object]:
    """Return last, mean of the last ten rounds, best, seeds and verdict of a cell."""
    last, tail, best = (evidence.seed_statistics(id, figure) for figure in ("last", "tail", "best"))
    diverged = evidence.diverged(id)
    seeds = f"{last.seeds if last else 0}" + (f" ({diverged} diverged)" if diverged else "")
    if last is None:
        return ["diverged" if diverged else "not run", "", "", seeds, ""]
    return [spread(last), spread(tail), spread(best), seeds, verdict(claim, last)]


def other_rows(row: str) -> Callable[[Evidence], str]:
    """Return the block of extra rows, each with the row of the paper it is compared with."""

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
    paired = evidence.difference(cell.id, partner)
    difference = f"{paired.mean:+.2f} ({paired.verdict})" if paired else ""
    name = cell.design if cell.design.startswith(cell.level) else f"{cell.level}, {cell.design}"
    last, _, best, seeds, _ = accuracy_cells(evidence, cell.id, None)
    last_of_partner = spread(evidence.seed_statistics(partner))
    return [
        DISPLAY_NAMES[cell.dataset],
        column_name(cell.column),
        name,
        last,
        best,
        seeds,
        last_of_partner,
        difference,
    ]


def public_code(evidence: Evidence) -> str:
    """Compare the public code and the faithful algorithm with the printed accuracy."""
    cells = [cell for cell in evidence.cells.values() if cell.row == "public-code"]
    heads = [*HEADS, "printed"]
    differing_cells = [cell for cell in cells if _differs_from_partner(evidence, cell)]
    num_nearer = sum(
        _distance_to_print(evidence, cell.id, cell)
        < _distance_to_print(evidence, _partner(cell), cell)
        for cell in differing_cells
    )
    rows = [[*_other_row(evidence, cell), f"{_printed_accuracy(cell):.2f}"] for cell in cells]
    return (
        f"{markdown_table(heads, rows)}\n\n"
        f"Of the {len(differing_cells)} places where the two differ by more than noise, "
        "the departures are nearer to "
        f"the printed accuracy than the faithful algorithm in {num_nearer}."
    )


def _differs_from_partner(evidence: Evidence, cell: Cell) -> bool:
    """Return whether a cell and its partner differ by more than noise."""
    paired = evidence.difference(cell.id, _partner(cell))
    return paired is not None and paired.verdict in ("higher", "lower")


def _distance_to_print(evidence: Evidence, id: str, cell: Cell) -> float:
    """Return how far the results `id` are from the accuracy that is printed for a cell."""
    statistics = evidence.seed_statistics(id)
    return abs(statistics.mean - _printed_accuracy(cell)) if statistics else float("inf")


def _printed_accuracy(cell: Cell) -> float:
    """Return the accuracy that the appendix prints for the codename of a cell."""
    [row] = [row for row in codename_rows("pruning") if cell.design.endswith(row.codename)]
    return row.iid if cell.column == "iid" else row.non_iid_global


def _partner(cell: Cell) -> str:
    """Return the cell that an extra row is compared with: the same design in the paper."""
    if cell.row == "dirichlet":
        return cell_id(cell.dataset, COLUMNS[cell.dataset][-1], cell.design)
    design = cell.design.removesuffix("-planned")
    return cell_id(cell.dataset, cell.column, "full" if design.endswith("1" * 10) else design)


def rates(evidence: Evidence) -> str:
    """Return the learning rates that were tried, and the chosen one."""
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
