"""Which engine pays for a run: it depends on how much work a step is, how many there are, and on the device."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from fedcover.errors import InvalidValue, unknown
from fedcover.log import warn_once
from fedcover.models.norms import statistics_key
from fedcover.server.cohort import cohort_of
from fedcover.server.round_setup import Setup
from fedcover.training.engines import ENGINES, PRECISIONS, stacked_layers

WORTH_COMPILING = 100_000
"""Steps of all clients in a run from which on compiling them (10 to 40 seconds, once) saves more than it takes."""

SMALL_STEP = 100_000_000
"""Multiply-adds of a forward pass below which two threads of one process wait for each other more than they work."""

LARGE_STEP = 10_000_000_000
"""Multiply-adds of a client's forward pass from which on torch's convolutions fill a GPU by themselves.

Measured on an H200: at 2 billion (WRN28-2, ten images) crews were 1.6 times faster, at 34 (WRN28-8) they were not.
"""


def model_multiply_adds(setup: Setup) -> int:
    """Those of the whole model, for one sample."""
    sizes = {name: p.numel() for name, p in setup.task.model.module.named_parameters()}
    return sum(sizes.get(name, 0) * times for name, times in setup.uses.items())


def has_small_steps(setup: Setup) -> bool:
    """Whether a step of one client is too little work to keep a processor busy."""
    return model_multiply_adds(setup) * setup.task.local.batch_size < SMALL_STEP


def engine_for(setup: Setup, engine: str, device: str) -> str:
    """The engine of a run: the one asked for, or instead of `auto` what pays on its device."""
    if engine != "auto":
        return engine
    if device.startswith("cuda"):
        return "batched" if _suits_stacking(setup) else "streams"
    local, rows = setup.task.local, _rows(setup)
    steps = setup.rounds * setup.active * local.epochs * sum(rows) / len(rows) / local.batch_size
    return "batched" if steps >= WORTH_COMPILING else "sequential"


def _suits_stacking(setup: Setup) -> bool:
    """Whether a GPU is better filled by a layer of all clients at once than by all clients one layer each."""
    task = setup.task
    known = (
        stacked_layers.has_stacked_kernels(task.model.module)
        and statistics_key(task.norm, 1.0) is None
    )
    alike = (
        len(set(_rows(setup))) <= 2
    )  # a crew takes equally many steps, and each number is captured for itself
    return known and alike and model_multiply_adds(setup) * task.local.batch_size < LARGE_STEP


def _rows(setup: Setup) -> list[int]:
    """How many samples some of the clients have."""
    return [setup.task.source.count(client) for client in range(min(setup.clients, 10))]


MAX_THREADS = 1024


STEP_SECONDS, MULTIPLY_ADDS_PER_SECOND = 2e-4, 1e10
"""What a local step takes at least, and per multiply-add of forward and backward: roughly, to see if processes pay.

The MLP of the MNIST job comes out at 0.7 ms a step; one core of an AMD EPYC took 0.17 (batched) to 0.6 (sequential).
"""


def check_device(name: str) -> None:
    """Refuse what is no device on any computer."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise unknown("device", name, ["auto", "cpu", "cuda", "cuda:1"])


@dataclass(frozen=True, slots=True)
class Machine:
    """How a run is computed, never what: it may change the last digits, so a resumed run must keep it."""

    engine: str = "auto"
    device: str = "auto"
    threads: int | None = None
    deterministic: bool = False
    precision: str = "fp32"
    processes: int | str = 1

    def resolved(self) -> "Machine":
        """The same with what this computer decides: the device. Which engine pays depends on the run (`for_setup`)."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_device(device)
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InvalidValue(
                "device is 'cuda', but this computer has no CUDA device that torch can use; use 'cpu'"
            )
        if self.engine not in ("auto", *ENGINES):
            raise unknown("engine", self.engine, ["auto", *ENGINES])
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.precision == "tf32" and not device.startswith("cuda"):
            raise InvalidValue(
                "precision is 'tf32', which only CUDA devices know; use 'fp32' or 'bf16'"
            )
        if self.engine == "streams" and device == "cpu":
            warn_once(
                "there is no GPU in use, so streams neither overlaps nor captures steps and is not fast"
            )
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise InvalidValue(f"threads must be in 1..{MAX_THREADS}; got {self.threads}")
        if self.processes != "auto" and not (
            isinstance(self.processes, int) and 1 <= self.processes <= MAX_THREADS
        ):
            raise InvalidValue(
                f"processes must be 'auto' or in 1..{MAX_THREADS}; got {self.processes!r}"
            )
        return replace(self, device=device)

    def for_setup(self, setup: Setup) -> "Machine":
        """The same with engine, processes and threads decided: those that pay; one thread, unless a step is big."""
        work, local = model_multiply_adds(setup), setup.task.local
        processes = self.processes
        if isinstance(processes, str):
            cores = (
                torch.cuda.device_count() if self.device.startswith("cuda") else physical_cores()
            )
            samples = (
                sum(client.samples for client in cohort_of(setup, 0)) * local.epochs * setup.rounds
            )
            step = STEP_SECONDS + 3 * work * local.batch_size / MULTIPLY_ADDS_PER_SECOND
            enough = num_useful_processes(samples / local.batch_size * step, setup.active, cores)
            processes = 1 if setup.clip_updates is not None else enough
        elif processes > 1 and setup.clip_updates is not None:
            raise InvalidValue(
                f"processes must be 1 with clip_updates, which looks at updates as a whole; got {processes}"
            )
        threads = self.threads or (
            1 if has_small_steps(setup) else max(1, torch.get_num_threads() // processes)
        )
        return replace(
            self,
            threads=threads,
            processes=processes,
            engine=engine_for(setup, self.engine, self.device),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute in this way for a while: so many threads, and on CUDA, if asked, only deterministic kernels."""
        threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        cudnn, tf32 = torch.backends.cudnn, self.precision != "fp32"
        before = cudnn.allow_tf32, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
            torch.use_deterministic_algorithms(True)
        torch.set_num_threads(self.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)
            cudnn.allow_tf32 = before[0]
            torch.set_float32_matmul_precision(before[1])


def num_useful_processes(seconds: float, clients: int, cores: int, *, start: float = 5.0) -> int:
    """As many processes as make a run of so many seconds shorter, if each takes `start` seconds to begin.

    No more than cores, and no more than make the round's longest share shorter: ten clients on eight cores take as long
    as on five.

    >>> [num_useful_processes(seconds, clients=10, cores=8) for seconds in (8, 600)]
    [1, 5]
    """
    longest = ceil(clients / cores)
    useful = ceil(clients / longest)
    saved = seconds * (1 - longest / clients)
    return useful if saved > 2 * start else 1


def physical_cores() -> int:
    """The cores that this process may use: hyper-threads count once, and a container's limit counts."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    siblings = {
        _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in allowed
    }
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = int(quota) // int(period) if quota.isdigit() and period.isdigit() else len(siblings)
    return max(1, min(len(siblings), limit))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
