"""The command that repeats the paper's evidence: reproduce."""

from pathlib import Path
from typing import Annotated

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
    app,
)
from fedcover.errors import InvalidValue, unknown
from fedcover.paper import document
from fedcover.paper.cells import SETS
from fedcover.paper.claims import claimed_accuracy
from fedcover.paper.evidence import Evidence
from fedcover.paper.reproduce import DOCS, ReproductionRequest, orphan_warnings, parse_only
from fedcover.paper.reproduce import reproduce as run_missing
from fedcover.paper.results import find_results
from fedcover.paper.store import load
from fedcover.runs.machine import Machine


@app.command
def reproduce(
    what: Annotated[
        str, Parameter(help="mnist-pruning, mnist-subnet, table1, figures, rates or docs.")
    ],
    /,
    *,
    only: Annotated[
        tuple[str, ...], Parameter(help="axis=value,value; may be repeated, then all must hold.")
    ] = (),
    seeds: Annotated[
        MaybeWhole, Parameter(help="How many, from 0 on; by default 3, or 1 with --quick.")
    ] = None,
    quick: Annotated[
        bool, Parameter(help="A smoke run: digits, small models, two rounds.", negative="")
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="Folder of the results, one file for each data set.")
    ] = None,
    docs: Annotated[
        Path | None, Parameter(help="Where docs and figures are written; by default docs.")
    ] = None,
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: Precision = "fp32",
    processes: ParallelRuns = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run what is missing of the paper's tables, cell by cell; `docs` writes the document from what there is."""
    if what not in (*SETS, "docs"):
        raise unknown("reproduce", what, [*SETS, "docs"])
    if what == "docs" and (only or quick or seeds):
        raise InvalidValue(
            "docs is written from all results: leave --only, --quick and --seeds out"
        )
    if quick and docs is not None:
        raise InvalidValue("a smoke run writes nothing into docs: leave --docs or --quick out")
    pages = docs or DOCS
    request = ReproductionRequest(
        () if what == "docs" else (what,), parse_only(only), seeds, quick, out
    )
    written: list[Path] = []
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
    if what == "docs":
        written = document.write(request.folder, pages)
        for line in orphan_warnings(request):
            console.notify(line)
    if what == "figures":
        written = document.write_figures(
            Evidence(request.folder, quick), request.folder if quick else pages / "reproduction"
        )
    _show(request, written, json)


def _resume_hint(folder: Path) -> str:
    there_is = f"what there is lies in {folder}" if folder.exists() else "no run has begun"
    return f"stopped; {there_is}; go on with: {this_command()}"


def _show(request: ReproductionRequest, written: list[Path], json: bool) -> None:
    rows = []
    by_cell = {cell.id: cell for cell, _ in request.jobs()}
    records = load(request.folder)
    for cell in by_cell.values():
        seeds = cell.seeds(request.seed_count)
        runs = find_results(records, cell, seeds)
        scores = [100 * run["last"] for run in runs if run["last"] is not None]
        claim = (
            None
            if request.smoke
            else claimed_accuracy(cell.dataset, cell.column, cell.level, cell.setting)
        )
        mean = sum(scores) / len(scores) if scores else None
        rows.append(
            {
                "cell": cell.id,
                "runs": len(runs),
                "wanted": len(seeds),
                "claimed": claim,
                "last": mean,
            }
        )
    if json:
        return console.show_json({"cells": rows, "written": [str(path) for path in written]})
    if rows:
        heads = ["cell", "runs", *([] if request.smoke else ["claimed"]), "last"]
        kind = "a smoke run with digits and small models" if request.smoke else "results"
        console.table(
            f"{kind} in {request.folder}, accuracy in percent",
            heads,
            [[row[h] for h in heads] for row in rows],
        )
    for path in written:
        print(path)
    return print(conclusions.of_cells(rows, request.smoke)) if rows else None
