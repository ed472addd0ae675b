"""A worker process of a run: it prepares the same setup as the first process and shares rounds."""

import io
import logging
import os
import sys
from dataclasses import replace

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not declare it

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.host import signals
from fedcover.runs.launch import (
    WORKER_VARIABLE,
    WorkerJob,
    arrival_key,
    join_process_group,
    listen_locally,
    not_importable_message,
    torchrun_rank,
    torchrun_size,
)
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.collectives import ProcessGroup
from fedcover.server.round import run_round
from fedcover.server.round_cache import RoundCache
from fedcover.server.round_setup import Setup
from fedcover.server.sharded_round import shard_setup, without_values
from fedcover.types import State


def worker_main() -> None:
    """Run a worker from start to exit.

    The first process reports errors. Errors that it cannot know are printed here in one line.
    """
    logging.getLogger("fedcover").setLevel(logging.ERROR)  # the first process logs the same
    rank, size, store = _rendezvous()
    code = 0
    try:
        with signals.raise_on_signals(), join_process_group(rank, size, store) as group:
            run_worker(group)
    except KeyboardInterrupt as error:
        code = signals.exit_code(error) or 1
    except FedcoverError:
        code = 1
    except Exception as error:
        name = type(error).__name__
        print(f"fedcover: process {rank + 1} of {size}: {name}: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # nothing is left to save, and network threads may not survive an orderly exit
    os._exit(code)


def _rendezvous() -> tuple[int, int, FileStore | None]:
    """Return rank, number of processes and store; torchrun's processes need no store."""
    if WORKER_VARIABLE not in os.environ:
        return torchrun_rank() or 0, torchrun_size(), None
    rank, size, folder = os.environ[WORKER_VARIABLE].split(" ", 2)
    store = FileStore(f"{folder}/store", int(size))
    store.set(arrival_key(int(rank)), "yes")
    listen_locally()
    return int(rank), int(size), store


def run_worker(group: ProcessGroup) -> None:
    """Receive the job, prepare it, and take part in its rounds."""
    job, setup, state = _receive(group)
    cache = RoundCache.of(setup)
    with job.machine.applied():
        while state.round < job.until:
            state, _ = run_round(setup, state, cache)


def _receive(group: ProcessGroup) -> tuple[WorkerJob, Setup, State]:
    """Receive and prepare the job; the state has the only copy of the model's values."""
    folders, device, content = group.broadcast(([""], "", b""))
    prepared: list[tuple[WorkerJob, Setup, State]] = []

    def prepare_job() -> None:
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        device_map = _choose_device(group) if device == "cuda" else {}
        job, state = _deserialize(content, device_map)
        with job.machine.applied():
            setup = prepare(job.experiment, job.machine, data=job.data, overrides=job.overrides)
        setup = without_values(shard_setup(setup, group))
        prepared.append((replace(job, overrides=Overrides()), setup, state))

    group.all_gather(prepare_job)
    return prepared[0]


def _choose_device(group: ProcessGroup) -> dict[str, str]:
    """Select a GPU for this process, its own as far as there are enough.

    Return where tensors of the first GPU belong.
    """
    index = int(os.environ.get("LOCAL_RANK", group.rank)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return {"cuda:0": f"cuda:{index}"}


def _deserialize(content: bytes, device_map: dict[str, str]) -> tuple[WorkerJob, State]:
    try:  # arbitrary objects are allowed: they come from the first process of this very run
        message: tuple[WorkerJob, State] = torch.load(
            io.BytesIO(content), map_location=device_map, weights_only=False
        )
    except (AttributeError, ImportError) as error:
        raise InvalidValue(not_importable_message(error)) from error
    return message
