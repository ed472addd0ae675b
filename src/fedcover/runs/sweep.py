"""Settings x seeds: many runs, in lockstep, dealt out to several processes where that is faster.

The processes speak in lines of JSON: what is to be run goes in, reports of rounds and finished runs come out.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from shutil import which
from typing import Any

import torch

from fedcover import errors
from fedcover.errors import FedcoverError, InvalidValue, RunError
from fedcover.host import signals
from fedcover.host.orphans import lifeline_arguments
from fedcover.runs import presets
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.experiment import Experiment
from fedcover.runs.launch import importable, stop_process, worker_command, worker_environment
from fedcover.runs.lockstep import Finished, SweepCallback, lockstep_key, run_in_lockstep
from fedcover.runs.machine import Machine, has_small_steps, physical_cores
from fedcover.runs.mps import MPS, mps_environment
from fedcover.runs.setup import prepare
from fedcover.server.round import RoundReport

MIN_EPOCHS_FOR_PROCESSES = {"cpu": 2_000, "cuda": 100_000}
"""Epochs of all clients of all runs from which on several processes save more than their start takes."""

PROCESSES_PER_GPU = 8
"""Processes that share a GPU where steps are small: while some choose, average and measure, others train."""

Choices = Mapping[str | tuple[str, ...], Sequence[Any]]
"""Values of a field, or of several fields that change together: then a value is one of each."""

LONGEST_SETTING = 80
"""Characters of a setting's name: with a seed it must be a name of a run."""


def expand_choices(experiment: Experiment, choices: Choices, seeds: int) -> list[Experiment]:
    """Every combination of choices with every seed, each under a name of its own.

    >>> [e.name for e in expand_choices(Experiment(name="try"), {"lr": [0.1, 0.01]}, seeds=1)]
    ['try-lr-0.1-seed-0', 'try-lr-0.01-seed-0']
    >>> lifeline_arguments = {("policy", "norm"): [("prefix", "batch"), ("rolling", "group")]}
    >>> [(e.policy, e.norm) for e in expand_choices(Experiment(), lifeline_arguments, seeds=1)]
    [('prefix', 'batch'), ('rolling', 'group')]
    """
    if seeds < 1:
        raise InvalidValue(f"seeds must be at least 1; got {seeds}")
    settings = [_settings_of(keys, values) for keys, values in choices.items()]
    made = []
    for chosen in product(*settings):
        changes = {key: value for setting in chosen for key, value in setting.items()}
        for seed in range(experiment.seed, experiment.seed + seeds):
            name = f"{_setting(experiment.name, changes)}-seed-{seed}"
            given = experiment.model_dump(exclude_unset=True)
            made.append(
                Experiment(**presets.apply_changes(given, {**changes, "seed": seed, "name": name}))
            )
    return made


def _settings_of(keys: str | tuple[str, ...], values: Sequence[Any]) -> list[dict[str, Any]]:
    """What each value of a choice changes, if the choice is one that a sweep can have."""
    fields = (keys,) if isinstance(keys, str) else keys
    for key in {"seed", "name"} & set(fields):
        raise InvalidValue(
            f"vary must not be of {key}: seeds are varied by seeds, names are made from the rest"
        )
    if len({str(value) for value in values}) < len(values):
        shown = " | ".join(
            str(value) if isinstance(keys, str) else ", ".join(map(str, value)) for value in values
        )
        raise InvalidValue(f"vary must name each value of {', '.join(fields)} once; got {shown}")
    return [
        dict(zip(fields, (value,) if isinstance(keys, str) else value, strict=True))
        for value in values
    ]


