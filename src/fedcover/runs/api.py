"""Run an experiment, resume it, load it, or replay one of its rounds.

A run may have a folder, which holds everything needed to resume or replay it:

runs/<name>/
    experiment.toml   the experiment, every field written out
    manifest.json     versions, commit, engine, device, threads
    metrics.jsonl     one line for each round
    summary.json      the result in a few numbers
    checkpoints/      the two newest states
    kept/             the states of the rounds in `keep_rounds`
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fedcover.errors import InvalidValue, RunError
from fedcover.host import signals
from fedcover.runs import checkpoints
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.experiment import Experiment, read_experiment
from fedcover.runs.launch import WorkerJob, launch_workers, limit_processes
from fedcover.runs.machine import Machine
from fedcover.runs.new_run import create_run
from fedcover.runs.released_rounds import all_metrics, warn_of_removable_noise
from fedcover.runs.run_folder import Folder
from fedcover.runs.run_result import Run
from fedcover.runs.session import RunSession, check_same_model, load_latest
from fedcover.runs.setup import Overrides, build_setup, prepare, prepare_workload
from fedcover.server.round import RoundReport, initial_state, run_round
from fedcover.types import Dataset, EngineFunction, Model, PolicyFunction, State

RoundCallback = Callable[[RoundReport], None]


def run(
    experiment: Experiment | str | Path,
    folder: str | Path | None = None,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: PolicyFunction | None = None,
    engine: EngineFunction | None = None,
    watch: RoundCallback | None = None,
    overwrite: bool = False,
) -> Run:
    """Run an experiment, in memory or into a new run folder.

    Args:
        experiment: The experiment, or the path of a TOML file that describes it.
        folder: The run folder to create; without one, nothing is written.
        machine: Device, engine, threads and processes; chosen automatically by default.
        data: The folder that holds data sets.
        dataset: A data set made in Python, instead of the one that the experiment names.
        model: A model made in Python, instead of the one that the experiment names.
        policy: A policy made in Python, instead of the one that the experiment names.
        engine: An engine made in Python, instead of the machine's.
        watch: A function that is called with the report of every round.
        overwrite: Replace a run that is already in the folder.

    Returns:
        The finished run.

    Raises:
        InvalidValue: If the experiment, the machine or an object made in Python is invalid.
        RunError: If the folder already holds a run, or a file cannot be written.
        TrainingDiverged: If the training loss is no longer finite.

    >>> experiment = Experiment(
    ...     fleet="1x1.0 + 1x0.5", policy="prefix", clients=20, active=4, rounds=2, epochs=1
    ... )
    >>> result = run(experiment)
    >>> result.gamma_min >= 0, result.state.round
    (True, 2)
    """
    overrides = Overrides(dataset, model, policy, engine)
    _check_watch(watch)
    experiment = _as_experiment(experiment)
    check_data_is_local(experiment, engine)
    machine = (machine or Machine()).resolved()
    workload = prepare_workload(experiment, machine.device, data=data, overrides=overrides)
    machine = limit_processes(machine.for_workload(workload), experiment.active)
    setup = build_setup(experiment, workload, machine, overrides)
    with machine.applied():
        job = WorkerJob(experiment, machine, data, overrides, experiment.rounds)
        if folder is None:
            session = RunSession(experiment, setup, initial_state(setup), [])
            return _run_rounds(job, session, watch)
        new_folder = Folder(Path(folder))
        with create_run(new_folder, experiment, machine, overrides, data, overwrite):
            session = RunSession(experiment, setup, initial_state(setup), [], new_folder)
            new_folder.keep(session.state)
            return _run_rounds(job, session, watch)


def resume(
    folder: str | Path,
    *,
    machine: Machine | None = None,
    force: bool = False,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: PolicyFunction | None = None,
    engine: EngineFunction | None = None,
    watch: RoundCallback | None = None,
    complain: Callable[[str], None] = print,
    trust: bool = False,
) -> Run:
    """Resume an interrupted run; the result is identical to an uninterrupted one.

    Args:
        folder: The run folder.
        machine: Device, engine, threads and processes; by default those of the run so far.
        force: Allow a machine that would change the result in the last digits.
        data: The folder that holds data sets; by default the one used so far.
        dataset: The data set, if the run was started with one made in Python.
        model: The model, if the run was started with one made in Python.
        policy: The policy, if the run was started with one made in Python.
        engine: An engine made in Python, instead of the machine's.
        watch: A function that is called with the report of every round.
        complain: A function that is called with a sentence about each damaged file.
        trust: Allow calling functions that the folder names but this process has not.

    Returns:
        The finished run.

    Raises:
        InvalidValue: If the machine or an object made in Python is invalid.
        RunError: If the folder holds no usable run, or needs `force`, `trust` or an object
            made in Python.
        TrainingDiverged: If the training loss is no longer finite.
    """
    overrides = Overrides(dataset, model, policy, engine)
    _check_watch(watch)
    with Folder(Path(folder), trust).opened() as run_folder:
        machine = run_folder.machine(machine, force=force)
        run_folder.check_overrides(overrides)
        experiment = run_folder.experiment
        data = data or run_folder.data
        with machine.applied():
            setup = prepare(experiment, machine, data=data, overrides=overrides)
            # the session alone holds the state, so that it is freed after its round
            session = RunSession(
                experiment,
                setup,
                *load_latest(run_folder, setup, machine.device, complain),
                run_folder,
            )
            if session.running:
                check_data_is_local(experiment, engine)
            machine = limit_processes(machine, experiment.active)
            run_folder.record_machine(machine, session.state.round)
            job = WorkerJob(experiment, machine, data, overrides, experiment.rounds)
            return _run_rounds(job, session, watch)


def load(
    folder: str | Path,
    *,
    device: str = "cpu",
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: PolicyFunction | None = None,
    trust: bool = False,
) -> Run:
    """Load the newest state and the metrics of a run folder, without training.

    Args:
        folder: The run folder.
        device: The device to load the model and the data to.
        data: The folder that holds data sets; by default the one used by the run.
        dataset: The data set, if the run was started with one made in Python.
        model: The model, if the run was started with one made in Python.
        policy: The policy, if the run was started with one made in Python.
        trust: Allow calling functions that the folder names but this process has not.

    Returns:
        The run as far as it has come.

    Raises:
        InvalidValue: If the device or an object made in Python is invalid.
        RunError: If the folder holds no usable run, or needs `trust` or an object made in
            Python.
    """
    overrides = Overrides(dataset, model, policy)
    run_folder = _folder_of_run(folder, trust, overrides)
    experiment = run_folder.experiment
    machine = Machine(device=device).resolved()
    setup = prepare(experiment, machine, data=data or run_folder.data, overrides=overrides)
    state, _ = checkpoints.load_newest(run_folder.checkpoints, experiment.digest, machine.device)
    check_same_model(run_folder, setup, state)
    warn_of_removable_noise(run_folder)
    return Run(experiment, setup, state, all_metrics(run_folder, state), run_folder.path)


def replay(
    folder: str | Path,
    round: int,
    *,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: PolicyFunction | None = None,
    trust: bool = False,
) -> tuple[State, RoundReport]:
    """Run a round again from its kept state; the result is identical.

    Args:
        folder: The run folder.
        round: A round listed in the experiment's `keep_rounds`.
        data: The folder that holds data sets; by default the one used by the run.
        dataset: The data set, if the run was started with one made in Python.
        model: The model, if the run was started with one made in Python.
        policy: The policy, if the run was started with one made in Python.
        trust: Allow calling functions that the folder names but this process has not.

    Returns:
        The state after the round, and the round's report.

    Raises:
        InvalidValue: If the run is private, or an object made in Python is invalid.
        RunError: If the folder does not keep the state of that round, is not usable, or needs
            `trust` or an object made in Python.
        TrainingDiverged: If the training loss is no longer finite.
    """
    overrides = Overrides(dataset, model, policy)
    run_folder = _folder_of_run(folder, trust, overrides)
    experiment = run_folder.experiment
    check_data_is_local(experiment)
    if experiment.privacy != "none":
        raise InvalidValue(
            "privacy: a private round cannot be run again: its noise would be drawn anew, uncounted"
        )
    files = {file.round: file for file in checkpoints.list_checkpoints(run_folder.kept)}
    if round not in files:
        kept_rounds = ", ".join(map(str, sorted(files))) or "none (set keep_rounds)"
        raise RunError(
            f"{run_folder.path} keeps no state of round {round}; kept rounds: {kept_rounds}"
        )
    machine = run_folder.machine(None)
    data = data or run_folder.data
    with machine.applied():
        setup = prepare(experiment, machine, data=data, overrides=overrides)
        state = checkpoints.load_checkpoint(files[round], experiment.digest, machine.device)
        check_same_model(run_folder, setup, state)
        machine = limit_processes(machine, experiment.active)
        job = WorkerJob(experiment, machine, data, overrides, round + 1)
        with launch_workers(job, setup, state) as shared_setup:
            return run_round(shared_setup, state)


def _as_experiment(experiment: Experiment | str | Path) -> Experiment:
    """Return the experiment itself, or the one in a TOML file."""
    if isinstance(experiment, str | Path):
        return read_experiment(Path(experiment))
    if not isinstance(experiment, Experiment):
        raise InvalidValue(
            f"experiment must be an Experiment or a path; got {type(experiment).__name__}"
        )
    return experiment


def _folder_of_run(folder: str | Path, trust: bool, overrides: Overrides) -> Folder:
    """Return the folder of a run, which needs no other overrides."""
    run_folder = Folder(Path(folder), trust).read()
    run_folder.check_overrides(overrides)
    return run_folder


def _check_watch(watch: object) -> None:
    if isinstance(watch, type) or not (watch is None or callable(watch)):
        raise InvalidValue(
            f"watch must be a function of a round's report, or None; got {watch!r:.80}"
        )


def _run_rounds(job: WorkerJob, session: RunSession, watch: RoundCallback | None) -> Run:
    """Run the remaining rounds.

    Only the session holds the state, so that its memory is freed when the round ends.
    """
    with (
        signals.raise_on_signals(),
        session.checkpoint_on_exit(),
        launch_workers(job, session.setup, session.state) as shared_setup,
    ):
        while session.running:
            next_state, report = run_round(shared_setup, session.state, session.cache)
            session.record_round(next_state, report)
            if watch:
                watch(report)
    session.finish()
    folder = session.folder.path if session.folder else None
    return Run(session.experiment, session.setup, session.state, session.metrics, folder)
