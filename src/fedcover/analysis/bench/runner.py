"""One run of the benchmark: timings with their spread, ratios within the run, and a page."""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from fedcover.analysis.bench import baseline
from fedcover.analysis.bench.timing import (
    EPOCHS,
    round_seconds,
    step_seconds,
    time_interleaved,
    training,
)
from fedcover.runs.machine import Machine
from fedcover.version import __version__

WIDTHS = (1.0, 0.5, 0.25)
LOCKSTEP = (100, 450, 1350)
MAX_SPREAD_RATIO = 1.5
"""The slowest repetition over the fastest; above this a timing is not worth quoting."""


@dataclass(frozen=True)
class Measurement:
    """What was timed, the milliseconds of each repetition, and ratios to other timings.

    Milliseconds are those of a step of all clients, unless `what` says otherwise.
    """

    what: str
    milliseconds: tuple[float, ...]
    ratios: tuple[tuple[str, float], ...] = ()

    @property
    def median_ms(self) -> float:
        """The median of the milliseconds."""
        return median(self.milliseconds)

    @property
    def unsteady(self) -> bool:
        """Whether the slowest repetition took much longer than the fastest, as under load."""
        return max(self.milliseconds) > MAX_SPREAD_RATIO * min(self.milliseconds)


def measurement(what: str, seconds: Sequence[float], **others_ms: float) -> Measurement:
    """Return a measurement with its speed-up over other timings, which are in milliseconds."""
    milliseconds = tuple(1e3 * second for second in seconds)
    ratios = tuple(
        (name.replace("_", " "), other_ms / median(milliseconds))
        for name, other_ms in others_ms.items()
    )
    return Measurement(what, milliseconds, ratios)


def bench(device: str) -> Iterator[Measurement]:
    """Measure this computer: the plain loop, the lower limit and the engines.

    On a CPU one thread is used.
    """
    if device.startswith("cuda"):
        yield from _lockstep(device)
        for name in ("wrn28-2", "wrn28-8"):
            yield from _convolutions(name, device)
        return
    machine = Machine("batched", "cpu", threads=1).resolved()
    with machine.applied():
        yield from _cpu(machine)


def _cpu(machine: Machine) -> Iterator[Measurement]:
    """Time what ten clients do in a round, for the loop, the floor and the engine in turn."""
    steps = EPOCHS * 60
    uniform: dict[str, Any] = {"fleet": "1x1.0", "policy": "full"}
    mixed: dict[str, Any] = {"fleet": "4x1.0 + 6x0.5", "policy": "prefix"}
    loop_name, floor_name = "plain eager loop", "floor, the two large products alone"
    works = {
        loop_name: baseline.eager_clients(steps=steps),
        floor_name: baseline.matmul_floor(steps=steps),
        "batched": training("mlp", machine, samples=600, **uniform),
        "batched, 4x1 + 6x0.5": training("mlp", machine, samples=600, **mixed),
    }
    durations = time_interleaved(works, repeats=10)
    step_ms = {name: median(seconds) * 1e3 / steps for name, seconds in durations.items()}
    for name, seconds in durations.items():
        others_ms = {}
        if name.startswith("batched"):
            others_ms = {"than_the_loop": step_ms[loop_name], "of_the_floor": step_ms[floor_name]}
        seconds_per_step = [second / steps for second in seconds]
        yield measurement(f"mlp, 10 clients: {name}", seconds_per_step, **others_ms)
    yield from _rounds("mlp", machine, "1x1.0", "full", 600)


def _convolutions(name: str, device: str) -> Iterator[Measurement]:
    for precision in ("tf32", "bf16"):
        machine = Machine("streams", device, precision=precision).resolved()
        yield from _engines(name, machine)
    yield from _widths(name, machine)
    machine = replace(machine, engine="auto")
    for fleet, policy in (("1x1.0", "full"), ("4x1.0 + 3x0.5 + 3x0.25", "rolling(spread=true)")):
        step = median(step_seconds(name, machine, fleet=fleet, policy=policy, together=None))
        yield from _rounds(name, machine, fleet, policy, 500, step)


