"""Commands that train or use a trained model: run, resume, export, demo."""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis.report import report
from fedcover.analysis.tensorboard import tensorboard_writer
from fedcover.cli import conclusions, console
from fedcover.cli.demo import DEMO_POLICIES, FLEET
from fedcover.cli.demo import demo as run_demo
from fedcover.cli.interruption import resume_hint_when_stopped, stopped_hint
from fedcover.cli.options import (
    DEFAULT_MACHINE_OPTIONS,
    Data,
    ExperimentFile,
    Json,
    MachineOptions,
    Overwrite,
    Plot,
    Runs,
    Set,
    TensorBoard,
    Whole,
    app,
    load_experiment,
)
from fedcover.cli.summary import show_summary
from fedcover.cli.trust import Trust, is_trusted
from fedcover.errors import InvalidValue, unknown
from fedcover.runs import plotting
from fedcover.runs.api import RoundCallback, load
from fedcover.runs.api import resume as resume_run
from fedcover.runs.api import run as run_experiment
from fedcover.runs.experiment import Experiment
from fedcover.runs.export import FORMATS
from fedcover.runs.export import export as export_part
from fedcover.runs.run_folder import Folder
from fedcover.runs.run_result import Run
from fedcover.server.round import RoundReport


@app.command
def run(
    experiment: ExperimentFile = None,
    *,
    set: Set = (),
    runs: Runs = Path("runs"),
    data: Data = None,
    machine: MachineOptions = DEFAULT_MACHINE_OPTIONS,
    plot: Plot = None,
    tensorboard: TensorBoard = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run one experiment and write a run folder."""
    if plot is not None:
        plotting.check_plot_path(plot)
    config = load_experiment(experiment, set)
    folder = runs / config.name
    with _watch_training(config, folder, tensorboard) as watch:
        result = run_experiment(
            config,
            folder,
            machine=machine.machine(),
            data=data,
            watch=watch,
            overwrite=overwrite,
        )
    _show_result(result, plot, json)


@app.command
def resume(
    folder: Path,
    *,
    force: Annotated[
        bool,
        Parameter(help="Resume even if engine, device, threads, precision or torch differ."),
    ] = False,
    data: Data = None,
    machine: MachineOptions = DEFAULT_MACHINE_OPTIONS,
    plot: Plot = None,
    tensorboard: TensorBoard = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Resume an interrupted run; the result is identical to that of an uninterrupted one."""
    if plot is not None:
        plotting.check_plot_path(plot)
    trusted = is_trusted(folder, trust)
    experiment = Folder(folder, trusted).read().experiment
    with _watch_training(experiment, folder, tensorboard) as watch:
        result = resume_run(
            folder,
            machine=machine.machine(),
            force=force,
            data=data,
            watch=watch,
            complain=console.notify,
            trust=trusted,
        )
    _show_result(result, plot, json)


@app.command
def export(
    folder: Path,
    *,
    capacity: Annotated[
        float, Parameter(help="Capacity of the device; 1 is the whole model.")
    ] = 1.0,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="The file to write.")
    ] = None,
    format: Annotated[
        str, Parameter(help="safetensors, or onnx (needs fedcover[onnx]).")
    ] = "safetensors",
    averaged: Annotated[
        bool, Parameter(help="Export the averaged model; see the field average.")
    ] = False,
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Export the trained model, or the part of it that fits a device, as one file."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    suffix = "-averaged" if averaged else ""
    path = output or folder / f"model-{capacity:g}{suffix}.{format}"
    loaded_run = load(folder, data=data, trust=is_trusted(folder, trust))
    info = export_part(loaded_run, capacity, path, format, averaged=averaged)
    if json:
        return console.show_json(info)
    hint = ""
    if format == "safetensors":
        hint = f"; load it with fedcover.load_part({str(path)!r})"
    return print(f"{info['path']}: {info['parameters']:,} parameters{hint}")


@app.command
def demo(
    *,
    folder: Annotated[
        Path | None, Parameter(help="Where to write the runs (default: runs/demo-1, -2, ...).")
    ] = None,
    rounds: Whole = 30,
    seed: Whole = 0,
    json: Json = False,
) -> None:
    """Compare five policies on a fleet too small for the whole model. Offline, under a minute."""
    if rounds < 1:
        raise InvalidValue(f"rounds must be at least 1; got {rounds}")
    demo_folder = folder or _unused_demo_folder()
    hint = f"stopped; finished runs are in {demo_folder}; 'fedcover demo' starts again"
    with resume_hint_when_stopped(lambda: hint):
        results = run_demo(demo_folder, rounds, seed, console.show_progress)
    run_folders = [result.folder for result in results if result.folder]
    page = report(run_folders, demo_folder / "report.html")
    if json:
        console.notify(f"the report is {page}")
        summaries = {
            result.experiment.name: {**result.summary, "folder": str(result.folder)}
            for result in results
        }
        return console.show_json(summaries)
    return _show_demo(results, rounds, demo_folder, page)


def _unused_demo_folder() -> Path:
    number = 1
    while Path(f"runs/demo-{number}").exists():
        number += 1
    return Path(f"runs/demo-{number}")


DEMO_COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_single": "one device",
    "gamma_min": "coverage",
    "gamma_window": "over 10 rounds",
    "delta2_mean": "noise",
    "parameters": "parameters",
}
"""Metrics of the demo's table and their headings."""


def _show_demo(results: list[Run], rounds: int, folder: Path, page: Path) -> None:
    rows = []
    for result in results:
        traffic = result.summary["bytes_down"] + result.summary["bytes_up"]
        metrics = [result.summary[metric] for metric in DEMO_COLUMNS]
        rows.append([result.experiment.name, *metrics, traffic / 1e6])
    title = f"digits, {rounds} rounds, fleet {FLEET} (shares of 4,810 parameters)"
    console.table(title, ["policy", *DEMO_COLUMNS.values(), "MB moved"], rows)
    for policy, meaning in DEMO_POLICIES.items():
        print(f"  {policy:22} {meaning}")
    accuracies = {result.experiment.name: [result.summary["accuracy"]] for result in results}
    print("accuracy: of the full model on the server")
    print("one device: accuracy of the largest part that one device can hold")
    print("coverage: fewest clients that trained any parameter, in one round and over ten rounds")
    print("noise: share of the weights' energy that is cut; parameters: mean per client")
    print(f"Run folders: {folder}")
    print(conclusions.of_sweep(accuracies))
    print("With one seed and 360 test images, differences below one point mean nothing.")
    print(f"Full report, with what every client trained in each round: {page}")


def _resume_hint(folder: Path) -> str:
    flag = Folder(folder).trust_flag()
    return stopped_hint(folder, f"fedcover resume {shlex.quote(str(folder))}{flag}")


@contextmanager
def _watch_training(
    experiment: Experiment, folder: Path, tensorboard: bool
) -> Iterator[RoundCallback]:
    """Show progress, on request write TensorBoard logs, and say how to resume when stopped."""
    with resume_hint_when_stopped(lambda: _resume_hint(folder)), ExitStack() as stack:
        progress = console.show_progress(experiment.name, experiment.rounds)
        callbacks = [stack.enter_context(progress)]
        if tensorboard:
            callbacks.append(stack.enter_context(tensorboard_writer(folder / "tensorboard")))

        def call_all(report: RoundReport) -> None:
            for callback in callbacks:
                callback(report)

        yield call_all


def _show_result(result: Run, plot: Path | None, json: bool) -> None:
    if plot is not None:
        result.plot(plot)
    summary = {**result.summary, "folder": str(result.folder)}
    show_summary(result.experiment.name, summary, json)
