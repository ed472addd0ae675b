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
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import engine_for, has_small_steps
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import Course, where_it_stopped
from fedcover.runs.setup import Machine, Parts, prepare
from fedcover.server.round import Asked, Report, Setup, ask, conclude, first_state
from fedcover.training.engines.batched import in_crews
from fedcover.training.engines.buffers import Answer, Job
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.runners import Pool, say
from fedcover.training.engines.sgd_step import Unfit
from fedcover.training.engines.streams import AT_ONCE, side_by_side
from fedcover.types import Assignment, Dataset, Update

CLIENTS_AT_ONCE = {"cpu": 100, "cuda": 1500}
"""Clients of all runs that take a step together: what keeps the device busy, and no more."""

LARGE_CLIENTS_AT_ONCE = {"streams": AT_ONCE, "batched": 32}
"""The same on a GPU where steps are large, by engine."""

Seen = Callable[[Experiment, Report], None]


@dataclass(frozen=True)
class Finished:
    """A run of a sweep that has come to its end, or diverged: then `diverged` says where."""

    experiment: Experiment
    metrics: Metrics = field(repr=False)
    diverged: str = ""
    engine: str = ""


def in_lockstep(
    experiments: Sequence[Experiment], runs: Path | None, machine: Machine, data: str | Path | None, watch: Seen | None
) -> Iterator[Finished]:
    """Run experiments, as many at once as pay, and hand each over as it ends; with `runs`, each into its folder there.

    What was stopped goes on where it was: finished folders are handed over as they are.
    """
    shared: dict[str, Dataset] = {}
    waiting: dict[object, list[Experiment]] = {}
    for experiment in experiments:
        waiting.setdefault(family_of(experiment), []).append(experiment)
    for family, alike in waiting.items():
        pool, left = Pool(), list(alike)
        while left:
            with machine.applied(), ExitStack() as folders:
                courses = [_course(left.pop(0), machine, data, shared, runs, folders)]
                for _ in range(min(len(left), _at_once(courses[0].setup, machine) - 1)):
                    courses.append(_course(left.pop(0), machine, data, shared, runs, folders))
                threads = _decided(machine, courses[0].setup).threads
                with replace(machine, threads=threads).applied():
                    yield from _in_step(courses, family, pool, machine, watch)


def _finished(course: Course, machine: Machine) -> Finished:
    return Finished(course.experiment, course.metrics, course.diverged, _engine_of(course.setup, machine))


def _engine_of(setup: Setup, machine: Machine) -> str:
    """The engine that comes nearest to what is done here, for the manifest."""
    alone = engine_for(setup, machine.engine, machine.device)
    return "batched" if has_small_steps(setup) and (alone, machine.device) != ("sequential", "cpu") else alone


