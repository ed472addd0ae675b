"""Commands that train: run, resume, export, demo."""

import shlex
import sys
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
from fedcover.cli.interruption import resume_hint_when_stopped
from fedcover.cli.options import (
    Data,
    Deterministic,
    Device,
    EngineName,
    Json,
    Overwrite,
    Plot,
    Precision,
    Processes,
    TensorBoard,
    Threads,
    Whole,
    app,
    load_experiment,
)
from fedcover.cli.trust import Trust, is_trusted
from fedcover.errors import InvalidValue, unknown
from fedcover.runs import plotting
from fedcover.runs.api import RoundCallback, Run, load
from fedcover.runs.api import resume as resume_run
from fedcover.runs.api import run as run_experiment
from fedcover.runs.experiment import Experiment
from fedcover.runs.export import FORMATS
from fedcover.runs.export import export as export_part
from fedcover.runs.launch import torchrun_rank, torchrun_size
from fedcover.runs.machine import Machine
from fedcover.runs.run_folder import Folder
from fedcover.server.round import RoundReport


@app.command
def run(
    experiment: Annotated[
        Path | None, Parameter(help="A TOML file; without it, the defaults.")
    ] = None,
    *,
    set: Annotated[
        tuple[str, ...], Parameter(help="key=value, overrides the file; may be repeated.")
    ] = (),
    runs: Annotated[Path, Parameter(help="Where run folders are made.")] = Path("runs"),
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    threads: Threads = None,
    deterministic: Deterministic = False,
    precision: Precision = "fp32",
    processes: Processes = "auto",
    plot: Plot = None,
    tensorboard: TensorBoard = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run one experiment into a folder below runs."""
    if plot is not None:
        plotting.check_plot_path(plot)
    wanted = load_experiment(experiment, set)
    folder = runs / wanted.name
    machine = Machine(engine, device, threads, deterministic, precision, _processes(processes))
    with (
        resume_hint_when_stopped(lambda: _resume_hint(folder)),
        _progress_and_tensorboard(wanted, folder, tensorboard) as watch,
    ):
        result = run_experiment(
            wanted, folder, machine=machine, data=data, watch=watch, overwrite=overwrite
        )
    _show_result(result, plot, json)


@app.command
def resume(
    folder: Path,
    *,
    force: Annotated[
        bool, Parameter(help="Go on although engine, device, threads, precision or torch changed.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    threads: Threads = None,
    deterministic: Deterministic = False,
    precision: Precision = "fp32",
    processes: Processes = "auto",
    plot: Plot = None,
    tensorboard: TensorBoard = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Go on with a run that was stopped; it ends as if it never had been."""
    if plot is not None:
        plotting.check_plot_path(plot)
    trusted = is_trusted(folder, trust)
    wanted = Folder(folder, trusted).read().experiment
    machine = Machine(engine, device, threads, deterministic, precision, _processes(processes))
    with (
        resume_hint_when_stopped(lambda: _resume_hint(folder)),
        _progress_and_tensorboard(wanted, folder, tensorboard) as watch,
    ):
        result = resume_run(
            folder,
            machine=machine,
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
        float, Parameter(help="The device's capacity; 1 is the whole model.")
    ] = 1.0,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="The file to write.")
    ] = None,
    format: Annotated[
        str, Parameter(help="safetensors, or onnx (needs fedcover[onnx]).")
    ] = "safetensors",
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write the trained model, or the part of it that a device can hold, as one file."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    path = output or folder / f"model-{capacity:g}.{format}"
    written = export_part(
        load(folder, data=data, trust=is_trusted(folder, trust)), capacity, path, format
    )
    if json:
        return console.show_json(written)
    hint = f"; load it with fedcover.load_part({str(path)!r})" if format == "safetensors" else ""
    print(f"{written['path']}: {written['parameters']:,} parameters{hint}")
    return None


