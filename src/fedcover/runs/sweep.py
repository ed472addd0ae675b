"""A sweep: settings x seeds, run in lockstep, in several processes where that is faster."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import which
from typing import Any

import torch

from fedcover.errors import InvalidValue
from fedcover.runs import presets
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.experiment import Experiment
from fedcover.runs.lockstep import FinishedRun, SweepCallback, lockstep_key, run_in_lockstep
from fedcover.runs.machine import Machine, physical_cores
from fedcover.runs.mps import MPS
from fedcover.runs.setup import prepare_workload
from fedcover.runs.sweep_workers import sweep_in_processes

MIN_EPOCHS_FOR_PROCESSES = {"cpu": 2_000, "cuda": 100_000}
"""Local epochs of a whole sweep from which on several processes are worth starting."""

PROCESSES_PER_GPU = 8
"""Processes on a GPU with small steps: some train while others aggregate and evaluate."""

Choices = Mapping[str | tuple[str, ...], Sequence[Any]]
"""Values of a field, or of several fields that change together: then a value is one of each."""

LONGEST_SETTING = 80
"""Characters of a setting's name, so that a seed can be added to it."""


def sweep(
    experiments: Sequence[Experiment],
    runs: Path | None = None,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    watch: SweepCallback | None = None,
) -> Iterator[FinishedRun]:
    """Run many experiments and yield each when it ends.

    A sweep that was interrupted is resumed: finished runs are yielded unchanged.

    Args:
        experiments: The experiments, with different names if they get folders.
        runs: A folder in which each run gets its own folder; without it, nothing is written.
        machine: Device, engine, threads and processes; chosen automatically by default.
        data: The folder that holds data sets.
        watch: A function that is called with the experiment and the report of every round.

    Returns:
        An iterator over the finished runs, in the order in which they end.

    Raises:
        InvalidValue: If an experiment or the machine is invalid, or a folder holds another run.
        RunError: If a run folder is damaged, a file cannot be written, or a process dies.

    >>> small = dict(policy="prefix", clients=20, active=4, rounds=1, epochs=1)
    >>> experiments = [Experiment(**small, seed=seed) for seed in range(2)]
    >>> [len(run.metrics) for run in sweep(experiments)]
    [1, 1]
    """
    for experiment in experiments:
        check_data_is_local(experiment)
    machine = (machine or Machine()).resolved()
    processes = choose_num_processes(experiments, machine, data)
    if processes == 1:
        yield from run_in_lockstep(experiments, runs, machine, data, watch)
        return
    threads = machine.threads or max(1, torch.get_num_threads() // processes)
    machine = replace(machine, processes=1, threads=threads)
    yield from sweep_in_processes(experiments, processes, runs, machine, data, watch)


def choose_num_processes(
    experiments: Sequence[Experiment], machine: Machine, data: str | Path | None = None
) -> int:
    """Return how many processes a sweep uses: as requested, or for `auto` the fastest number.

    There are never more processes than runs.
    """
    if isinstance(machine.processes, int):
        return max(1, min(machine.processes, len(experiments)))
    device_kind = machine.device.partition(":")[0]
    epochs = sum(e.rounds * e.active * e.epochs for e in experiments)
    if epochs < MIN_EPOCHS_FOR_PROCESSES[device_kind]:
        return 1
    if machine.device == "cpu":
        return min(physical_cores(), len(experiments))
    # one process fills a GPU if steps are large, and sharing it needs NVIDIA's server
    if _all_have_small_steps(experiments, data) and which(MPS):
        return min(physical_cores(), PROCESSES_PER_GPU, len(experiments))
    return 1


def _all_have_small_steps(experiments: Sequence[Experiment], data: str | Path | None) -> bool:
    experiment_by_key = {lockstep_key(experiment): experiment for experiment in experiments}
    return all(
        prepare_workload(experiment, "cpu", data=data).has_small_steps()
        for experiment in experiment_by_key.values()
    )


# ── the experiments of a sweep ──────────────────────────────────────────────────────────────────


def expand_choices(experiment: Experiment, choices: Choices, seeds: int) -> list[Experiment]:
    """Return every combination of choices with every seed, each under its own name.

    >>> [e.name for e in expand_choices(Experiment(name="try"), {"lr": [0.1, 0.01]}, seeds=1)]
    ['try-lr-0.1-seed-0', 'try-lr-0.01-seed-0']
    >>> choices = {("policy", "norm"): [("prefix", "batch"), ("rolling", "group")]}
    >>> [(e.policy, e.norm) for e in expand_choices(Experiment(), choices, seeds=1)]
    [('prefix', 'batch'), ('rolling', 'group')]
    """
    if seeds < 1:
        raise InvalidValue(f"seeds must be at least 1; got {seeds}")
    base_fields = experiment.model_dump(exclude_unset=True)
    changes_by_choice = [_changes_of_choice(keys, values) for keys, values in choices.items()]
    experiments = []
    for combination in product(*changes_by_choice):
        changes = {field: value for part in combination for field, value in part.items()}
        setting = _setting_name(experiment.name, changes)
        for seed in range(experiment.seed, experiment.seed + seeds):
            own_fields = {**changes, "seed": seed, "name": f"{setting}-seed-{seed}"}
            experiments.append(Experiment(**presets.apply_changes(base_fields, own_fields)))
    return experiments


def _changes_of_choice(keys: str | tuple[str, ...], values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the changed fields for each value of a choice."""
    fields = (keys,) if isinstance(keys, str) else keys
    for field in {"seed", "name"} & set(fields):
        raise InvalidValue(
            f"vary must not be of {field}: seeds are varied by seeds, names are made from the rest"
        )
    tuples = [(value,) for value in values] if isinstance(keys, str) else values
    if len({str(value) for value in values}) < len(values):
        shown = " | ".join(", ".join(map(str, value)) for value in tuples)
        raise InvalidValue(f"vary must name each value of {', '.join(fields)} once; got {shown}")
    return [dict(zip(fields, value, strict=True)) for value in tuples]


def _setting_name(name: str, changes: Mapping[str, object]) -> str:
    """Return the name of a setting; a name that is too long ends in a digest of the rest."""
    text = "-".join([name, *(f"{field}-{value}" for field, value in changes.items())])
    plain = "".join(c if c.isalnum() or c in "-._" else "_" for c in text)
    if len(plain) <= LONGEST_SETTING:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{plain[: LONGEST_SETTING - 9]}-{digest}"
