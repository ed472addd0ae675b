"""Start the processes of a run, or join those that torchrun has started.

The first process reads, prints and writes. It sends the others the experiment and the state. They
prepare the same setup from their own copy of the data, and then take part in every round.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not declare it

from fedcover.errors import InvalidValue, RunError
from fedcover.host import scratch
from fedcover.host.workers import importable, start_workers
from fedcover.log import log
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides
from fedcover.server.collectives import ProcessGroup
from fedcover.server.round_setup import Setup
from fedcover.server.sharded_round import shard_setup
from fedcover.types import State

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""How long a process waits for the others: its share of a round may take hours."""

WORKER_FUNCTION = "fedcover.runs.worker:join_run"
"""What a started worker calls with its rank, the number of processes, and where they meet."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class WorkerJob:
    """What a worker needs, besides the state, to take part until the round `until`."""

    experiment: Experiment
    machine: Machine
    data: str | Path | None
    overrides: Overrides
    until: int


def torchrun_rank() -> int | None:
    """Return this process's rank if torchrun has started it."""
    if {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():
        return int(os.environ["RANK"])
    return None


def torchrun_size() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return 1 if torchrun_rank() is None else int(os.environ["WORLD_SIZE"])


def limit_processes(machine: Machine, active: int) -> Machine:
    """Return the machine with at most one process for each of the `active` clients of a round.

    More would have nothing to do. The processes of torchrun are already running, so their number
    stays.
    """
    requested = int(machine.processes)
    if requested <= active or torchrun_size() > 1:
        return machine
    log.warning(
        "processes: %d, as a round has no more clients; %d were asked for", active, requested
    )
    return replace(machine, processes=active)


@contextmanager
def launch_workers(job: WorkerJob, setup: Setup, state: State) -> Iterator[Setup]:
    """Share the rounds from a state on with other processes, those of torchrun or new ones.

    Yields:
        The setup to run the rounds with; for one process, the same setup.
    """
    size = int(job.machine.processes)
    if size == 1:
        del state  # a reference here would keep the state in memory until the last round
        yield setup
        return
    if torchrun_rank() and size == torchrun_size():
        raise InvalidValue(
            "processes: under torchrun, use 'python -m fedcover run'; "
            "its first process leads the others"
        )
    message = (importable(), job.machine.device, _serialize(job, state))
    rendezvous = _torchrun_rendezvous() if torchrun_size() == size else _start_workers(size)
    with rendezvous as store, join_process_group(0, size, store) as group:
        group.broadcast(message)
        del message, state  # as above; both are as large as the model
        group.all_gather(lambda: None)  # wait until all are ready
        yield shard_setup(setup, group)


def _serialize(job: WorkerJob, state: State) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save((job, state), buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidValue(not_importable_message(error)) from error
    return buffer.getvalue()


def not_importable_message(error: Exception) -> str:
    """Explain why an object made in Python cannot be sent to a worker."""
    return (
        "processes: what is made in Python reaches other processes only if it lies in a module "
        f"that they can import (no lambda, nothing of the script itself): {error}"
    )


# ── starting and joining ────────────────────────────────────────────────────────────────────────


@contextmanager
def _start_workers(size: int) -> Iterator[FileStore | None]:
    """Start all processes except this one, the first; yield the store where they meet."""
    with scratch.folder("run") as folder:
        jobs = [{"rank": rank, "size": size, "folder": str(folder)} for rank in range(1, size)]
        with start_workers(WORKER_FUNCTION, jobs, name="a process of this run") as workers:
            reports = workers.reports()
            try:
                for _ in jobs:  # each reports once, when it has started
                    next(reports)
            except RunError as error:
                raise RunError(f"{error} before its work began; try --processes 1") from error
            listen_locally()
            yield open_store(folder, size)


def open_store(folder: str | Path, size: int) -> FileStore:
    """Open the store in which the processes of a run meet."""
    return FileStore(f"{folder}/store", size)


def listen_locally() -> None:
    """Let gloo listen on the loopback interface only: all workers are on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


@contextmanager
def _torchrun_rendezvous() -> Iterator[FileStore | None]:
    """Yield no store: torchrun's processes know from their environment where to meet."""
    yield None


@contextmanager
def join_process_group(rank: int, size: int, store: FileStore | None) -> Iterator[ProcessGroup]:
    """Join the process group of a run, and leave it at the end of the block."""
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nccl_available = torch.cuda.is_available() and dist.is_nccl_available()
    # nccl needs a GPU for each process
    use_nccl = nccl_available and processes_here <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if use_nccl else "gloo"
    arguments: dict[str, Any] = {}
    if store is not None:
        arguments = {"store": store, "rank": rank, "world_size": size}
    try:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **arguments)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the {size} processes of this run cannot reach each other: {error}"
        ) from error
    try:
        yield ProcessGroup(rank, size)
    finally:
        dist.destroy_process_group()
