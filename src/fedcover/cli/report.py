"""Commands that show results: report, history, watch."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis import history
from fedcover.analysis.report import report as write_report
from fedcover.analysis.report.collect import collect_runs, damage_notes, group_runs, read_runs
from fedcover.cli import console
from fedcover.cli.live_view import read_run_view, render, watch_live
from fedcover.cli.options import Json, app
from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.log import log
from fedcover.runs import plotting

Folders = Annotated[list[Path], Parameter(help="Run folders, or folders that contain them.")]
Output = Annotated[
    Path | None,
    Parameter(name=["--output", "-o"], help="The file to write (default: print the rows)."),
]

HISTORY_COLUMNS = [
    "run",
    "round",
    "accuracy",
    "accuracy_averaged",
    "loss",
    "train_loss",
    "gamma_round",
    "gamma_window",
    "delta2_mean",
]
OPTIONAL_COLUMNS = {"accuracy_averaged"}
"""Columns that are shown only if some round has a value."""


@app.command
def report(
    runs: Folders,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="The page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, Parameter(help="Title of the page.")] = None,
    plot: Annotated[
        Path | None, Parameter(help="Also plot the curves to this file (needs fedcover[plot]).")
    ] = None,
) -> None:
    """Write one self-contained page about runs.

    It shows the curves, the costs, what each client trained, the fleet, and how to repeat the runs.
    """
    if plot is not None:
        plotting.check_plot_path(plot)
    page = write_report(runs, out, title=title)
    if plot is not None:
        draw_runs(runs, plot)
    print(f"{page}: {page.stat().st_size / 1e6:.2f} MB; open it in a browser, it works offline")


def draw_runs(runs: list[Path], path: Path) -> None:
    """Plot the curves of runs. Runs that differ only in the seed share one line with a band."""
    records = collect_runs(runs).records
    lines = {
        group.label: [records[index].lines for index in group.runs] for group in group_runs(records)
    }
    plotting.save_figure(plotting.draw(lines), path)


@app.command(name="history")
def history_(
    runs: Folders,
    /,
    *,
    csv: Annotated[
        bool,
        Parameter(help="Print CSV: one row per run and round, one column per metric.", negative=""),
    ] = False,
    json: Annotated[bool, Parameter(help="Print the same rows as JSON.", negative="")] = False,
    output: Output = None,
) -> None:
    """Show the metrics of every round as a table, CSV or JSON."""
    if csv and json:
        raise InvalidValue("choose one of --csv and --json")
    if output is not None and not (csv or json):
        raise InvalidValue("output needs --csv or --json")
    runs_read = read_runs(runs)
    for note in [*runs_read.notes, *damage_notes(runs, runs_read.records)]:
        log.warning("%s", note)
    rows = history.metric_rows(runs_read.records)
    if not (csv or json):
        columns = [
            column
            for column in HISTORY_COLUMNS
            if column not in OPTIONAL_COLUMNS or any(column in row for row in rows)
        ]
        cells = [[row.get(column) for column in columns] for row in rows]
        console.table("every round", columns, cells)
        num_runs = len({row["run"] for row in rows})
        return print(f"rounds: {len(rows)}, runs: {num_runs}")
    text = history.as_csv(rows) if csv else history.as_json(rows) + "\n"
    if output is None:
        return print(text, end="")
    return write_atomically(output, text.encode())


@app.command
def watch(
    folder: Path,
    *,
    once: Annotated[
        bool, Parameter(help="Print the state once and exit, as in a pipe.", negative="")
    ] = False,
    every: Annotated[float, Parameter(help="Seconds between updates.")] = 1.0,
    json: Json = False,
) -> None:
    """Watch a run: rounds, accuracy, coverage, which clients answered, and rejected replies."""
    if not 0.1 <= every <= 3600:
        raise InvalidValue(f"every must be in 0.1..3600 seconds; got {every:g}")
    if json:
        return console.show_json(read_run_view(folder).summary())
    if once or not sys.stdout.isatty():
        return console.output().print(render(read_run_view(folder)))
    with contextlib.suppress(KeyboardInterrupt):
        watch_live(folder, every)
    return None
