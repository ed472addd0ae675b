"""Commands about the paper: reproduce its experiments, explain its public code."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.interruption import resume_hint_when_stopped, this_command
from fedcover.cli.options import (
    Data,
    Device,
    EngineName,
    Json,
    MaybeWhole,
    ParallelRuns,
    Precision,
    Threads,
    Whole,
    app,
)
from fedcover.errors import InvalidValue, unknown
from fedcover.paper import document, figures
from fedcover.paper.cells import SETS, Cell
from fedcover.paper.claims import claimed_accuracy
from fedcover.paper.evidence import Evidence
from fedcover.paper.explain import explain as explain_code
from fedcover.paper.reproduce import DOCS, ReproductionRequest, orphan_warnings, parse_only
from fedcover.paper.reproduce import reproduce as run_missing
from fedcover.paper.results import find_results
from fedcover.paper.store import StoredResults, load
from fedcover.runs import plotting
from fedcover.runs.machine import Machine


@app.command
def reproduce(
    what: Annotated[
        str, Parameter(help="mnist-pruning, mnist-subnet, table1, figures, rates or docs.")
    ],
    /,
    *,
    only: Annotated[
        tuple[str, ...],
        Parameter(help="axis=value,value: restrict the cells. Several restrictions must all hold."),
    ] = (),
    seeds: Annotated[
        MaybeWhole, Parameter(help="Number of seeds (default: 3, or 1 with --quick).")
    ] = None,
    quick: Annotated[
        bool, Parameter(help="A smoke run: digits, small models, two rounds.", negative="")
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="Folder of the results, one file per data set.")
    ] = None,
    docs: Annotated[
        Path | None, Parameter(help="Folder for the document and figures (default: docs).")
    ] = None,
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: Precision = "fp32",
    processes: ParallelRuns = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run the missing cells of the paper's tables; `docs` writes the document from the results."""
    _check_options(what, only, seeds, quick, docs)
    if what in ("docs", "figures"):
        plotting.check_plot_path("figure.svg")
    docs_folder = docs or DOCS
    sets = () if what == "docs" else (what,)
    request = ReproductionRequest(sets, parse_only(only), seeds, quick, out)
    if request.sets:
        machine = Machine(engine, device, threads, precision=precision, processes=processes)
        with resume_hint_when_stopped(lambda: _resume_hint(request.folder)):
            run_missing(
                request,
                machine=machine,
                data=data,
                show_progress=console.show_progress,
                tell=console.notify,
            )
    written: list[Path] = []
    if what == "docs":
        written = document.write(request.folder, docs_folder)
        for line in orphan_warnings(request):
            console.notify(line)
    elif what == "figures":
        figure_folder = request.folder if quick else docs_folder / "reproduction"
        written = figures.write_figures(Evidence(request.folder, quick), figure_folder)
    _show(request, written, json)


def _check_options(
    what: str, only: tuple[str, ...], seeds: int | None, quick: bool, docs: Path | None
) -> None:
    if what not in (*SETS, "docs"):
        raise unknown("reproduce", what, [*SETS, "docs"])
    if what == "docs" and (only or quick or seeds):
        raise InvalidValue(
            "docs is written from all results: leave --only, --quick and --seeds out"
        )
    if quick and docs is not None:
        raise InvalidValue("a smoke run writes nothing into docs: leave --docs or --quick out")


def _resume_hint(folder: Path) -> str:
    state = f"finished runs are in {folder}" if folder.exists() else "no run has begun"
    return f"stopped; {state}; resume with: {this_command()}"


def _show(request: ReproductionRequest, written: list[Path], json: bool) -> None:
    rows = _cell_rows(request)
    if json:
        return console.show_json({"cells": rows, "written": [str(path) for path in written]})
    if rows:
        columns = ["cell", "runs", "claimed", "last"]
        if request.smoke:
            columns.remove("claimed")
        kind = "a smoke run with digits and small models" if request.smoke else "results"
        title = f"{kind} in {request.folder}, accuracy in percent"
        console.table(title, columns, [[row[column] for column in columns] for row in rows])
    for path in written:
        print(path)
    if rows:
        print(conclusions.of_cells(rows, request.smoke))
    return None


def _cell_rows(request: ReproductionRequest) -> list[dict[str, Any]]:
    cells = {cell.id: cell for cell, _ in request.jobs()}
    records = load(request.folder)
    return [_cell_row(request, cell, records) for cell in cells.values()]


def _cell_row(request: ReproductionRequest, cell: Cell, records: StoredResults) -> dict[str, Any]:
    """Return how many runs of a cell there are, its claimed accuracy, and its mean accuracy."""
    seeds = cell.seeds(request.seed_count)
    runs = find_results(records, cell, seeds)
    accuracies = [100 * run["last"] for run in runs if run["last"] is not None]
    claimed = None
    if not request.smoke:
        claimed = claimed_accuracy(cell.dataset, cell.column, cell.level, cell.setting)
    return {
        "cell": cell.id,
        "runs": len(runs),
        "wanted": len(seeds),
        "claimed": claimed,
        "last": sum(accuracies) / len(accuracies) if accuracies else None,
    }


@app.command
def explain(
    codename: Annotated[
        str, Parameter(help="A codename of the paper: digits 1 to 7, one per slot.")
    ] = "1111444477",
    *,
    dataset: str = "digits",
    rounds: Whole = 20,
    clients: Whole = 100,
    seeds: Whole = 3,
    switch: Annotated[
        tuple[str, ...], Parameter(help="Only this departure. Can be given several times.")
    ] = (),
    data: Data = None,
    json: Json = False,
) -> None:
    """Measure how each departure of the paper's public code from its algorithm changes results."""
    if seeds < 1:
        raise InvalidValue(f"seeds must be at least 1; got {seeds}")
    rows = explain_code(
        codename,
        seeds=range(seeds),
        dataset=dataset,
        rounds=rounds,
        clients=clients,
        only=switch,
        data=data,
        tell=console.notify,
    )
    if json:
        return console.show_json(rows)
    columns = ["setting", "accuracy", "spread", "first_round", "noise", "gamma_min"]
    title = (
        f"{codename} on {dataset}, {rounds} rounds, {seeds} seeds:"
        " the public code's departures one by one"
    )
    console.table(title, columns, [[row[column] for column in columns] for row in rows])
    return print(conclusions.of_departures(rows))
