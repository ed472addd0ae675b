"""Run many experiments in lockstep: the clients of all runs train together, as one large stack.

Every run gives the same result as alone, with its own cohort, shuffles, model and folder. Only the
steps of the clients are computed together. Runs that do not fit together run one after another.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedcover.data import datasets
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.log import log
from fedcover.runs.experiment import Experiment
from fedcover.runs.joint_training import LockstepRun, engine_in_lockstep, train_cohorts
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.new_run import create_run
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import RunSession, load_latest
from fedcover.runs.setup import Overrides, build_setup, prepare_workload
from fedcover.server.round import (
    PendingRound,
    RoundReport,
    finish_round,
    initial_state,
    start_round,
)
from fedcover.training.engines.runners import RunnerCache
from fedcover.types import Dataset, Update

SweepCallback = Callable[[Experiment, RoundReport], None]


@dataclass(frozen=True)
class FinishedRun:
    """A run of a sweep that has finished or diverged.

    `diverged` is the error message if it diverged. `engine` is the engine that trained it.
    """

    experiment: Experiment
    metrics: Metrics = field(repr=False)
    diverged: str = ""
    engine: str = ""


def run_in_lockstep(
    experiments: Sequence[Experiment],
    runs: Path | None,
    machine: Machine,
    data: str | Path | None,
    watch: SweepCallback | None,
) -> Iterator[FinishedRun]:
    """Run experiments and yield each when it ends; with `runs`, each gets a folder there.

    Interrupted runs are resumed, and finished ones are yielded unchanged.
    """
    datasets_by_name: dict[str, Dataset] = {}
    experiments_by_key: dict[object, list[Experiment]] = {}
    for experiment in experiments:
        experiments_by_key.setdefault(lockstep_key(experiment), []).append(experiment)
    for family, waiting in experiments_by_key.items():
        cache = RunnerCache()
        while waiting:
            with machine.applied(), ExitStack() as folders:
                opener = _RunOpener(machine, data, datasets_by_name, runs, folders)
                batch = opener.open_batch(waiting)
                with replace(machine, threads=batch[0].machine.threads).applied():
                    yield from _run_batch(batch, family, cache, watch)


def lockstep_key(experiment: Experiment) -> object:
    """Return what runs must have in common to train together.

    Other differences only change the shapes of tensors, which the engines group by themselves.
    """
    return (
        experiment.dataset,
        experiment.model,
        experiment.norm,
        experiment.scaler,
        experiment.active,
    )


# ── opening the runs ────────────────────────────────────────────────────────────────────────────


@dataclass
class _RunOpener:
    """Opens runs of a sweep; each data set is loaded and moved to the device once."""

    machine: Machine
    data: str | Path | None
    datasets_by_name: dict[str, Dataset]
    runs: Path | None
    folders: ExitStack

    def open_batch(self, waiting: list[Experiment]) -> list[LockstepRun]:
        """Open as many waiting runs as keep the device busy, and remove them from the list."""
        first = self.open_run(waiting.pop(0))
        batch = [first]
        while waiting and len(batch) < first.max_runs:
            batch.append(self.open_run(waiting.pop(0)))
        return batch

    def open_run(self, experiment: Experiment) -> LockstepRun:
        """Open a run at its beginning, or where its folder ends."""
        overrides = Overrides(dataset=self._shared_dataset(experiment.dataset))
        workload = prepare_workload(
            experiment, self.machine.device, data=self.data, overrides=overrides
        )
        # within a sweep, a run uses this process only
        machine = replace(self.machine, processes=1).for_workload(workload)
        setup = build_setup(experiment, workload, machine, overrides)
        small_steps = workload.has_small_steps()
        if self.runs is None:
            session = RunSession(experiment, setup, initial_state(setup), [])
            return LockstepRun(session, machine, small_steps)
        folder = Folder(self.runs / experiment.name)
        recorded_engine = engine_in_lockstep(machine, small_steps)
        self._lock(folder, experiment, replace(machine, engine=recorded_engine))
        # other functions must be noticed first: `folder.experiment` would import them
        other_functions = folder.names_other_functions(experiment)
        if other_functions or folder.experiment.digest != experiment.digest:
            raise InvalidValue(
                f"{folder.path} holds another experiment; choose another name or folder of runs"
            )
        folder.check_same_machine(self.machine)
        state, metrics = load_latest(folder, setup, self.machine.device, log.warning)
        session = RunSession(experiment, setup, state, metrics, folder)
        self.folders.enter_context(session.checkpoint_on_exit())
        return LockstepRun(session, machine, small_steps)

    def _lock(self, folder: Folder, experiment: Experiment, machine: Machine) -> None:
        """Open the folder of a run, or create it, until `folders` is closed."""
        if (folder.path / "experiment.toml").exists():
            self.folders.enter_context(folder.opened())
        else:
            new_run = create_run(folder, experiment, machine, Overrides(), self.data)
            self.folders.enter_context(new_run)

    def _shared_dataset(self, name: str) -> Dataset | None:
        """Return a named data set on the device; None if every run must make its own."""
        if name.partition("(")[0] == "synthetic" or ":" in name:
            return None
        if name not in self.datasets_by_name:
            dataset = datasets.load(name, self.data)
            device = self.machine.device
            self.datasets_by_name[name] = replace(
                dataset, train=dataset.train.to(device), test=dataset.test.to(device)
            )
        return self.datasets_by_name[name]


# ── running their rounds ────────────────────────────────────────────────────────────────────────


def _run_batch(
    batch: Sequence[LockstepRun],
    family: object,
    cache: RunnerCache,
    watch: SweepCallback | None,
) -> Iterator[FinishedRun]:
    """Run the rounds of all runs in lockstep until the last run has ended."""
    for run in batch:
        if not run.session.running:
            run.session.finish()  # it may have been stopped before its summary was written
            yield _finished(run)
    while running := [run for run in batch if run.session.running]:
        sessions = [run.session for run in running]
        pending_rounds = [
            start_round(session.setup, session.state, session.cache) for session in sessions
        ]
        start = time.perf_counter()
        results = train_cohorts(running, pending_rounds, family, cache)
        # they trained together, so each run accounts for an equal share of the time
        seconds = (time.perf_counter() - start) / len(running)
        for run, pending, updates in zip(running, pending_rounds, results, strict=True):
            pending.clock.seconds["training"] = seconds
            _finish_round(run.session, pending, updates, watch)
            if not run.session.running:
                yield _finished(run)


def _finish_round(
    session: RunSession,
    pending: PendingRound,
    updates: list[Update] | TrainingDiverged,
    watch: SweepCallback | None,
) -> None:
    """Aggregate and record the round of one run, unless it has diverged."""
    try:
        if isinstance(updates, TrainingDiverged):
            raise updates
        next_state, report = finish_round(
            session.setup, session.state, pending, updates, session.cache
        )
    except TrainingDiverged as error:
        session.diverged = str(error)
        return
    session.record_round(next_state, report)
    if watch:
        watch(session.experiment, report)
    if not session.running:
        session.finish()


def _finished(run: LockstepRun) -> FinishedRun:
    session = run.session
    return FinishedRun(session.experiment, session.metrics, session.diverged, run.engine)
