"""Divide a sweep among worker processes.

Each worker runs its share of the experiments in lockstep, and reports two kinds of events:

    {"round": [index, round, metrics]}                   a round has finished
    {"finished": [index, metrics, diverged, engine]}     a run has ended

An index is the position of an experiment in the sweep.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcover.host.workers import Report, start_workers
from fedcover.runs.experiment import Experiment
from fedcover.runs.lockstep import FinishedRun, SweepCallback, lockstep_key, run_in_lockstep
from fedcover.runs.machine import Machine
from fedcover.runs.mps import mps_environment
from fedcover.server.round import RoundReport


def sweep_in_processes(
    experiments: Sequence[Experiment],
    processes: int,
    runs: Path | None,
    machine: Machine,
    data: str | Path | None,
    watch: SweepCallback | None,
) -> Iterator[FinishedRun]:
    """Run experiments in several processes and yield each when it ends."""
    common = {
        "machine": asdict(machine),
        "runs": None if runs is None else str(runs),
        "data": None if data is None else str(data),
    }
    shares = [
        {
            **common,
            "indices": indices,
            "experiments": [experiments[i].model_dump(mode="json") for i in indices],
            "logs": rank == 0,  # the others would log the same
        }
        for rank, indices in enumerate(assign_to_processes(experiments, processes))
    ]
    function = "fedcover.runs.sweep_workers:run_share"
    with ExitStack() as stack:
        environment: Mapping[str, str] = os.environ
        if machine.device.startswith("cuda"):
            environment = stack.enter_context(mps_environment(processes))
        workers = stack.enter_context(
            start_workers(function, shares, name="a process of the sweep", environment=environment)
        )
        for event in workers.reports():
            match event:
                case {"round": [index, round, metrics]}:
                    if watch:
                        watch(experiments[index], RoundReport(round, metrics))
                case {"finished": [index, *outcome]}:
                    yield FinishedRun(experiments[index], *outcome)


def assign_to_processes(experiments: Sequence[Experiment], processes: int) -> list[list[int]]:
    """Return the indices of the experiments of each process.

    Experiments that can run in lockstep are divided evenly among all processes.

    >>> experiments = [Experiment(model=model) for model in ("mlp", "cnn", "mlp", "cnn")]
    >>> assign_to_processes(experiments, 2)
    [[0, 1], [2, 3]]
    """
    keys = [lockstep_key(experiment) for experiment in experiments]
    families = list(dict.fromkeys(keys))
    by_family = sorted(range(len(experiments)), key=lambda index: families.index(keys[index]))
    return [by_family[first::processes] for first in range(processes)]


def run_share(share: Mapping[str, Any], report: Report) -> None:
    """Run the experiments of one worker, and report their events."""
    if not share["logs"]:
        logging.getLogger("fedcover").setLevel(logging.ERROR)
    experiments = [Experiment(**fields) for fields in share["experiments"]]
    pairs = zip(experiments, share["indices"], strict=True)
    # by identity: two experiments of a sweep may be equal
    index_by_experiment = {id(experiment): index for experiment, index in pairs}
    runs = None if share["runs"] is None else Path(share["runs"])
    machine = Machine(**share["machine"])

    def watch(experiment: Experiment, round_report: RoundReport) -> None:
        index = index_by_experiment[id(experiment)]
        report({"round": [index, round_report.round, round_report.metrics]})

    for run in run_in_lockstep(experiments, runs, machine, share["data"], watch):
        index = index_by_experiment[id(run.experiment)]
        report({"finished": [index, run.metrics, run.diverged, run.engine]})
