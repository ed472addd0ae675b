"""Measure how much of a model this device can train: a short benchmark of memory and speed.

Capacities are measured on sub-models of a common width, as structured policies give them.
Unstructured masks save neither memory nor time: they need a device that trains the whole model.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import cast

import torch

from fedcover.errors import InvalidValue
from fedcover.server.cohort import client_of
from fedcover.server.round import initial_state
from fedcover.server.round_setup import Setup
from fedcover.submodels.cost import memory_to_train
from fedcover.submodels.reductions import Slices, width_for_budget, window_slices
from fedcover.training.local_sgd import train_client
from fedcover.types import Shard, Source

CANDIDATE_CAPACITIES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625, 0.03125)
STEPS = 5
"""Local steps in one measurement."""
REPEATS = 3
"""Number of measurements; the median counts."""
USABLE_SHARE = 0.8
"""Share of the free memory that training may use. Estimates are inexact, and memory is shared."""
MAX_SAMPLED_CLIENTS = 10
"""Number of clients whose rows are counted to estimate the steps of a round."""

LogFn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurement of one capacity: memory in bytes, and seconds per local step and per round.

    The times are None if the memory does not suffice.
    """

    capacity: float
    parameters: int
    memory: int
    step_seconds: float | None
    round_seconds: float | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """The largest capacity that fits, the limits it was compared with, and all trials."""

    capacity: float | None
    memory_free: int
    seconds: float | None
    trials: tuple[Trial, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the proposal as a dictionary for JSON."""
        return asdict(self)


def propose(
    setup: Setup, *, memory: int | None = None, seconds: float | None = None, tell: LogFn = print
) -> Proposal:
    """Try capacities from the whole model downwards until one fits.

    Args:
        setup: The run whose model and data are measured.
        memory: Bytes that training may use (default: what is free on the device).
        seconds: Longest local training time of one round (default: no limit).
        tell: Called with one line per trial.

    Returns:
        The largest capacity that fits, or None in its place, and all trials.

    Raises:
        InvalidValue: if a limit is not positive.
    """
    if memory is not None and memory <= 0:
        raise InvalidValue(f"memory must be a number of bytes above 0; got {memory}")
    if seconds is not None and not seconds > 0:
        raise InvalidValue(f"seconds must be above 0; got {seconds:g}")
    available = free_memory(setup) if memory is None else memory
    trials: list[Trial] = []
    for trial in _trials(setup, available, seconds):
        tell(f"capacity {trial.capacity:g}: {trial.memory:,} bytes, {_speed(trial)}")
        trials.append(trial)
        if trial.fits:
            break
    capacity = trials[-1].capacity if trials[-1].fits else None
    return Proposal(capacity, available, seconds, tuple(trials))


def _trials(setup: Setup, available: int, seconds: float | None) -> Iterator[Trial]:
    """Measure one capacity after another; stop at the first that leaves a group without units."""
    params = dict(setup.task.model.module.named_parameters())
    for capacity in CANDIDATE_CAPACITIES:
        part = slices_for_capacity(setup, capacity)
        if part is None:
            return
        memory = _memory(setup, part)
        step_seconds = round_seconds = None
        fits = False
        if memory <= USABLE_SHARE * available:
            step_seconds = _step_seconds(setup, capacity, part)
            round_seconds = step_seconds * _steps_per_round(setup)
            fits = seconds is None or round_seconds <= seconds
        num_parameters = sum(part.sizes(params).values())
        yield Trial(capacity, num_parameters, memory, step_seconds, round_seconds, fits)


def slices_for_capacity(setup: Setup, capacity: float) -> Slices | None:
    """Return the sub-model of a capacity, or None if it would leave a group without units."""
    model = setup.task.model
    if setup.experiment.capacity == "width":
        return window_slices(model.groups, capacity)
    params = dict(model.module.named_parameters())
    try:
        return window_slices(model.groups, width_for_budget(model.groups, params, capacity))
    except InvalidValue:
        return None


def _memory(setup: Setup, part: Slices) -> int:
    x = setup.task.source.test.x
    batch_size = setup.task.local.batch_size
    return memory_to_train(
        setup.task.model, part, x.shape[1:], batch_size=batch_size, dtype=x.dtype
    )


def _steps_per_round(setup: Setup) -> int:
    """Return the local steps of a round, for the mean number of rows of some clients with rows."""
    local = setup.task.local
    row_counts = []
    for client in range(min(MAX_SAMPLED_CLIENTS, setup.experiment.clients)):
        num_rows = setup.task.source.count(client)
        if num_rows:
            row_counts.append(num_rows)
    batches = -(-round(fmean(row_counts)) // local.batch_size)
    return local.epochs * max(1, batches)


@dataclass(frozen=True)
class _RowLimitedSource:
    """A source in which every client has just enough rows for a measurement."""

    inner: Source
    rows: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def shard(self, client: int) -> Shard:
        """Return rows of a client, repeated if there are too few."""
        shard = self.inner.shard(client)
        repeats = -(-self.rows // max(1, len(shard.index)))
        return Shard(shard.samples, shard.index.repeat(repeats)[: self.rows])


def _step_seconds(setup: Setup, capacity: float, part: Slices) -> float:
    """Measure one local step with the code that trains clients, sub-model building included."""
    local = replace(setup.task.local, epochs=1)
    source = cast(Source, _RowLimitedSource(setup.task.source, STEPS * local.batch_size))
    task = replace(setup.task, local=local, source=source)
    state = initial_state(setup)
    client = replace(client_of(setup, 0, 0), capacity=capacity)

    def measure_once() -> float:
        start = time.perf_counter()
        train_client(task, state, client, part, 0.0)
        if setup.task.source.test.x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / STEPS

    measure_once()  # warm up
    return median(measure_once() for _ in range(REPEATS))


def free_memory(setup: Setup) -> int:
    """Return the bytes free for training, on the GPU if the data is there."""
    device = setup.task.source.test.x.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory(system: Path = Path("/")) -> int:
    """Return the bytes of main memory that are free, and that the container allows."""
    limits = [
        _available(system),
        _cgroup_headroom(system, "memory.max", "memory.current"),
        _cgroup_headroom(system, "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ]
    known_limits = [limit for limit in limits if limit is not None]
    if known_limits:
        return max(0, min(known_limits))
    # Some systems (macOS) do not report free memory; take the total.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available(system: Path) -> int | None:
    """Return what Linux estimates to be usable without swapping, or None on other systems."""
    try:
        text = (system / "proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(match[1]) if match else None


def _cgroup_headroom(system: Path, limit: str, usage: str) -> int | None:
    """Return the difference between a control group's limit and its usage, if it has a limit."""
    groups = system / "sys/fs/cgroup"
    try:
        return int((groups / limit).read_text()) - int((groups / usage).read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _speed(trial: Trial) -> str:
    if trial.round_seconds is None:
        return "more than is free"
    speed = f"{trial.step_seconds:.3g} s per step, {trial.round_seconds:.3g} s per round"
    return speed if trial.fits else f"{speed}: slow"
