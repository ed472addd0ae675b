"""How a run is computed: device, engine, threads and processes, chosen where left open."""

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
from fedcover.runs.workload import Workload
from fedcover.server.round_setup import Setup
from fedcover.training.engines import ENGINES, PRECISIONS

WORTH_COMPILING = 100_000
"""Steps of all clients in a run from which on compiling them pays; it takes 10 to 40 seconds."""

MAX_THREADS = 1024


def engine_for(workload: Workload, engine: str, device: str) -> str:
    """Return the engine of a run: the requested one, or for `auto` the fastest on the device."""
    if engine != "auto":
        return engine
    if device.startswith("cuda"):
        return "batched" if workload.suits_stacking() else "streams"
    return "batched" if workload.num_steps() >= WORTH_COMPILING else "sequential"


def check_device(name: str) -> None:
    """Check that a name is that of a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise unknown("device", name, ["auto", "cpu", "cuda", "cuda:1"])


@dataclass(frozen=True, slots=True)
class Machine:
    """How a run is computed, never what is computed.

    Other settings may change the result in the last digits, so a resumed run must keep them.

    Args:
        engine: `sequential`, `batched`, `streams`, or `auto` for the fastest.
        device: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU if there is one.
        threads: Threads of torch; by default 1 for small models, otherwise all cores.
        deterministic: Whether to use only deterministic CUDA kernels.
        precision: `fp32`, `tf32` or `bf16`.
        processes: Number of worker processes, or `auto` for the fastest.
    """

    engine: str = "auto"
    device: str = "auto"
    threads: int | None = None
    deterministic: bool = False
    precision: str = "fp32"
    processes: int | str = 1

    def resolved(self) -> "Machine":
        """Check the settings and choose the device.

        Returns:
            The same machine with its device chosen; `for_workload` chooses the rest.

        Raises:
            InvalidValue: If a setting is not allowed, or the device does not exist here.
        """
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_device(device)
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InvalidValue(
                "device is 'cuda', but this computer has no CUDA device that torch can use; "
                "use 'cpu'"
            )
        self._check_settings(device)
        return replace(self, device=device)

    def _check_settings(self, device: str) -> None:
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
                "there is no GPU in use, so streams neither overlaps nor captures steps "
                "and is not fast"
            )
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise InvalidValue(f"threads must be in 1..{MAX_THREADS}; got {self.threads}")
        if self.processes == "auto":
            return
        if not isinstance(self.processes, int) or not 1 <= self.processes <= MAX_THREADS:
            raise InvalidValue(
                f"processes must be 'auto' or in 1..{MAX_THREADS}; got {self.processes!r}"
            )

    def for_workload(self, workload: Workload) -> "Machine":
        """Choose engine, processes and threads for a run.

        Args:
            workload: What the run has to compute.

        Returns:
            The same machine with no setting left open.

        Raises:
            InvalidValue: If several processes are requested together with `clip_updates`.
        """
        processes = self._processes_for(workload)
        threads = self.threads
        if not threads:
            cores_per_process = max(1, torch.get_num_threads() // processes)
            threads = 1 if workload.has_small_steps() else cores_per_process
        engine = engine_for(workload, self.engine, self.device)
        return replace(self, threads=threads, processes=processes, engine=engine)

    def for_setup(self, setup: Setup) -> "Machine":
        """Choose engine, processes and threads for a run whose setup is built already.

        Args:
            setup: The setup of the run.

        Returns:
            The same machine with no setting left open, as by `for_workload`.
        """
        return self.for_workload(Workload(setup.experiment, setup.task, setup.uses))

    def _processes_for(self, workload: Workload) -> int:
        """Return the number of processes: the requested one, or for `auto` the fastest."""
        clips = workload.experiment.clip_updates is not None
        if isinstance(self.processes, int):
            if self.processes > 1 and clips:
                raise InvalidValue(
                    "processes must be 1 with clip_updates, which looks at updates as a whole; "
                    f"got {self.processes}"
                )
            return self.processes
        if clips:
            return 1
        if self.device.startswith("cuda"):
            cores = torch.cuda.device_count()
        else:
            cores = physical_cores()
        seconds = workload.seconds_in_one_process()
        return num_useful_processes(seconds, workload.experiment.active, cores)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply threads, precision and determinism to torch inside a `with` block."""
        cudnn = torch.backends.cudnn
        old_threads = torch.get_num_threads()
        old_deterministic = torch.are_deterministic_algorithms_enabled()
        old_cudnn_tf32 = cudnn.allow_tf32
        old_matmul_precision = torch.get_float32_matmul_precision()
        use_tf32 = self.precision != "fp32"
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
        cudnn.allow_tf32 = use_tf32
        if self.deterministic:
            # cuBLAS fails in deterministic mode without this workspace
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.set_num_threads(self.threads or old_threads)
        try:
            yield
        finally:
            torch.set_num_threads(old_threads)
            torch.use_deterministic_algorithms(old_deterministic)
            cudnn.allow_tf32 = old_cudnn_tf32
            torch.set_float32_matmul_precision(old_matmul_precision)


def num_useful_processes(seconds: float, clients: int, cores: int, *, start: float = 5.0) -> int:
    """Return how many processes shorten a run that takes some seconds in one.

    Each process takes `start` seconds to begin. More processes than cores do not help, nor do
    more than shorten the longest share of a round: ten clients on eight cores take as long as
    on five.

    >>> [num_useful_processes(seconds, clients=10, cores=8) for seconds in (8, 600)]
    [1, 5]
    """
    longest_share = ceil(clients / cores)
    processes = ceil(clients / longest_share)
    saved_seconds = seconds * (1 - longest_share / clients)
    return processes if saved_seconds > 2 * start else 1


def physical_cores() -> int:
    """Return the cores that this process may use.

    Hyper-threads count once, and a container's limit counts.
    """
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or str(cpu))
    limit = len(cores)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        limit = int(quota) // int(period)
    return max(1, min(len(cores), limit))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
