"""Worker processes: each calls one of our functions with a job, and reports back.

    def add(job, report):                                         # in the module fedcover.sums
        report(job["left"] + job["right"])

    with start_workers("fedcover.sums:add", jobs) as workers:     # one worker for each job
        for result in workers.reports():
            ...

Jobs and reports are JSON values. A job goes through the worker's standard input; every report is a
line of its standard output. What else a worker prints goes to standard error.

A worker is a new Python process, never a fork, so it may use CUDA and threads. It ends when this
process does, however that ends, and a signal stops it without output. An error of a worker is
raised here; when the block ends with an error, all workers are stopped.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from fedcover.errors import FedcoverError, RunError, error_named
from fedcover.host import orphans, signals

Report = Callable[[Any], None]
"""Sends a JSON value to the process that has started the worker."""

END_TIMEOUT, STOP_TIMEOUT = 20, 5
"""Seconds that a worker has to end by itself, and after it was asked to stop."""


@dataclass(frozen=True)
class Workers:
    """Running workers, and what they say.

    Attributes:
        name: What an error calls one of them.
        processes: The processes, in the order of their jobs.
        messages: One dict for each report, error and exit.
    """

    name: str
    processes: Sequence["subprocess.Popen[str]"]
    messages: "SimpleQueue[dict[str, Any]]"

    def reports(self) -> Iterator[Any]:
        """Yield what the workers report, until all have ended.

        Raises:
            FedcoverError: If a worker fails; `RunError` if it ends in another way.
        """
        num_running = len(self.processes)
        while num_running:
            match self.messages.get():
                case {"report": value}:
                    yield value
                case {"error": [class_name, text]}:
                    raise error_named(class_name, text)
                case {"exit": 0}:
                    num_running -= 1
                case {"exit": code}:
                    raise RunError(f"{self.name} ended with {code}")


@contextmanager
def start_workers(
    function: str,
    jobs: Sequence[Any],
    *,
    name: str = "a worker process",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Workers]:
    """Start a worker for each job; wait at the end of the block until all have ended.

    Args:
        function: What a worker calls with its job and a `Report`, as "package.module:function".
        jobs: The jobs, as JSON values.
        name: What errors call a worker.
        environment: The environment variables of the workers; this process's own by default.

    Yields:
        The workers.
    """
    processes: list[subprocess.Popen[str]] = []
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    is_done = False
    try:
        for job in jobs:
            process = _start_process(function, os.environ if environment is None else environment)
            processes.append(process)
            order = json.dumps({"path": importable(), "job": job})
            arguments = (process, order, messages)
            threading.Thread(target=_relay, args=arguments, daemon=True).start()
        yield Workers(name, processes, messages)
        is_done = True
    finally:
        _end_processes(processes, is_done)


def importable() -> list[str]:
    """Return the folders in which this process looks for modules, the user's own included."""
    return [str(Path(entry).resolve()) for entry in sys.path]


def import_from(folders: Sequence[str]) -> None:
    """Let this process look for modules in more folders, those of another process."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def _start_process(function: str, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    program = f"from fedcover.host import workers; workers.run_worker({function!r})"
    python_path = [str(Path(__file__).parents[2])]  # the worker has to import this very fedcover
    if environment.get("PYTHONPATH"):
        python_path.append(environment["PYTHONPATH"])
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **orphans.lifeline_arguments({**environment, "PYTHONPATH": os.pathsep.join(python_path)}),
    )


def _relay(
    process: "subprocess.Popen[str]", order: str, messages: "SimpleQueue[dict[str, Any]]"
) -> None:
    """Send a worker its job, and put its messages into a queue until it exits."""
    assert process.stdin is not None
    assert process.stdout is not None
    # a worker that has died reads nothing; its exit code says so below
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(order)
    with process.stdout:
        for line in process.stdout:
            if line.endswith("\n"):  # a killed worker may have written half a line
                messages.put(json.loads(line))
    messages.put({"exit": process.wait()})


def _end_processes(processes: Sequence["subprocess.Popen[str]"], is_done: bool) -> None:
    """Wait for processes whose work is done; ask the others to stop, and kill who does not."""
    if is_done:
        _wait(processes, END_TIMEOUT)
    for process in processes:
        process.terminate()  # does nothing to a process that has ended
    _wait(processes, STOP_TIMEOUT)
    for process in processes:
        process.kill()
        process.wait()


def _wait(processes: Sequence["subprocess.Popen[str]"], seconds: float) -> None:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────


def run_worker(function: str) -> None:
    """Do the job of this process, from start to exit."""
    orphans.end_with_parent()
    signals.exit_quietly_on_signals()
    message_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints must not get between the messages

    def send(**message: Any) -> None:
        message_stream.write(json.dumps(message) + "\n")
        message_stream.flush()

    order = json.loads(sys.stdin.read())
    import_from(order["path"])
    work = resolve_name(function)
    try:
        with signals.raise_on_signals():
            work(order["job"], lambda value: send(report=value))
    except KeyboardInterrupt as error:
        sys.exit(signals.exit_code(error))
    except FedcoverError as error:
        send(error=[type(error).__name__, str(error)])
        sys.exit(1)