def _setting(name: str, changes: Mapping[str, object]) -> str:
    """The name of a setting; where it would be too long for one, its end is a digest of the rest."""
    text = "-".join([name, *(f"{key}-{value}" for key, value in changes.items())])
    plain = "".join(c if c.isalnum() or c in "-._" else "_" for c in text)
    if len(plain) <= LONGEST_SETTING:
        return plain
    return f"{plain[: LONGEST_SETTING - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sweep(
    experiments: Sequence[Experiment],
    runs: Path | None = None,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    watch: SweepCallback | None = None,
) -> Iterator[Finished]:
    """Run experiments, as many at once as pay, and hand each over as it ends; with `runs`, each into its folder there.

    A sweep that was stopped goes on where it was: finished folders are handed over as they are.

    >>> few = dict(policy="prefix", clients=20, active=4, rounds=1, epochs=1)
    >>> [len(run.metrics) for run in sweep([Experiment(**few, seed=seed) for seed in range(2)])]
    [1, 1]
    """
    for experiment in experiments:
        check_data_is_local(experiment)
    chosen = (machine or Machine()).resolved()
    size = choose_num_processes(experiments, chosen, data)
    if size == 1:
        yield from run_in_lockstep(experiments, runs, chosen, data, watch)
    else:
        threads = chosen.threads or max(1, torch.get_num_threads() // size)
        yield from _sweep_in_processes(
            experiments, size, runs, replace(chosen, processes=1, threads=threads), data, watch
        )


def choose_num_processes(
    experiments: Sequence[Experiment], machine: Machine, data: str | Path | None = None
) -> int:
    """Among how many processes a sweep is dealt out: as many as asked for, or as pay, but no more than runs."""
    if isinstance(machine.processes, int):
        return max(1, min(machine.processes, len(experiments)))
    kind = machine.device.partition(":")[0]
    if sum(e.rounds * e.active * e.epochs for e in experiments) < MIN_EPOCHS_FOR_PROCESSES[kind]:
        return 1
    if machine.device == "cpu":
        return min(physical_cores(), len(experiments))
    # one process fills a GPU if steps are large, and cannot share it well without NVIDIA's server
    here = Machine(device="cpu").resolved()
    small = all(
        has_small_steps(prepare(e, here, data=data))
        for e in {lockstep_key(e): e for e in experiments}.values()
    )
    return min(physical_cores(), PROCESSES_PER_GPU, len(experiments)) if small and which(MPS) else 1


def assign_to_processes(experiments: Sequence[Experiment], size: int) -> list[list[int]]:
    """The places of the experiments that each process gets: of every family about as many.

    >>> assign_to_processes([Experiment(model=model) for model in ("mlp", "cnn", "mlp", "cnn")], 2)
    [[0, 1], [2, 3]]
    """
    families = list(dict.fromkeys(lockstep_key(e) for e in experiments))
    order = sorted(
        range(len(experiments)), key=lambda place: families.index(lockstep_key(experiments[place]))
    )
    return [order[first::size] for first in range(size)]


def _sweep_in_processes(
    experiments: Sequence[Experiment],
    size: int,
    runs: Path | None,
    machine: Machine,
    data: str | Path | None,
    watch: SweepCallback | None,
) -> Iterator[Finished]:
    said: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with ExitStack() as ending:
        environment = (
            ending.enter_context(mps_environment(size))
            if machine.device.startswith("cuda")
            else os.environ
        )
        for rank, places in enumerate(assign_to_processes(experiments, size)):
            task = {
                "path": importable(), "rank": rank, "places": places, "machine": asdict(machine),
                "experiments": [experiments[place].model_dump(mode="json") for place in places],
                "runs": None if runs is None else str(runs), "data": None if data is None else str(data),
            }  # fmt: skip
            _start(json.dumps(task), environment, said, ending)
        left = size
        while left:
            heard = said.get()
            if "error" in heard:
                kind, text = heard["error"]
                raise getattr(errors, kind, RunError)(text)
            if "report" in heard and watch:
                place, round, metrics = heard["report"]
                watch(experiments[place], RoundReport(round, metrics))
            if "finished" in heard:
                place, *outcome = heard["finished"]
                yield Finished(experiments[place], *outcome)
            left -= "ended" in heard


def _start(
    task: str,
    environment: Mapping[str, str],
    said: "SimpleQueue[dict[str, Any]]",
    ending: ExitStack,
) -> None:
    """Start a process that runs its share; it ends with this one, and what it says is put into a queue."""
    child = subprocess.Popen(
        worker_command("fedcover.runs.sweep"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        **lifeline_arguments(worker_environment(environment)),
    )  # fmt: skip
    ending.push(lambda kind, error, trace: stop_process(child, done=kind is None))

    def listen() -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with child.stdin:
                child.stdin.write(task)
        except BrokenPipeError:
            pass  # its end is noticed below
        with child.stdout:
            for line in child.stdout:
                if line.endswith("\n"):  # who is killed may have said half a line
                    said.put(json.loads(line))
        code = child.wait()
        said.put(
            {"ended": True}
            if code == 0
            else {"error": ["RunError", f"a process of the sweep ended with {code}"]}
        )

    threading.Thread(target=listen, daemon=True).start()


# ── in such a process ───────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run a share of a sweep and say what comes of it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a module prints must not come between the lines

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    task = json.loads(sys.stdin.read())
    sys.path.extend(folder for folder in task["path"] if folder not in sys.path)
    if task["rank"]:
        logging.getLogger("fedcover").setLevel(logging.ERROR)  # the first process says the same
    try:
        with signals.raise_on_signals():
            _run_share(task, say)
    except KeyboardInterrupt as error:
        sys.exit(signals.exit_code(error))
    except FedcoverError as error:
        say(error=[type(error).__name__, str(error)])
        sys.exit(1)


def _run_share(task: dict[str, Any], say: Callable[..., None]) -> None:
    experiments = [Experiment(**known) for known in task["experiments"]]
    place_of = {id(e): place for e, place in zip(experiments, task["places"], strict=True)}
    runs = None if task["runs"] is None else Path(task["runs"])

    def watch(experiment: Experiment, report: RoundReport) -> None:
        say(report=[place_of[id(experiment)], report.round, report.metrics])

    for run in run_in_lockstep(experiments, runs, Machine(**task["machine"]), task["data"], watch):
        say(finished=[place_of[id(run.experiment)], run.metrics, run.diverged, run.engine])