def _engines(name: str, machine: Machine) -> Iterator[Measurement]:
    """Compare both engines with the plain loop and with one batch of all images."""
    title = f"{name} {machine.precision}"
    with machine.applied():
        bf16 = machine.precision == "bf16"
        loop_seconds = baseline.eager_step(name, machine.device, bf16=bf16)
    loop = measurement(f"{title}: plain eager loop", loop_seconds)
    yield loop
    bound_seconds = baseline.one_big_batch_step(name, machine.device, precision=machine.precision)
    bound = measurement(f"{title}: bound, one batch of all", bound_seconds)
    yield bound
    for engine, together in (("streams", False), ("batched", True)):
        yield measurement(
            f"{title}: {engine}",
            step_seconds(name, machine, together=together),
            than_the_loop=loop.median_ms,
            of_the_bound=bound.median_ms,
        )


def _widths(name: str, machine: Machine) -> Iterator[Measurement]:
    """Time narrower clients, as a share of the time of full width."""
    full_width_ms = None
    for width in WIDTHS:
        seconds = step_seconds(name, machine, fleet=f"1x{width}", policy="prefix", together=True)
        title = f"{name} {machine.precision}: batched, all clients {width} wide"
        narrow = measurement(title, seconds)
        full_width_ms = full_width_ms or narrow.median_ms
        yield replace(narrow, ratios=(("of full width's time", narrow.median_ms / full_width_ms),))


def _rounds(
    name: str, machine: Machine, fleet: str, policy: str, samples: int, step: float | None = None
) -> Iterator[Measurement]:
    """Time whole rounds, with the share of each phase.

    With `step`, the seconds of a single step, the share of all steps alone is added.
    """
    rounds = round_seconds(name, machine, fleet=fleet, policy=policy, samples=samples)
    totals = [sum(phases.values()) for phases in rounds]
    shares = []
    for phase in rounds[0]:
        share_by_round = [
            phases[phase] / total for phases, total in zip(rounds, totals, strict=True)
        ]
        shares.append((phase, median(share_by_round)))
    if step is not None:
        steps_per_round = EPOCHS * samples / baseline.BATCH
        shares.append(("steps alone", step * steps_per_round / median(totals)))
    title = f"{name} {machine.precision}, {fleet} {policy}: a whole round, and its phases' shares"
    yield Measurement(title, tuple(1e3 * total for total in totals), tuple(shares))


def _lockstep(device: str) -> Iterator[Measurement]:
    machine = Machine("batched", device, precision="tf32").resolved()
    with machine.applied():
        loop_seconds = baseline.eager_step("mlp", device, repeats=20)
    yield measurement("mlp: plain eager loop, 10 clients", loop_seconds)
    for clients in (10, *LOCKSTEP):
        seconds = step_seconds("mlp", machine, clients=clients, together=True)
        stacked = measurement(f"mlp tf32: {clients} clients in lockstep", seconds)
        rate = clients * baseline.BATCH / stacked.median_ms / 1e3
        yield replace(stacked, ratios=(("million images/s", rate),))


def page(
    lines: Sequence[Measurement],
    device: str,
    *,
    today: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> str:
    """Return the measurements as a Markdown page with hardware, versions and date."""
    if device.startswith("cuda"):
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"{platform.machine()} CPU, one thread"
    versions = (
        f"fedcover {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    head = [
        f"# fedcover bench on {hardware}",
        "",
        f"{today():%Y-%m-%d}, {versions}.",
        "A step trains 10 clients on one mini-batch of 10 random images each:",
        "forward, backward, SGD with momentum.",
        "Milliseconds are the median of repetitions in one process.",
        "'than the loop' is the speed-up over the loop,",
        "'of the floor' and 'of the bound' the share of the speed of these limits.",
        "",
        "| what | ms | from, to | repetitions | ratios |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_table_row, lines), ""])


def _table_row(line: Measurement) -> str:
    times = line.milliseconds
    ratios = ", ".join(f"{name} {value:.3f}" for name, value in line.ratios)
    spread = f"{min(times):.3f} to {max(times):.3f}"
    return f"| {line.what} | {line.median_ms:.3f} | {spread} | {len(times)} | {ratios} |"
