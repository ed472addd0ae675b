"""Divide a sweep among worker processes.

Each worker reads its task as one JSON text from its standard input, and writes one JSON line for
every event to its standard output:

    {"report": [index, round, metrics]}              a round has finished
    {"finished": [index, metrics, diverged, engine]} a run has ended
    {"error": [class, message]}                      the worker has failed

The parent adds {"ended": true} when a worker has exited normally. An index is the position of an
experiment in the sweep.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedcover import errors
from fedcover.errors import FedcoverError, RunError
from fedcover.host import signals
from fedcover.host.orphans import lifeline_arguments
from fedcover.runs.experiment import Experiment
from fedcover.runs.launch import importable, stop_process, worker_command, worker_environment
from fedcover.runs.lockstep import FinishedRun, SweepCallback, lockstep_key, run_in_lockstep
from fedcover.runs.machine import Machine
from fedcover.runs.mps import mps_environment
from fedcover.server.round import RoundReport

Event = dict[str, Any]
"""A JSON line from a worker, as described above."""


def sweep_in_processes(
    experiments: Sequence[Experiment],
    processes: int,
    runs: Path | None,
    machine: Machine,
    data: str | Path | None,
    watch: SweepCallback | None,
) -> Iterator[FinishedRun]:
    """Run experiments in several processes and yield each when it ends."""
    events: SimpleQueue[Event] = SimpleQueue()
    with ExitStack() as workers:
        environment: Mapping[str, str] = os.environ
        if machine.device.startswith("cuda"):
            environment = workers.enter_context(mps_environment(processes))
        for rank, indices in enumerate(assign_to_processes(experiments, processes)):
            task = {
                "path": importable(),
                "rank": rank,
                "indices": indices,
                "machine": asdict(machine),
                "experiments": [experiments[i].model_dump(mode="json") for i in indices],
                "runs": None if runs is None else str(runs),
                "data": None if data is None else str(data),
            }
            _start_worker(json.dumps(task), environment, events, workers)
        remaining = processes
        while remaining:
            event = events.get()
            if "error" in event:
                class_name, message = event["error"]
                raise getattr(errors, class_name, RunError)(message)
            if "report" in event and watch:
                index, round, metrics = event["report"]
                watch(experiments[index], RoundReport(round, metrics))
            if "finished" in event:
                index, *outcome = event["finished"]
                yield FinishedRun(experiments[index], *outcome)
            if "ended" in event:
                remaining -= 1


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


def _start_worker(
    task: str,
    environment: Mapping[str, str],
    events: "SimpleQueue[Event]",
    workers: ExitStack,
) -> None:
    """Start a worker that puts its events into a queue; closing `workers` stops it."""
    child = subprocess.Popen(
        worker_command("fedcover.runs.sweep_workers", "sweep_worker_main"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **lifeline_arguments(worker_environment(environment)),
    )
    workers.push(lambda kind, error, trace: stop_process(child, done=kind is None))
    arguments = (child, task, events)
    threading.Thread(target=_relay_events, args=arguments, daemon=True).start()


def _relay_events(child: "subprocess.Popen[str]", task: str, events: "SimpleQueue[Event]") -> None:
    """Send a worker its task, and put its events into a queue until it exits."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            child.stdin.write(task)
    except BrokenPipeError:
        pass  # the exit code below reports that the worker has died
    with child.stdout:
        for line in child.stdout:
            if line.endswith("\n"):  # a killed worker may have written half a line
                events.put(json.loads(line))
    code = child.wait()
    if code == 0:
        events.put({"ended": True})
    else:
        events.put({"error": ["RunError", f"a process of the sweep ended with {code}"]})


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────


def sweep_worker_main() -> None:
    """Run one worker's share of a sweep and write its events."""
    event_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints must not get between the events

    def emit(**event: Any) -> None:
        event_stream.write(json.dumps(event) + "\n")
        event_stream.flush()

    task = json.loads(sys.stdin.read())
    sys.path.extend(folder for folder in task["path"] if folder not in sys.path)
    if task["rank"]:
        logging.getLogger("fedcover").setLevel(logging.ERROR)  # the first worker logs the same
    try:
        with signals.raise_on_signals():
            _run_share(task, emit)
    except KeyboardInterrupt as error:
        sys.exit(signals.exit_code(error))
    except FedcoverError as error:
        emit(error=[type(error).__name__, str(error)])
        sys.exit(1)


def _run_share(task: dict[str, Any], emit: Callable[..., None]) -> None:
    """Run the experiments of a task in lockstep."""
    experiments = [Experiment(**fields) for fields in task["experiments"]]
    pairs = zip(experiments, task["indices"], strict=True)
    # by identity: two experiments of a sweep may be equal
    index_by_experiment = {id(experiment): index for experiment, index in pairs}
    runs = None if task["runs"] is None else Path(task["runs"])
    machine = Machine(**task["machine"])

    def watch(experiment: Experiment, report: RoundReport) -> None:
        index = index_by_experiment[id(experiment)]
        emit(report=[index, report.round, report.metrics])

    for run in run_in_lockstep(experiments, runs, machine, task["data"], watch):
        index = index_by_experiment[id(run.experiment)]
        emit(finished=[index, run.metrics, run.diverged, run.engine])