def _at_once(setup: Setup, machine: Machine) -> int:
    """How many runs go side by side: as many as keep the device busy together."""
    if has_small_steps(setup):
        most = CLIENTS_AT_ONCE[machine.device.partition(":")[0]]
    elif machine.device == "cpu":
        most = 1
    else:
        most = LARGE_CLIENTS_AT_ONCE.get(engine_for(setup, machine.engine, machine.device), 1)
    return max(1, most // setup.active)


def _decided(machine: Machine, setup: Setup) -> Machine:
    """How a run is computed here: in this process, whatever other runs of the sweep do."""
    return replace(machine, processes=1).for_setup(setup)


def family_of(experiment: Experiment) -> object:
    """What runs must have in common to take steps together; whatever else differs is sorted out by shape."""
    return experiment.dataset, experiment.model, experiment.norm, experiment.scaler, experiment.active


def _course(
    experiment: Experiment,
    machine: Machine,
    data: str | Path | None,
    shared: dict[str, Dataset],
    runs: Path | None,
    folders: ExitStack,
) -> Course:
    """A run at its beginning, or where its folder stops; data sets are read and moved to the device once."""
    name = experiment.dataset
    if name.partition("(")[0] != "synthetic" and ":" not in name and name not in shared:
        loaded = datasets.load(name, data)
        shared[name] = replace(loaded, train=loaded.train.to(machine.device), test=loaded.test.to(machine.device))
    setup = prepare(experiment, machine, data=data, parts=Parts(dataset=shared.get(name)))
    if runs is None:
        return Course(experiment, setup, first_state(setup), [])
    folder = Folder(runs / experiment.name)
    known = (folder.path / "experiment.toml").exists()
    folders.enter_context(
        folder.opened()
        if known
        else folder.created(
            experiment, replace(_decided(machine, setup), engine=_engine_of(setup, machine)), Parts(), data
        )
    )
    if folder.names_other_functions(experiment) or folder.experiment.digest != experiment.digest:
        raise InvalidValue(f"{folder.path} holds another experiment; choose another name or folder of runs")
    folder.refuse_another(machine)
    state, metrics = where_it_stopped(folder, setup, machine.device, say)
    course = Course(experiment, setup, state, metrics, folder)
    folders.enter_context(course.kept_safe())
    return course


def _in_step(
    courses: Sequence[Course], family: object, pool: Pool, machine: Machine, watch: Seen | None
) -> Iterator[Finished]:
    """Rounds of all runs, side by side, until the last has ended."""
    for course in courses:
        if not course.running:
            course.finish()  # it may have been stopped after its last round, before its summary was written
            yield _finished(course, machine)
    while running := [course for course in courses if course.running]:
        asked = [ask(course.setup, course.state) for course in running]
        start = time.perf_counter()
        trained = _trained(running, asked, family, pool, machine)
        for question in asked:  # they trained together, so each bears its share
            question.clock.seconds["training"] = (time.perf_counter() - start) / len(asked)
        for course, question, updates in zip(running, asked, trained, strict=True):
            try:
                if isinstance(updates, TrainingDiverged):
                    raise updates
                after, report = conclude(course.setup, course.state, question, updates)
            except TrainingDiverged as error:
                course.diverged = str(error)
            else:
                course.take(after, report)
                if watch:
                    watch(course.experiment, report)
                if not course.running:
                    course.finish()
            if not course.running:
                yield _finished(course, machine)


def _trained(
    courses: Sequence[Course], asked: Sequence[Asked], family: object, pool: Pool, machine: Machine
) -> list[list[Update] | TrainingDiverged]:
    """What the clients of each run send back: in crews over all runs where that can be, else run by run."""
    jobs: list[list[Job]] = []
    for e, question in zip(courses, asked, strict=True):
        task, kind = e.setup.task, (family, _kind(e.setup.task.model.module))
        jobs.append([Job(Assignment(task, e.state, *each), e.setup.lr(e.state.round), kind) for each in question.work])
    everybody = [job for own in jobs for job in own]
    try:
        answers, alone = _together(courses[0].setup, everybody, pool, machine)
    except Unfit as reason:
        say(f"{reason}, so the runs of the sweep are trained one after another")
        answers, alone = [], everybody
    made: dict[int, Update | TrainingDiverged] = {id(job): answer for job, answer in answers}
    lonely = {id(job) for job in alone}
    results: list[list[Update] | TrainingDiverged] = []
    for course, own in zip(courses, jobs, strict=True):
        left = [(j.assignment.client, j.assignment.reduction) for j in own if id(j) in lonely]
        found: list[Update | TrainingDiverged] = [made[id(job)] for job in own if id(job) in made]
        try:
            found += course.setup.engine(course.setup.task, course.state, left, course.setup.lr(course.state.round))
        except TrainingDiverged as error:
            found.append(error)
        errors = [answer for answer in found if isinstance(answer, TrainingDiverged)]
        results.append(errors[0] if errors else [u for u in found if isinstance(u, Update)])
    return results


def _kind(module: nn.Module) -> object:
    """What the models of runs must have in common beside their shapes: an own one may draw more than its weights."""
    try:
        return fingerprint(module)
    except Unfit:  # its steps will not be made fast, so it has nothing to share
        return id(module)


def _together(setup: Setup, jobs: Sequence[Job], pool: Pool, machine: Machine) -> tuple[list[Answer], Sequence[Job]]:
    """What comes of jobs of several runs that are done together, and those that are left to each run's own engine.

    Small steps are made in crews; on a GPU, larger ones as the engine does. On a CPU only compiled crews pay.
    """
    alone, small = engine_for(setup, machine.engine, machine.device), has_small_steps(setup)
    if machine.device == "cpu":
        return in_crews(jobs, pool, machine.precision) if small and alone == "batched" else ([], jobs)
    if small or alone == "batched":
        return in_crews(jobs, pool, machine.precision)
    return list(side_by_side(jobs, pool, machine.precision)), []
