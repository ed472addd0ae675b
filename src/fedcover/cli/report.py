"""Commands that show results: report, history."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis import history
from fedcover.analysis.report import report as write_report
from fedcover.analysis.report.collect import collect_runs, damage_notes, group_runs, read_runs
from fedcover.cli import console
from fedcover.cli.options import app
from fedcover.errors import InvalidValue
from fedcover.host.disk import write_atomically
from fedcover.log import log
from fedcover.runs import plotting

Folders = Annotated[
    list[Path], Parameter(help="Run folders, or folders with run folders below them.")
]
Output = Annotated[
    Path | None, Parameter(name=["--output", "-o"], help="The file to write; else it is printed.")
]


@app.command
def report(
    runs: Folders,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="The page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, Parameter(help="What stands on top of the page.")] = None,
    plot: Annotated[
        Path | None, Parameter(help="Draw curves into this file, too (needs fedcover[plot]).")
    ] = None,
) -> None:
    """One self-contained page about runs: curves, cost, who trained what, the fleet, and how to repeat it all."""
    if plot is not None:
        plotting.check_plot_path(plot)
    path = write_report(runs, out, title=title)
    if plot is not None:
        draw_runs(runs, plot)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB; open it in a browser, it needs no network")


def draw_runs(runs: list[Path], path: Path) -> None:
    """Draw the curves of runs into a file; those that differ only in the seed become one line with a band."""
    records = collect_runs(runs).records
    lines = {
        each.label: [records[place].lines for place in each.runs] for each in group_runs(records)
    }
    plotting.save_figure(plotting.draw(lines), path)


@app.command(name="history")
def history_(
    runs: Folders,
    /,
    *,
    csv: Annotated[
        bool, Parameter(help="One row a run and round, every figure a column.", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="The same rows as a JSON list.", negative="")] = False,
    output: Output = None,
) -> None:
    """The figures of every round, as a table, as CSV or as JSON."""
    if csv and json:
        raise InvalidValue("choose one of --csv and --json")
    if output is not None and not (csv or json):
        raise InvalidValue("output needs --csv or --json")
    read = read_runs(runs)
    for note in [*read.notes, *damage_notes(runs, read.records)]:
        log.warning("%s", note)
    found = history.metric_rows(read.records)
    if csv or json:
        text = history.as_csv(found) if csv else history.as_json(found) + "\n"
        if output is None:
            return print(text, end="")
        return write_atomically(output, text.encode())
    columns = [
        "run",
        "round",
        "accuracy",
        "loss",
        "train_loss",
        "gamma_round",
        "gamma_window",
        "delta2_mean",
    ]
    console.table(
        "every round", columns, [[row.get(column) for column in columns] for row in found]
    )
    return print(f"rounds: {len(found)}, runs: {len({row['run'] for row in found})}")
