"""Many runs in lockstep: settings and seeds of one kind of model take their steps together, as one large crew.

Every run is what it would be alone (its own cohort, shuffles, model and folder); only the steps of all their clients
are made at once. What cannot run together is run one after another.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from fedcover.data import datasets
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.log import warn_once
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, engine_for, has_small_steps
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import RunSession, load_latest
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.round import (
    PendingRound,
    RoundReport,
    finish_round,
    initial_state,
    start_round,
)
from fedcover.server.round_setup import Setup
from fedcover.training.engines.batched import train_stacked
from fedcover.training.engines.client_inputs import ClientJob, JobResult
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.runners import RunnerCache
from fedcover.training.engines.streams import MAX_STREAMS, train_on_streams
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Assignment, Dataset, Update

CLIENTS_AT_ONCE = {"cpu": 100, "cuda": 1500}
"""Clients of all runs that take a step together: what keeps the device busy, and no more."""

LARGE_CLIENTS_AT_ONCE = {"streams": MAX_STREAMS, "batched": 32}
"""The same on a GPU where steps are large, by engine."""

SweepCallback = Callable[[Experiment, RoundReport], None]


@dataclass(frozen=True)
class Finished:
    """A run of a sweep that has come to its end, or diverged: then `diverged` says where."""

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
) -> Iterator[Finished]:
    """Run experiments, as many at once as pay, and hand each over as it ends; with `runs`, each into its folder there.

    What was stopped goes on where it was: finished folders are handed over as they are.
    """
    shared: dict[str, Dataset] = {}
    waiting: dict[object, list[Experiment]] = {}
    for experiment in experiments:
        waiting.setdefault(lockstep_key(experiment), []).append(experiment)
    for family, alike in waiting.items():
        cache, left = RunnerCache(), list(alike)
        while left:
            with machine.applied(), ExitStack() as folders:
                courses = [_open_session(left.pop(0), machine, data, shared, runs, folders)]
                for _ in range(min(len(left), _at_once(courses[0].setup, machine) - 1)):
                    courses.append(_open_session(left.pop(0), machine, data, shared, runs, folders))
                threads = _machine_for(machine, courses[0].setup).threads
                with replace(machine, threads=threads).applied():
                    yield from _run_sessions(courses, family, cache, machine, watch)


def _finished(course: RunSession, machine: Machine) -> Finished:
    return Finished(
        course.experiment, course.metrics, course.diverged, _engine_of(course.setup, machine)
    )


def _engine_of(setup: Setup, machine: Machine) -> str:
    """The engine that comes nearest to what is done here, for the manifest."""
    alone = engine_for(setup, machine.engine, machine.device)
    return (
        "batched"
        if has_small_steps(setup) and (alone, machine.device) != ("sequential", "cpu")
        else alone
    )


def _at_once(setup: Setup, machine: Machine) -> int:
    """How many runs go side by side: as many as keep the device busy together."""
    if has_small_steps(setup):
        most = CLIENTS_AT_ONCE[machine.device.partition(":")[0]]
    elif machine.device == "cpu":
        most = 1
    else:
        most = LARGE_CLIENTS_AT_ONCE.get(engine_for(setup, machine.engine, machine.device), 1)
    return max(1, most // setup.active)


def _machine_for(machine: Machine, setup: Setup) -> Machine:
    """How a run is computed here: in this process, whatever other runs of the sweep do."""
    return replace(machine, processes=1).for_setup(setup)


def lockstep_key(experiment: Experiment) -> object:
    """What runs must have in common to take steps together; whatever else differs is sorted out by shape."""
    return (
        experiment.dataset,
        experiment.model,
        experiment.norm,
        experiment.scaler,
        experiment.active,
    )


def _open_session(
    experiment: Experiment,
    machine: Machine,
    data: str | Path | None,
    shared: dict[str, Dataset],
    runs: Path | None,
    folders: ExitStack,
) -> RunSession:
    """A run at its beginning, or where its folder stops; data sets are read and moved to the device once."""
    name = experiment.dataset
    if name.partition("(")[0] != "synthetic" and ":" not in name and name not in shared:
        loaded = datasets.load(name, data)
        shared[name] = replace(
            loaded, train=loaded.train.to(machine.device), test=loaded.test.to(machine.device)
        )
    setup = prepare(experiment, machine, data=data, overrides=Overrides(dataset=shared.get(name)))
    if runs is None:
        return RunSession(experiment, setup, initial_state(setup), [])
    folder = Folder(runs / experiment.name)
    known = (folder.path / "experiment.toml").exists()
    folders.enter_context(
        folder.opened()
        if known
        else folder.created(
            experiment,
            replace(_machine_for(machine, setup), engine=_engine_of(setup, machine)),
            Overrides(),
            data,
        )
    )
    if folder.names_other_functions(experiment) or folder.experiment.digest != experiment.digest:
        raise InvalidValue(
            f"{folder.path} holds another experiment; choose another name or folder of runs"
        )
    folder.check_same_machine(machine)
    state, metrics = load_latest(folder, setup, machine.device, warn_once)
    course = RunSession(experiment, setup, state, metrics, folder)
    folders.enter_context(course.checkpoint_on_exit())
    return course


def _run_sessions(
    courses: Sequence[RunSession],
    family: object,
    cache: RunnerCache,
    machine: Machine,
    watch: SweepCallback | None,
) -> Iterator[Finished]:
    """Rounds of all runs, side by side, until the last has ended."""
    for course in courses:
        if not course.running:
            course.finish()  # it may have been stopped after its last round, before its summary was written
            yield _finished(course, machine)
    while running := [course for course in courses if course.running]:
        asked = [start_round(course.setup, course.state) for course in running]
        start = time.perf_counter()
        trained = _train_cohorts(running, asked, family, cache, machine)
        for question in asked:  # they trained together, so each bears its share
            question.clock.seconds["training"] = (time.perf_counter() - start) / len(asked)
        for course, question, updates in zip(running, asked, trained, strict=True):
            try:
                if isinstance(updates, TrainingDiverged):
                    raise updates
                after, report = finish_round(course.setup, course.state, question, updates)
            except TrainingDiverged as error:
                course.diverged = str(error)
            else:
                course.record_round(after, report)
                if watch:
                    watch(course.experiment, report)
                if not course.running:
                    course.finish()
            if not course.running:
                yield _finished(course, machine)


def _train_cohorts(
    courses: Sequence[RunSession],
    asked: Sequence[PendingRound],
    family: object,
    cache: RunnerCache,
    machine: Machine,
) -> list[list[Update] | TrainingDiverged]:
    """What the clients of each run send back: in crews over all runs where that can be, else run by run."""
    jobs: list[list[ClientJob]] = []
    for e, question in zip(courses, asked, strict=True):
        task, kind = e.setup.task, (family, _kind(e.setup.task.model.module))
        jobs.append(
            [
                ClientJob(Assignment(task, e.state, *each), e.setup.lr(e.state.round), kind)
                for each in question.work
            ]
        )
    everybody = [job for own in jobs for job in own]
    try:
        answers, alone = _train_together(courses[0].setup, everybody, cache, machine)
    except UnsupportedByEngine as reason:
        warn_once(f"{reason}, so the runs of the sweep are trained one after another")
        answers, alone = [], everybody
    made: dict[int, Update | TrainingDiverged] = {id(job): answer for job, answer in answers}
    lonely = {id(job) for job in alone}
    results: list[list[Update] | TrainingDiverged] = []
    for course, own in zip(courses, jobs, strict=True):
        left = [(j.assignment.client, j.assignment.reduction) for j in own if id(j) in lonely]
        found: list[Update | TrainingDiverged] = [made[id(job)] for job in own if id(job) in made]
        try:
            found += course.setup.engine(
                course.setup.task, course.state, left, course.setup.lr(course.state.round)
            )
        except TrainingDiverged as error:
            found.append(error)
        errors = [answer for answer in found if isinstance(answer, TrainingDiverged)]
        results.append(errors[0] if errors else [u for u in found if isinstance(u, Update)])
    return results


def _kind(module: nn.Module) -> object:
    """What the models of runs must have in common beside their shapes: an own one may draw more than its weights."""
    try:
        return fingerprint(module)
    except UnsupportedByEngine:  # its steps will not be made fast, so it has nothing to share
        return id(module)


def _train_together(
    setup: Setup, jobs: Sequence[ClientJob], cache: RunnerCache, machine: Machine
) -> tuple[list[JobResult], Sequence[ClientJob]]:
    """What comes of jobs of several runs that are done together, and those that are left to each run's own engine.

    Small steps are made in crews; on a GPU, larger ones as the engine does. On a CPU only compiled crews pay.
    """
    alone, small = engine_for(setup, machine.engine, machine.device), has_small_steps(setup)
    if machine.device == "cpu":
        return (
            train_stacked(jobs, cache, machine.precision)
            if small and alone == "batched"
            else ([], jobs)
        )
    if small or alone == "batched":
        return train_stacked(jobs, cache, machine.precision)
    return list(train_on_streams(jobs, cache, machine.precision)), []