@app.command
def demo(
    *,
    folder: Annotated[
        Path | None, Parameter(help="Where to keep the runs; else runs/demo-1, -2, ...")
    ] = None,
    rounds: Whole = 30,
    seed: Whole = 0,
    json: Json = False,
) -> None:
    """Five policies side by side on a fleet in which no device holds the whole model; offline, under a minute."""
    if rounds < 1:
        raise InvalidValue(f"rounds must be at least 1; got {rounds}")
    chosen = folder or next(
        p for n in range(1, sys.maxsize) if not (p := Path(f"runs/demo-{n}")).exists()
    )
    so_far = f"stopped; the runs so far are in {chosen}; 'fedcover demo' begins anew"
    with resume_hint_when_stopped(lambda: so_far):
        results = run_demo(chosen, rounds, seed, console.show_progress)
    page = report([run.folder for run in results if run.folder], chosen / "report.html")
    if json:
        console.notify(f"the report is {page}")
        return console.show_json(
            {run.experiment.name: {**run.summary, "folder": str(run.folder)} for run in results}
        )
    columns = [
        "policy",
        "accuracy",
        "one device",
        "coverage",
        "over 10 rounds",
        "noise",
        "parameters",
        "MB moved",
    ]
    names = [
        "accuracy",
        "accuracy_single",
        "gamma_min",
        "gamma_window",
        "delta2_mean",
        "parameters",
    ]
    rows = [
        [run.experiment.name, *(run.summary[n] for n in names),
         (run.summary["bytes_down"] + run.summary["bytes_up"]) / 1e6]
        for run in results
    ]  # fmt: skip
    title = f"digits, {rounds} rounds, fleet {FLEET} (shares of 4,810 parameters)"
    console.table(title, columns, rows)
    for policy, meaning in DEMO_POLICIES.items():
        print(f"  {policy:22} {meaning}")
    print(
        "accuracy: the assembled full model; one device: the largest part that a single device holds;\n"
        "coverage: fewest clients that trained any parameter in a round, and over ten rounds;\n"
        f"noise: share of the weights' energy cut away; parameters: mean per client. Run folders: {chosen}\n"
        f"{conclusions.of_sweep({run.experiment.name: [run.summary['accuracy']] for run in results})}\n"
        "One seed and 360 test images: a difference under a point says nothing.\n"
        f"All of it to look at, and who trained what in every round: {page}"
    )
    return None


def _processes(wanted: int | str) -> int | str:
    """All processes of torchrun, where it has started this one; else as many as are wanted."""
    if torchrun_rank() is None:
        return wanted
    if wanted not in ("auto", torchrun_size()):
        raise InvalidValue(f"processes: torchrun has started {torchrun_size()}; got {wanted}")
    return torchrun_size()


def _resume_hint(folder: Path) -> str:
    if not (folder / "experiment.toml").exists():
        return "stopped before the run began"
    return f"stopped; go on with: fedcover resume {shlex.quote(str(folder))}{Folder(folder).trust_flag()}"


@contextmanager
def _progress_and_tensorboard(
    wanted: Experiment, folder: Path, tensorboard: bool
) -> Iterator[RoundCallback]:
    """Show progress, and write for TensorBoard if that is wanted."""
    with ExitStack() as stack:
        watches = [stack.enter_context(console.show_progress(wanted.name, wanted.rounds))]
        if tensorboard:
            watches.append(stack.enter_context(tensorboard_writer(folder / "tensorboard")))

        def watch(report: RoundReport) -> None:
            for each in watches:
                each(report)

        yield watch


def _show_result(result: Run, plot: Path | None, json: bool) -> None:
    if plot is not None:
        result.plot(plot)
    summary = {**result.summary, "folder": str(result.folder)}
    if json:
        return console.show_json(summary)
    console.table(result.experiment.name, ["figure", "value"], [[k, v] for k, v in summary.items()])
    return print(conclusions.of_run(summary))
