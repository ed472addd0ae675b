"""A worker process of a run: it prepares the same setup as the first process and shares rounds."""

import io
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not declare it

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.host import signals
from fedcover.host.workers import Report, import_from
from fedcover.runs.launch import (
    WorkerJob,
    join_process_group,
    listen_locally,
    not_importable_message,
    open_store,
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


def join_run(job: Mapping[str, Any], report: Report) -> None:
    """Join the run of the process that has started this one; report that it has begun."""
    # what a module prints, the first process prints, too
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    rank, size = job["rank"], job["size"]
    store = open_store(job["folder"], size)
    listen_locally()
    report("started")
    _take_part(rank, size, store)


def join_torchrun() -> None:
    """Join the run of torchrun's first process; the environment says where."""
    _take_part(torchrun_rank() or 0, torchrun_size(), None)


def _take_part(rank: int, size: int, store: FileStore | None) -> NoReturn:
    """Share the rounds of a run, and exit.

    The first process reports errors. Errors that it cannot know are printed here in one line.
    """
    logging.getLogger("fedcover").setLevel(logging.ERROR)  # the first process logs the same
    code = 0
    try:
        with signals.raise_on_signals(), join_process_group(rank, size, store) as group:
            share_rounds(group)
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


def share_rounds(group: ProcessGroup) -> None:
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
        import_from(folders)
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
