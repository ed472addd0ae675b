"""Run many experiments in lockstep: the clients of all runs train together, as one large stack.

Every run gives the same result as alone, with its own cohort, shuffles, model and folder. Only the
steps of the clients are computed together. Runs that do not fit together run one after another.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from fedcover.data import datasets
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.log import log, warn_once
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import Metrics
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
from fedcover.training.engines.batched import train_stacked
from fedcover.training.engines.client_inputs import ClientJob, JobResult
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.runners import RunnerCache
from fedcover.training.engines.streams import MAX_STREAMS, train_on_streams
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Assignment, Dataset, Update

CLIENTS_AT_ONCE = {"cpu": 100, "cuda": 1500}
"""Clients of all runs that take a step together: enough to keep the device busy."""

LARGE_CLIENTS_AT_ONCE = {"streams": MAX_STREAMS, "batched": 32}
"""The same on a GPU where steps are large, by engine."""

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


@dataclass(frozen=True)
class _LockstepRun:
    """A run of a sweep.

    `machine` is what the run would choose if it were alone, in this process. `small_steps` is
    whether one client's step is too little work to keep a processor busy.
    """

    session: RunSession
    machine: Machine
    small_steps: bool

    @property
    def engine(self) -> str:
        """The engine that is most similar to training in lockstep, for the manifest."""
        return _engine_in_lockstep(self.machine, self.small_steps)

    @property
    def max_runs(self) -> int:
        """How many such runs together keep the device busy."""
        device = self.machine.device
        if self.small_steps:
            max_clients = CLIENTS_AT_ONCE[device.partition(":")[0]]
        elif device == "cpu":
            max_clients = 1
        else:
            max_clients = LARGE_CLIENTS_AT_ONCE.get(self.machine.engine, 1)
        return max(1, max_clients // self.session.experiment.active)


def _engine_in_lockstep(machine: Machine, small_steps: bool) -> str:
    if small_steps and (machine.engine, machine.device) != ("sequential", "cpu"):
        return "batched"
    return machine.engine


@dataclass
class _RunOpener:
    """Opens runs of a sweep; each data set is loaded and moved to the device once."""

    machine: Machine
    data: str | Path | None
    datasets_by_name: dict[str, Dataset]
    runs: Path | None
    folders: ExitStack

    def open_batch(self, waiting: list[Experiment]) -> list[_LockstepRun]:
        """Open as many waiting runs as keep the device busy, and remove them from the list."""
        first = self.open_run(waiting.pop(0))
        batch = [first]
        while waiting and len(batch) < first.max_runs:
            batch.append(self.open_run(waiting.pop(0)))
        return batch

    def open_run(self, experiment: Experiment) -> _LockstepRun:
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
            return _LockstepRun(session, machine, small_steps)
        folder = Folder(self.runs / experiment.name)
        recorded_engine = _engine_in_lockstep(machine, small_steps)
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
        return _LockstepRun(session, machine, small_steps)

    def _lock(self, folder: Folder, experiment: Experiment, machine: Machine) -> None:
        """Open the folder of a run, or create it, until `folders` is closed."""
        if (folder.path / "experiment.toml").exists():
            self.folders.enter_context(folder.opened())
        else:
            self.folders.enter_context(folder.created(experiment, machine, Overrides(), self.data))

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
    batch: Sequence[_LockstepRun],
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
        results = _train_cohorts(running, pending_rounds, family, cache)
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


def _finished(run: _LockstepRun) -> FinishedRun:
    session = run.session
    return FinishedRun(session.experiment, session.metrics, session.diverged, run.engine)


# ── training the clients of all runs ────────────────────────────────────────────────────────────


def _train_cohorts(
    runs: Sequence[_LockstepRun],
    pending_rounds: Sequence[PendingRound],
    family: object,
    cache: RunnerCache,
) -> list[list[Update] | TrainingDiverged]:
    """Train the clients of all runs, together where possible; return each run's updates."""
    sessions = [run.session for run in runs]
    jobs_by_session = [
        _jobs_of(session, pending, family)
        for session, pending in zip(sessions, pending_rounds, strict=True)
    ]
    all_jobs = [job for jobs in jobs_by_session for job in jobs]
    try:
        results, remaining = _train_together(runs[0], all_jobs, cache)
    except UnsupportedByEngine as reason:
        warn_once(f"{reason}, so the runs of the sweep are trained one after another")
        results, remaining = [], all_jobs
    # jobs are compared by identity: equal jobs of two runs are different jobs
    result_by_job = {id(job): result for job, result in results}
    remaining_ids = {id(job) for job in remaining}
    updates_by_session: list[list[Update] | TrainingDiverged] = []
    for session, jobs in zip(sessions, jobs_by_session, strict=True):
        done = [result_by_job[id(job)] for job in jobs if id(job) in result_by_job]
        remaining_jobs = [job for job in jobs if id(job) in remaining_ids]
        updates_by_session.append(_complete_cohort(session, done, remaining_jobs))
    return updates_by_session


def _jobs_of(session: RunSession, pending: PendingRound, family: object) -> list[ClientJob]:
    """Return what the clients of one run have to train in a round."""
    task, state = session.setup.task, session.state
    lr = session.setup.lr(state.round)
    job_family = (family, _module_kind(task.model.module))
    return [
        ClientJob(Assignment(task, state, client, reduction), lr, job_family)
        for client, reduction in pending.work
    ]


def _complete_cohort(
    session: RunSession, results: list[Update | TrainingDiverged], jobs: Sequence[ClientJob]
) -> list[Update] | TrainingDiverged:
    """Train the remaining clients of a run with its own engine; return all of its updates.

    If a client has diverged, return the first such error instead.
    """
    setup, state = session.setup, session.state
    work = [(job.assignment.client, job.assignment.reduction) for job in jobs]
    updates: list[Update] = []
    for result in results:
        if isinstance(result, TrainingDiverged):
            return result
        updates.append(result)
    try:
        updates.extend(setup.engine(setup.task, state, work, setup.lr(state.round)))
    except TrainingDiverged as error:
        return error
    return updates


def _module_kind(module: nn.Module) -> object:
    """Return what modules must have in common, besides shapes, to share a compiled step."""
    try:
        return fingerprint(module)
    except UnsupportedByEngine:  # its steps cannot be compiled, so there is nothing to share
        return id(module)


def _train_together(
    first: _LockstepRun, jobs: Sequence[ClientJob], cache: RunnerCache
) -> tuple[list[JobResult], Sequence[ClientJob]]:
    """Train the clients of several runs together; return results and the jobs not done.

    Small steps are stacked. On a GPU, larger ones are computed as the first run's engine does. On a
    CPU, only compiled stacks pay.
    """
    machine, small = first.machine, first.small_steps
    if machine.device == "cpu" and not (small and machine.engine == "batched"):
        return [], jobs
    if small or machine.engine == "batched":
        return train_stacked(jobs, cache, machine.precision)
    return list(train_on_streams(jobs, cache, machine.precision)), []
