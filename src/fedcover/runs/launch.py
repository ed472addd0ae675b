"""The processes of a run: started here, or by torchrun on one machine or several; they come, work and go together.

The first process reads, prints and writes. It tells the others what is run and from which state; they prepare the same
from their own copy of the data, and take part in the rounds.
"""

import io
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch exports it without saying so

from fedcover.errors import FedcoverError, InvalidValue, RunError
from fedcover.host import scratch, signals
from fedcover.host.orphans import lifeline_arguments
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.collectives import ProcessGroup
from fedcover.server.round import run_round
from fedcover.server.round_setup import Setup
from fedcover.server.sharded_round import shard_setup, without_values
from fedcover.types import State

PATIENCE = timedelta(days=1)
"""How long a process waits for the others: a share of a round may take hours."""

_PLACE = "FEDCOVER_PROCESS"
"""Where a process that is started here learns its place: rank, size and the folder in which all meet."""


@dataclass(frozen=True)
class WorkerJob:
    """What the first process tells the others beside the state: all that they need to take part until some round."""

    experiment: Experiment
    machine: Machine
    data: str | Path | None
    overrides: Overrides
    until: int


def torchrun_rank() -> int | None:
    """This process's rank if torchrun has started it."""
    return (
        int(os.environ["RANK"])
        if {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys()
        else None
    )


def torchrun_size() -> int:
    """How many processes torchrun has started; 1 without it."""
    return 1 if torchrun_rank() is None else int(os.environ["WORLD_SIZE"])


def limit_processes(machine: Machine, setup: Setup) -> Machine:
    """The same with at most one process for each client of a round: others would only start and wait.

    What torchrun has started is started.
    """
    asked = int(machine.processes)
    if asked <= setup.active or torchrun_size() > 1:
        return machine
    logging.getLogger("fedcover").warning(
        "processes: %d, as a round has no more clients; %d were asked for", setup.active, asked
    )
    return replace(machine, processes=setup.active)


@contextmanager
def launch_workers(job: WorkerJob, setup: Setup, state: State) -> Iterator[Setup]:
    """The setup whose rounds, from a state on, other processes share: torchrun's, or those that are started here."""
    size = int(job.machine.processes)
    if size == 1:
        del state  # the rounds take long, and what is named here is kept until they end
        yield setup
        return
    if torchrun_rank() and size == torchrun_size():
        raise InvalidValue(
            "processes: under torchrun, use 'python -m fedcover run'; its first process leads the others"
        )
    message = (importable(), job.machine.device, _packed(job, state))
    with (
        _start_workers(size) if torchrun_size() != size else _torchrun() as store,
        join_process_group(0, size, store) as ranks,
    ):
        ranks.broadcast(message)
        del message, state  # as above, and both are as large as the model
        ranks.all_gather(lambda: None)  # until all are ready
        yield shard_setup(setup, ranks)


def _packed(job: WorkerJob, state: State) -> bytes:
    content = io.BytesIO()
    try:
        torch.save((job, state), content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidValue(_unknown_there(error)) from error
    return content.getvalue()


def importable() -> list[str]:
    """The folders in which this process looks for modules, the user's own among them."""
    return [str(Path(entry).resolve()) for entry in sys.path]


def _unknown_there(error: Exception) -> str:
    return (
        "processes: what is made in Python reaches other processes only if it lies in a module that they can import "
        f"(no lambda, nothing of the script itself): {error}"
    )


# ── starting, meeting and parting ───────────────────────────────────────────────────────────────────────


@contextmanager
def _start_workers(size: int) -> Iterator[FileStore | None]:
    """Start all processes but the first, which is this one; they end with it."""
    with scratch.folder("run") as folder, ExitStack() as ending:
        store = FileStore(f"{folder}/store", size)
        children = []
        for rank in range(1, size):
            child = subprocess.Popen(
                worker_command("fedcover.runs.launch"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                **lifeline_arguments(
                    {**worker_environment(os.environ), _PLACE: f"{rank} {size} {folder}"}
                ),
            )
            ending.push(
                lambda kind, error, trace, child=child: stop_process(child, done=kind is None)
            )
            children.append(child)
        while not store.check([f"here/{rank}" for rank in range(1, size)]):
            if any(child.poll() is not None for child in children):
                raise RunError("a process of this run could not be started; try --processes 1")
            time.sleep(0.02)
        # all are on this machine, so they listen to nobody else
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        yield store


def worker_command(module: str) -> list[str]:
    """The command of a process that calls a module's `main` and ends with this process; see `orphans.tied`."""
    first = (
        "from fedcover.host import orphans, signals; orphans.end_with_parent(); signals.quietly()"
    )
    return [sys.executable, "-c", f"{first}; from {module} import main; main()"]


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to import this very fedcover."""
    home = str(Path(__file__).parents[2])
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([home, *filter(None, [environment.get("PYTHONPATH")])]),
    }


_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def stop_process(child: subprocess.Popen[Any], done: bool) -> None:
    """Let a process end by itself if its work is done; else, and if it lingers, insist."""
    for insist, patience in ((child.terminate, 20 if done else 0), (child.kill, 5)):
        try:
            child.wait(timeout=patience)
            return
        except subprocess.TimeoutExpired:
            insist()
    child.wait()


@contextmanager
def _torchrun() -> Iterator[FileStore | None]:
    """Nothing to start: torchrun's processes know from their environment where to meet."""
    yield None


@contextmanager
def join_process_group(rank: int, size: int, store: FileStore | None) -> Iterator[ProcessGroup]:
    """Meet the other processes, and part from them at the end, however it comes."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nccl = (
        torch.cuda.is_available()
        and dist.is_nccl_available()
        and beside <= torch.cuda.device_count()
    )
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    place: dict[str, Any] = (
        {} if store is None else {"store": store, "rank": rank, "world_size": size}
    )
    try:
        dist.init_process_group(backend, timeout=PATIENCE, **place)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the {size} processes of this run cannot reach each other: {error}"
        ) from error
    try:
        yield ProcessGroup(rank, size)
    finally:
        dist.destroy_process_group()


# ── all processes but the first ─────────────────────────────────────────────────────────────────────────


def run_worker(ranks: ProcessGroup) -> None:
    """Hear what is run, prepare it, and share its rounds."""
    job, setup, state = _prepared(ranks)
    with job.machine.applied():
        while state.round < job.until:
            state, _ = run_round(setup, state)


def _prepared(ranks: ProcessGroup) -> tuple[WorkerJob, Setup, State]:
    """What is run and from which state: of the model no more than one copy, in the state."""
    folders, device, content = ranks.broadcast(([""], "", b""))
    ready: list[tuple[WorkerJob, Setup, State]] = []

    def get_ready() -> None:
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        devices = {}
        if (
            device == "cuda"
        ):  # every process of a machine takes a device of its own, as far as there are
            own = int(os.environ.get("LOCAL_RANK", ranks.rank)) % torch.cuda.device_count()
            torch.cuda.set_device(own)
            devices = {"cuda:0": f"cuda:{own}"}
        job, state = _unpacked(content, devices)
        with job.machine.applied():
            setup = prepare(job.experiment, job.machine, data=job.data, overrides=job.overrides)
        ready.append(
            (replace(job, overrides=Overrides()), without_values(shard_setup(setup, ranks)), state)
        )

    ranks.all_gather(get_ready)
    return ready[0]


def _unpacked(content: bytes, devices: dict[str, str]) -> tuple[WorkerJob, State]:
    try:  # any object may be in it: it comes from the first process of this very run
        told: tuple[WorkerJob, State] = torch.load(
            io.BytesIO(content), map_location=devices, weights_only=False
        )
    except (AttributeError, ImportError) as error:
        raise InvalidValue(_unknown_there(error)) from error
    return told


def main() -> None:
    """Be one of the other processes; what goes wrong is said by the first, or, if it cannot know, in one line here."""
    logging.getLogger("fedcover").setLevel(logging.ERROR)  # the first process logs the same
    rank, size, store = torchrun_rank() or 0, torchrun_size(), None
    if _PLACE in os.environ:
        place, number, folder = os.environ[_PLACE].split(" ", 2)
        rank, size = int(place), int(number)
        store = FileStore(f"{folder}/store", size)
        store.set(f"here/{rank}", "yes")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    code = 0
    try:
        with signals.raise_on_signals(), join_process_group(rank, size, store) as ranks:
            run_worker(ranks)
    except KeyboardInterrupt as error:
        code = signals.exit_code(error) or 1
    except FedcoverError:
        code = 1
    except Exception as error:
        print(
            f"fedcover: process {rank + 1} of {size}: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # nothing is left to save, and threads of the network may not survive an orderly exit
