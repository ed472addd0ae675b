"""fedcover sweep: many runs, and a table over seeds."""

import json as js
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from cyclopts import Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.interruption import resume_hint_when_stopped, this_command
from fedcover.cli.options import (
    Data,
    Device,
    Json,
    Overwrite,
    ParallelRuns,
    Precision,
    Whole,
    app,
    load_experiment,
)
from fedcover.cli.variations import choices_of
from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from fedcover.runs.launch import torchrun_rank
from fedcover.runs.machine import Machine
from fedcover.runs.run_folder import Folder
from fedcover.runs.sweep import expand_choices
from fedcover.runs.sweep import sweep as run_sweep
from fedcover.server.round import RoundReport


@app.command
def sweep(
    experiment: Annotated[
        Path | None, Parameter(help="A TOML file; without it, the defaults.")
    ] = None,
    *,
    vary: Annotated[
        tuple[str, ...],
        Parameter(help="key=value|value, or a=1,b=2|a=3,b=4 together; several are combined."),
    ] = (),
    set: Annotated[
        tuple[str, ...], Parameter(help="key=value, overrides the file; may be repeated.")
    ] = (),
    seeds: Annotated[Whole, Parameter(help="Every setting with so many seeds.")] = 1,
    runs: Annotated[Path, Parameter(help="Where run folders are made, one for each run.")] = Path(
        "runs"
    ),
    data: Data = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    processes: ParallelRuns = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run settings x seeds in lockstep, each into its own folder; run it again to go on where it was stopped."""
    if torchrun_rank() is not None:
        raise InvalidValue("a sweep starts its processes itself: use --processes, not torchrun")
    base = load_experiment(experiment, set)
    wanted = expand_choices(base, choices_of(vary), seeds)
    machine = Machine(device=device, precision=precision, processes=processes)
    for each in wanted if overwrite else []:
        Folder(runs / each.name).clear()
    table, found = [], dict[str, list[float | None]]()
    with console.show_progress(f"sweep of {len(wanted)}", sum(e.rounds for e in wanted)) as watch:
        count = iter(range(sum(e.rounds for e in wanted)))

        def show(experiment: Experiment, report: RoundReport) -> None:
            watch(RoundReport(next(count), {**report.metrics, "run": experiment.name}))

        with resume_hint_when_stopped(lambda: f"stopped; go on with: {this_command()}"):
            ended = run_sweep(wanted, runs, machine=machine, data=data, watch=show)
            for done in sorted(ended, key=lambda done: wanted.index(done.experiment)):
                last = next((line for line in reversed(done.metrics) if "accuracy" in line), {})
                folder = str(runs / done.experiment.name)
                table.append(
                    {
                        "folder": folder,
                        "accuracy": last.get("accuracy"),
                        "diverged": done.diverged or None,
                    }
                )
                setting = done.experiment.name.removesuffix(f"-seed-{done.experiment.seed}")
                found.setdefault(setting, []).append(
                    None if done.diverged else last.get("accuracy")
                )
    if json:
        print(js.dumps(table, indent=2))
        return
    for row in table:
        accuracy = row["accuracy"]
        print(
            f"{row['folder']:60} {row['diverged'] or (f'{accuracy:.4f}' if accuracy is not None else 'not evaluated')}"
        )
    if seeds > 1:
        columns = ["setting", "mean accuracy", "standard deviation", "seeds"]
        console.table(
            "over the seeds", columns, [_over_seeds(setting, found[setting]) for setting in found]
        )
    print(conclusions.of_sweep(found))


def _over_seeds(setting: str, accuracies: list[float | None]) -> list[object]:
    """A row of what all seeds of a setting say; seeds that diverged or were not evaluated are left out, and counted."""
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    spread = stdev(known) if len(known) > 1 else None
    number = (
        str(len(known)) if len(known) == len(accuracies) else f"{len(known)} of {len(accuracies)}"
    )
    return [setting, fmean(known) if known else None, spread, number]
