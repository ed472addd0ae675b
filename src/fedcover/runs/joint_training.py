"""Train the clients of several runs together, as one large stack.

Every run gets the updates that it would get alone. The clients of a run that cannot be stacked are
trained by its own engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedcover.errors import TrainingDiverged
from fedcover.log import warn_once
from fedcover.runs.machine import Machine
from fedcover.runs.session import RunSession
from fedcover.server.round import PendingRound
from fedcover.training.engines.batched import train_stacked
from fedcover.training.engines.client_inputs import ClientJob, JobResult
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.runners import RunnerCache
from fedcover.training.engines.streams import MAX_STREAMS, train_on_streams
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Assignment, Update

CLIENTS_AT_ONCE = {"cpu": 100, "cuda": 1500}
"""Clients of all runs that take a step together: enough to keep the device busy."""

LARGE_CLIENTS_AT_ONCE = {"streams": MAX_STREAMS, "batched": 32}
"""The same on a GPU where steps are large, by engine."""


@dataclass(frozen=True)
class LockstepRun:
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
        return engine_in_lockstep(self.machine, self.small_steps)

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


def engine_in_lockstep(machine: Machine, small_steps: bool) -> str:
    """Return the engine that is most similar to training in lockstep, for the manifest."""
    if small_steps and (machine.engine, machine.device) != ("sequential", "cpu"):
        return "batched"
    return machine.engine


def train_cohorts(
    runs: Sequence[LockstepRun],
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
    first: LockstepRun, jobs: Sequence[ClientJob], cache: RunnerCache
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
