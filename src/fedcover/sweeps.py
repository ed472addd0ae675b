"""Many runs in lockstep: settings and seeds of one kind of model take their steps together, as one large crew.

Every run is what it would be alone (its own cohort, shuffles, model and folder); only the steps of all their clients
are made at once. What cannot run together is run one after another.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedcover import datasets
from fedcover.courses import Course, where_it_stopped
from fedcover.engines.batched import in_crews
from fedcover.engines.lanes import Job
from fedcover.engines.pools import Pool, plainly, say
from fedcover.engines.steps import Unfit
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.experiment import Experiment
from fedcover.folders import Folder
from fedcover.preparation import Machine, Parts, engine_for, prepare
from fedcover.rounds import Asked, Report, ask, conclude, first_state
from fedcover.summary import Metrics
from fedcover.types import Assignment, Dataset, Update

CLIENTS_AT_ONCE = {"cpu": 100, "cuda": 1500}
"""Clients of all runs that take a step together: what keeps the device busy, and no more."""

Seen = Callable[[Experiment, Report], None]


@dataclass(frozen=True)
class Finished:
    """A run of a sweep that has come to its end, or diverged: then `diverged` says where."""

    experiment: Experiment
    metrics: Metrics = field(repr=False)
    diverged: str = ""


def varied(experiment: Experiment, choices: dict[str, Sequence[Any]], seeds: int) -> list[Experiment]:
    """Every combination of choices with every seed, each under a name of its own.

    >>> [e.name for e in varied(Experiment(name="try"), {"lr": [0.1, 0.01]}, seeds=1)]
    ['try-lr-0.1-seed-0', 'try-lr-0.01-seed-0']
    """
    if seeds < 1:
        raise InvalidValue(f"seeds must be at least 1; got {seeds}")
    for key, values in choices.items():
        if key in ("seed", "name"):
            raise InvalidValue(f"vary must not be of {key}: seeds are varied by seeds, names are made from the rest")
        if len({str(value) for value in values}) < len(values):
            raise InvalidValue(f"vary must name each value of {key} once; got {list(values)}")
    made = []
    for values in product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        for seed in range(experiment.seed, experiment.seed + seeds):
            parts = [experiment.name, *(f"{key}-{value}" for key, value in {**changes, "seed": seed}.items())]
            known = experiment.model_dump()
            made.append(Experiment(**{**known, **changes, "seed": seed, "name": _as_name("-".join(parts))}))
    return made


def _as_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in text)


def sweep(
    experiments: Sequence[Experiment],
    runs: Path | None = None,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    watch: Seen | None = None,
) -> Iterator[Finished]:
    """Run experiments, as many at once as pay, and hand each over as it ends; with `runs`, each into its folder there.

    A sweep that was stopped goes on where it was: finished folders are handed over as they are.

    >>> few = dict(policy="prefix", clients=20, active=4, rounds=1, epochs=1)
    >>> [len(run.metrics) for run in sweep([Experiment(**few, seed=seed) for seed in range(2)])]
    [1, 1]
    """
    chosen = (machine or Machine()).resolved()
    shared: dict[str, Dataset] = {}
    waiting: dict[object, list[Experiment]] = {}
    for experiment in experiments:
        waiting.setdefault(family_of(experiment), []).append(experiment)
    for family, alike in waiting.items():
        at_once = max(1, CLIENTS_AT_ONCE[chosen.device.partition(":")[0]] // alike[0].active)
        pool = Pool()
        for start in range(0, len(alike), at_once):
            with chosen.applied(), ExitStack() as folders:
                some = alike[start : start + at_once]
                entries = [_entry(e, chosen, data, shared, runs, folders) for e in some]
                yield from _in_step(entries, family, pool, chosen, watch)


def family_of(experiment: Experiment) -> object:
    """What runs must have in common to take steps together; whatever else differs is sorted out by shape."""
    return experiment.dataset, experiment.model, experiment.norm, experiment.scaler, experiment.active


def _entry(
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
        else folder.created(experiment, replace(machine.for_setup(setup), engine="batched"), Parts(), data)
    )
    if folder.experiment.digest != experiment.digest:
        raise InvalidValue(f"{folder.path} holds another experiment; choose another name or folder of runs")
    state, metrics = where_it_stopped(folder, setup, machine.device, say)
    course = Course(experiment, setup, state, metrics, folder)
    folders.enter_context(course.kept_safe())
    return course


def _in_step(
    entries: Sequence[Course], family: object, pool: Pool, machine: Machine, watch: Seen | None
) -> Iterator[Finished]:
    """Rounds of all runs, side by side, until the last has ended."""
    for entry in entries:
        if not entry.running:
            yield Finished(entry.experiment, entry.metrics)
    while running := [entry for entry in entries if entry.running]:
        asked = [ask(entry.setup, entry.state) for entry in running]
        start = time.perf_counter()
        trained = _trained(running, asked, family, pool, machine)
        for question in asked:  # they trained together, so each bears its share
            question.clock.seconds["training"] = (time.perf_counter() - start) / len(asked)
        for entry, question, updates in zip(running, asked, trained, strict=True):
            if isinstance(updates, TrainingDiverged):
                entry.diverged = str(updates)
            else:
                after, report = conclude(entry.setup, entry.state, question, updates)
                entry.take(after, report)
                if watch:
                    watch(entry.experiment, report)
                if not entry.running:
                    entry.finish()
            if not entry.running:
                yield Finished(entry.experiment, entry.metrics, entry.diverged)


def _trained(
    entries: Sequence[Course], asked: Sequence[Asked], family: object, pool: Pool, machine: Machine
) -> list[list[Update] | TrainingDiverged]:
    """What the clients of each run send back: in crews over all runs where that can be, else run by run."""
    jobs: list[list[Job]] = [
        [
            Job(Assignment(e.setup.task, e.state, client, part), e.setup.lr(e.state.round), family)
            for client, part in question.work
        ]
        for e, question in zip(entries, asked, strict=True)
    ]
    try:
        # short runs on a CPU are not worth compiling
        short = machine.device == "cpu" and engine_for(entries[0].setup, machine) != "batched"
        make = plainly if short else None
        answers, alone = in_crews([job for own in jobs for job in own], pool, machine.precision, make)
    except Unfit as reason:
        say(f"{reason}, so the runs of the sweep are trained one after another")
        answers, alone = [], [job for own in jobs for job in own]
    made: dict[int, Update | TrainingDiverged] = {id(job): answer for job, answer in answers}
    lonely = {id(job) for job in alone}
    results: list[list[Update] | TrainingDiverged] = []
    for entry, own in zip(entries, jobs, strict=True):
        left = [(j.assignment.client, j.assignment.reduction) for j in own if id(j) in lonely]
        found: list[Update | TrainingDiverged] = [made[id(job)] for job in own if id(job) in made]
        try:
            found += entry.setup.engine(entry.setup.task, entry.state, left, entry.setup.lr(entry.state.round))
        except TrainingDiverged as error:
            found.append(error)
        errors = [answer for answer in found if isinstance(answer, TrainingDiverged)]
        results.append(errors[0] if errors else [u for u in found if isinstance(u, Update)])
    return results
