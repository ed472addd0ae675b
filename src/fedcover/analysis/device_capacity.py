"""How much of a model this device can hold: a short benchmark of its memory and speed that proposes a capacity.

Measured on sub-models of a common width, as structured policies give them. Unstructured masks save neither memory nor
time: whoever uses them needs a device that trains the whole model.
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
from fedcover.submodels.reductions import Slices, width_for_budget, windows
from fedcover.training.local_sgd import train_client
from fedcover.types import Shard, Source

CANDIDATE_CAPACITIES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625, 0.03125)
STEPS, REPEATS = 5, 3
"""Local steps in one measurement, and measurements of which the median counts."""
USABLE_SHARE = 0.8
"""Share of the free memory that training may take: estimates are not exact, and others live on the device too."""

LogFn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One capacity on this device: bytes to train it, seconds of a local step and of a round's local training."""

    capacity: float
    parameters: int
    memory: int
    step_seconds: float | None
    round_seconds: float | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """The largest capacity that fits, what it was compared with, and every trial that led to it."""

    capacity: float | None
    memory_free: int
    seconds: float | None
    trials: tuple[Trial, ...]

    def as_dict(self) -> dict[str, object]:
        """The proposal as JSON can say it."""
        return asdict(self)


def propose(
    setup: Setup, *, memory: int | None = None, seconds: float | None = None, tell: LogFn = print
) -> Proposal:
    """Try capacities from the whole model downwards until one fits into the memory, and the time if one is given.

    `memory` are bytes (what is free on the device, if not given), `seconds` the longest local training of one round.
    """
    if memory is not None and memory <= 0:
        raise InvalidValue(f"memory must be a number of bytes above 0; got {memory}")
    if seconds is not None and not seconds > 0:
        raise InvalidValue(f"seconds must be above 0; got {seconds:g}")
    free = free_memory(setup) if memory is None else memory
    trials: list[Trial] = []
    for trial in _trials(setup, free, seconds):
        tell(f"capacity {trial.capacity:g}: {trial.memory:,} bytes" + _speed(trial))
        trials.append(trial)
        if trial.fits:
            break
    return Proposal(trials[-1].capacity if trials[-1].fits else None, free, seconds, tuple(trials))


def _trials(setup: Setup, free: int, seconds: float | None) -> Iterator[Trial]:
    for share in CANDIDATE_CAPACITIES:
        part = slices_for_capacity(setup, share)
        if part is None:
            return
        needed = _memory(setup, part)
        step = _step_seconds(setup, share, part) if needed <= USABLE_SHARE * free else None
        whole = None if step is None else step * _steps(setup)
        fits = whole is not None and (seconds is None or whole <= seconds)
        held = sum(part.sizes(dict(setup.task.model.module.named_parameters())).values())
        yield Trial(share, held, needed, step, whole, fits)


def slices_for_capacity(setup: Setup, share: float) -> Slices | None:
    """The sub-model of some capacity, in the experiment's measure of it; None where it holds not one unit per group."""
    model = setup.task.model
    if setup.capacity == "width":
        return windows(model.groups, share)
    try:
        return windows(
            model.groups,
            width_for_budget(model.groups, dict(model.module.named_parameters()), share),
        )
    except InvalidValue:
        return None


def _memory(setup: Setup, part: Slices) -> int:
    x, local = setup.task.source.test.x, setup.task.local
    return memory_to_train(
        setup.task.model, part, x.shape[1:], batch_size=local.batch_size, dtype=x.dtype
    )


def _steps(setup: Setup) -> int:
    """Local steps of a round, for a client with as many rows as the first few that have any have on average."""
    local = setup.task.local
    rows = [
        count
        for client in range(min(10, setup.clients))
        if (count := setup.task.source.count(client))
    ]
    return local.epochs * max(1, -(-round(fmean(rows)) // local.batch_size))


@dataclass(frozen=True)
class _RowLimitedSource:
    """A source in which every client has just enough rows for a measurement."""

    inner: Source
    rows: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def shard(self, client: int) -> Shard:
        """Rows of the client, repeated if it has too few."""
        shard = self.inner.shard(client)
        again = -(-self.rows // max(1, len(shard.index)))
        return Shard(shard.samples, shard.index.repeat(again)[: self.rows])


def _step_seconds(setup: Setup, share: float, part: Slices) -> float:
    """Seconds of one local step, by the very code that trains clients; making the sub-model counts, too."""
    local = replace(setup.task.local, epochs=1)
    source = cast(Source, _RowLimitedSource(setup.task.source, STEPS * local.batch_size))
    task, state = replace(setup.task, local=local, source=source), initial_state(setup)
    client = replace(client_of(setup, 0, 0), capacity=share)

    def once() -> float:
        start = time.perf_counter()
        train_client(task, state, client, part, 0.0)
        if setup.task.source.test.x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / STEPS

    once()  # the first step pays for what later ones find ready
    return median(once() for _ in range(REPEATS))


def free_memory(setup: Setup) -> int:
    """Bytes that are free for training: on the GPU if the data lies there, else in main memory."""
    device = setup.task.source.test.x.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory(system: Path = Path("/")) -> int:
    """Bytes of main memory that this process may still take: what is free, and what its container allows."""
    known = [_available(system), _cgroup_headroom(system, "memory.max", "memory.current"),
             _cgroup_headroom(system, "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]  # fmt: skip
    found = [free for free in known if free is not None]
    # where nothing tells what is free (macOS), all of the memory there is
    return max(0, min(found)) if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available(system: Path) -> int | None:
    """What Linux thinks can be used without swapping."""
    try:
        match = re.search(
            r"^MemAvailable:\s*(\d+) kB", (system / "proc/meminfo").read_text(), re.MULTILINE
        )
    except OSError:
        return None
    return 1024 * int(match[1]) if match else None


def _cgroup_headroom(system: Path, limit: str, used: str) -> int | None:
    """What is left of a control group's limit, if there is one."""
    groups = system / "sys/fs/cgroup"
    try:
        return int((groups / limit).read_text()) - int((groups / used).read_text())
    except (OSError, ValueError):  # no such file, or the word max
        return None


def _speed(trial: Trial) -> str:
    if trial.round_seconds is None:
        return ", more than is free"
    return f", {trial.step_seconds:.3g} s a step, {trial.round_seconds:.3g} s a round" + (
        "" if trial.fits else ": slow"
    )
