"""The command that runs many experiments: sweep."""

import json as js
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.interruption import resume_hint_when_stopped, this_command
from fedcover.cli.options import (
    Data,
    Device,
    ExperimentFile,
    Json,
    Overwrite,
    ParallelRuns,
    Precision,
    Runs,
    Set,
    Whole,
    app,
    load_experiment,
)
from fedcover.cli.variations import choices_of
from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from fedcover.runs.launch import torchrun_rank
from fedcover.runs.lockstep import FinishedRun
from fedcover.runs.machine import Machine
from fedcover.runs.new_run import remove_run
from fedcover.runs.run_folder import Folder
from fedcover.runs.sweep import expand_choices
from fedcover.runs.sweep import sweep as run_sweep
from fedcover.server.round import RoundReport


@app.command
def sweep(
    experiment: ExperimentFile = None,
    *,
    vary: Annotated[
        tuple[str, ...],
        Parameter(
            help="key=value|value, or a=1,b=2|a=3,b=4 for values that belong together. Several"
            " are combined."
        ),
    ] = (),
    set: Set = (),
    seeds: Annotated[Whole, Parameter(help="Number of seeds per setting.")] = 1,
    runs: Runs = Path("runs"),
    data: Data = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    processes: ParallelRuns = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run all settings with all seeds in lockstep, each in its own folder.

    Repeat the command to resume an interrupted sweep.
    """
    if torchrun_rank() is not None:
        raise InvalidValue("a sweep starts its processes itself: use --processes, not torchrun")
    base = load_experiment(experiment, set)
    experiments = expand_choices(base, choices_of(vary), seeds)
    machine = Machine(device=device, precision=precision, processes=processes)
    if overwrite:
        for config in experiments:
            remove_run(Folder(runs / config.name))
    with resume_hint_when_stopped(lambda: f"stopped; resume with: {this_command()}"):
        finished = _run_all(experiments, runs, machine, data)
    table = [_result(run, runs) for run in finished]
    if json:
        print(js.dumps(table, indent=2))
        return
    for row in table:
        print(f"{row['folder']:60} {_outcome(row)}")
    _show_by_setting(finished, table, "accuracy", seeds)
    if any("accuracy_averaged" in row for row in table):
        print("of the averaged model:")
        _show_by_setting(finished, table, "accuracy_averaged", seeds)


def _show_by_setting(
    finished: Sequence[FinishedRun], table: Sequence[Mapping[str, Any]], metric: str, seeds: int
) -> None:
    """Show mean and spread of a metric over the seeds of each setting, and the best setting."""
    accuracies: dict[str, list[float | None]] = {}
    for run, row in zip(finished, table, strict=True):
        setting = run.experiment.name.removesuffix(f"-seed-{run.experiment.seed}")
        if metric not in row:  # a setting without an averaged model
            continue
        accuracy = None if run.diverged else row[metric]
        accuracies.setdefault(setting, []).append(accuracy)
    if seeds > 1:
        columns = ["setting", "mean accuracy", "standard deviation", "seeds"]
        rows = [_over_seeds(setting, values) for setting, values in accuracies.items()]
        console.table("over the seeds", columns, rows)
    print(conclusions.of_sweep(accuracies))


def _run_all(
    experiments: Sequence[Experiment], runs: Path, machine: Machine, data: Path | None
) -> list[FinishedRun]:
    """Run the experiments with one progress bar, and return the runs in their order."""
    total_rounds = sum(experiment.rounds for experiment in experiments)
    with console.show_progress(f"sweep of {len(experiments)}", total_rounds) as watch:
        rounds_done = 0

        def show(experiment: Experiment, report: RoundReport) -> None:
            nonlocal rounds_done
            watch(RoundReport(rounds_done, {**report.metrics, "run": experiment.name}))
            rounds_done += 1

        finished = run_sweep(experiments, runs, machine=machine, data=data, watch=show)
        return sorted(finished, key=lambda run: experiments.index(run.experiment))


def _result(run: FinishedRun, runs: Path) -> dict[str, Any]:
    evaluated_rounds = [metrics for metrics in run.metrics if "accuracy" in metrics]
    last = evaluated_rounds[-1] if evaluated_rounds else {}
    result = {
        "folder": str(runs / run.experiment.name),
        "accuracy": last.get("accuracy"),
        "diverged": run.diverged or None,
    }
    if "accuracy_averaged" in last:
        result["accuracy_averaged"] = last["accuracy_averaged"]
    return result


def _outcome(result: dict[str, Any]) -> str:
    if result["diverged"]:
        return str(result["diverged"])
    if result["accuracy"] is None:
        return "not evaluated"
    outcome = f"{result['accuracy']:.4f}"
    if "accuracy_averaged" in result:
        outcome += f"  averaged {result['accuracy_averaged']:.4f}"
    return outcome


def _over_seeds(setting: str, accuracies: list[float | None]) -> list[object]:
    """Return the mean and spread of a setting; seeds without an accuracy are only counted."""
    evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
    mean = fmean(evaluated) if evaluated else None
    deviation = stdev(evaluated) if len(evaluated) > 1 else None
    seeds = str(len(evaluated))
    if len(evaluated) < len(accuracies):
        seeds += f" of {len(accuracies)}"
    return [setting, mean, deviation, seeds]
