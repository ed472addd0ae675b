"""One run of the benchmark: every figure with its spread, ratios only within the run, a page to keep."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from fedcover.analysis.bench import baseline
from fedcover.analysis.bench.baseline import BATCH, BENCH_MODELS, CLIENTS, random_batches
from fedcover.host import scratch
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, engine_for
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.round import RoundReport, initial_state, start_round
from fedcover.server.round_setup import Setup
from fedcover.training.engines.batched import load_stack_runners
from fedcover.training.engines.client_inputs import ClientJob, client_inputs
from fedcover.training.engines.grouping import group_into_stacks
from fedcover.training.engines.runners import RunnerCache, run_steps
from fedcover.training.engines.streams import load_client_runners
from fedcover.types import Assignment, Dataset, Samples
from fedcover.version import __version__

EPOCHS = 5


STEPS = 10
"""Steps of each repetition, made without waiting in between, as in a round."""


def bench_experiment(
    name: str, *, clients: int, fleet: str, policy: str, samples: int, epochs: int, test: int
) -> Experiment:
    """An experiment on random data in the shape of MNIST or CIFAR."""
    model, shape, classes = BENCH_MODELS[name]
    return Experiment(
        dataset=f"synthetic(shape={shape}, classes={classes}, samples={samples}, test_size={test})",
        model=model, fleet=fleet, policy=policy, assignment="slot", clients=max(100, clients), active=clients,
        rounds=1000, epochs=epochs, batch_size=BATCH,
    )  # fmt: skip


def step_seconds(
    name: str,
    machine: Machine,
    *,
    clients: int = CLIENTS,
    fleet: str = "1x1.0",
    policy: str = "full",
    together: bool | None = False,
    repeats: int = 10,
) -> list[float]:
    """Seconds of one step of all clients: each in a lane of its own, or `together` in crews; None: as a run would."""
    wanted = bench_experiment(
        name, clients=clients, fleet=fleet, policy=policy, samples=STEPS * BATCH, epochs=1, test=10
    )
    setup = prepare(wanted, machine)
    if together is None:
        together = engine_for(setup, machine.engine, machine.device) == "batched"
    wait: Callable[[], None] = (
        torch.cuda.synchronize if machine.device.startswith("cuda") else lambda: None
    )
    with machine.applied():
        cache, jobs = RunnerCache(), _jobs(setup)
        if together:
            runners = load_stack_runners(
                group_into_stacks(jobs, cache)[0], cache, machine.precision
            )
        else:
            runners = load_client_runners(cache, list(client_inputs(jobs)), machine.precision)
        found = []
        for _ in range(repeats + 1):
            for runner in runners:
                runner.load(runner.step_buffers.clients)
            wait()
            start = time.perf_counter()
            run_steps(runners)
            wait()
            found.append((time.perf_counter() - start) / STEPS)
    return found[1:]


def training(
    name: str, machine: Machine, *, fleet: str, policy: str, samples: int
) -> Callable[[], None]:
    """What the clients of a round do, by the machine's engine; their images are in memory, as the plain loop's are."""
    wanted = bench_experiment(
        name, clients=CLIENTS, fleet=fleet, policy=policy, samples=samples, epochs=EPOCHS, test=10
    )
    wanted = wanted.model_copy(update={"dataset": "digits"})
    images = random_images(name, machine.device, samples * wanted.clients, test=10)
    setup = prepare(wanted, machine, overrides=Overrides(dataset=images))
    state = initial_state(setup)
    work = start_round(setup, state).work

    def train() -> None:
        for _ in setup.engine(setup.task, state, work, setup.lr(0)):
            pass

    return train


def _jobs(setup: Setup) -> list[ClientJob]:
    state = initial_state(setup)
    return [
        ClientJob(Assignment(setup.task, state, *each), setup.lr(0))
        for each in start_round(setup, state).work
    ]


def round_seconds(
    name: str,
    machine: Machine,
    *,
    fleet: str,
    policy: str,
    samples: int,
    test: int = 10_000,
    rounds: int = 3,
) -> list[dict[str, float]]:
    """Where the time of whole rounds of a run into a folder goes, phase by phase; `files` is whatever no phase owns.

    The first round, which prepares, and the last, which measures more, are left out.
    """
    wanted = bench_experiment(
        name, clients=CLIENTS, fleet=fleet, policy=policy, samples=samples, epochs=EPOCHS, test=10
    )
    wanted = wanted.model_copy(update={"dataset": "digits", "rounds": rounds + 2})
    images = random_images(name, machine.device, samples * wanted.clients, test)
    found, ends = [], []

    def watch(report: RoundReport) -> None:
        ends.append(time.perf_counter())
        found.append(dict(report.metrics["seconds"]))

    with scratch.folder("bench") as folder:
        run(wanted, folder / "run", machine=machine, dataset=images, watch=watch)
    for phases, before, end in zip(found[1:], ends, ends[1:], strict=False):
        phases["files"] = end - before - sum(phases.values())
    return found[1:-1]


def random_images(name: str, device: str, train: int, test: int) -> Dataset:
    """Random images in the shape of a job's, all in memory."""
    x_N, y_N = (batches[0] for batches in random_batches(name, device, 1, train + test))
    return Dataset(
        "random",
        Samples(x_N[:train], y_N[:train]),
        Samples(x_N[train:], y_N[train:]),
        BENCH_MODELS[name][2],
    )


WIDTHS = (1.0, 0.5, 0.25)
LOCKSTEP = (100, 450, 1350)
MAX_SPREAD_RATIO = 1.5
"""The slowest repetition over the fastest, up to which a figure is worth quoting."""


@dataclass(frozen=True)
class Measurement:
    """One figure: what was done, in which milliseconds (of a step of all clients, unless it says so), and ratios."""

    what: str
    milliseconds: tuple[float, ...]
    ratios: tuple[tuple[str, float], ...] = ()

    @property
    def median_ms(self) -> float:
        """The median."""
        return median(self.milliseconds)

    @property
    def unsteady(self) -> bool:
        """Whether the slowest repetition took much longer than the fastest, as on a busy computer."""
        return max(self.milliseconds) > MAX_SPREAD_RATIO * min(self.milliseconds)


def measurement(what: str, seconds: Sequence[float], **against: float) -> Measurement:
    """A figure, and how many times faster (or, below 1, slower) it is than some others in milliseconds."""
    found = tuple(1e3 * second for second in seconds)
    return Measurement(
        what,
        found,
        tuple((name.replace("_", " "), other / median(found)) for name, other in against.items()),
    )


def bench(device: str) -> Iterator[Measurement]:
    """Measure this computer: the plain loop, the floor, our engines; on a CPU with one thread."""
    if device.startswith("cuda"):
        yield from _lockstep(device)
        for name in ("wrn28-2", "wrn28-8"):
            yield from _convolutions(name, device)
        return
    machine = Machine("batched", "cpu", threads=1).resolved()
    with machine.applied():
        yield from _cpu(machine)


def _cpu(machine: Machine) -> Iterator[Measurement]:
    """What ten clients do in a round, each contender in turn, so that all see the same moods of the machine."""
    steps = EPOCHS * 60
    alike: dict[str, Any] = {"fleet": "1x1.0", "policy": "full"}
    mixed: dict[str, Any] = {"fleet": "4x1.0 + 6x0.5", "policy": "prefix"}
    works = {
        "plain eager loop": baseline.eager_clients(steps=steps),
        "floor, the two large products alone": baseline.matmul_floor(steps=steps),
        "batched": training("mlp", machine, samples=600, **alike),
        "batched, 4x1 + 6x0.5": training("mlp", machine, samples=600, **mixed),
    }
    found = time_interleaved(works, repeats=10)
    loop, floor = (median(found[name]) * 1e3 / steps for name in list(works)[:2])
    for name, seconds in found.items():
        against = (
            {"than_the_loop": loop, "of_the_floor": floor} if name.startswith("batched") else {}
        )
        yield measurement(
            f"mlp, 10 clients: {name}", [second / steps for second in seconds], **against
        )
    yield from _rounds("mlp", machine, "1x1.0", "full", 600)


def time_interleaved(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of several pieces of work, measured by turns; the first turn, which prepares, does not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def _convolutions(name: str, device: str) -> Iterator[Measurement]:
    for precision in ("tf32", "bf16"):
        machine = Machine("streams", device, precision=precision).resolved()
        with machine.applied():
            eagerly = baseline.eager_step(name, device, bf16=precision == "bf16")
        loop = measurement(f"{name} {precision}: plain eager loop", eagerly)
        yield loop
        big = baseline.one_big_batch_step(name, device, precision=precision)
        bound = measurement(f"{name} {precision}: bound, one batch of all", big)
        yield bound
        seconds = step_seconds(name, machine)
        yield measurement(
            f"{name} {precision}: streams",
            seconds,
            than_the_loop=loop.median_ms,
            of_the_bound=bound.median_ms,
        )
        crew = step_seconds(name, machine, together=True)
        yield measurement(
            f"{name} {precision}: batched",
            crew,
            than_the_loop=loop.median_ms,
            of_the_bound=bound.median_ms,
        )
    whole = 0.0
    for width in WIDTHS:
        seconds = step_seconds(name, machine, fleet=f"1x{width}", policy="prefix", together=True)
        found = measurement(f"{name} bf16: batched, all clients {width} wide", seconds)
        whole = whole or found.median_ms
        yield Measurement(
            found.what, found.milliseconds, (("of full width's time", found.median_ms / whole),)
        )
    usual = replace(machine, engine="auto")
    for fleet, policy in (("1x1.0", "full"), ("4x1.0 + 3x0.5 + 3x0.25", "rolling(spread=true)")):
        step = median(step_seconds(name, usual, fleet=fleet, policy=policy, together=None))
        yield from _rounds(name, usual, fleet, policy, 500, step)


def _rounds(
    name: str, machine: Machine, fleet: str, policy: str, samples: int, step: float | None = None
) -> Iterator[Measurement]:
    """Whole rounds, and the share of each phase; of training also that of its steps alone, if one of them is known."""
    rounds = round_seconds(name, machine, fleet=fleet, policy=policy, samples=samples)
    totals = [sum(phases.values()) for phases in rounds]
    shares = tuple(
        (phase, median([r[phase] / t for r, t in zip(rounds, totals, strict=True)]))
        for phase in rounds[0]
    )
    if step is not None:
        shares += (("steps alone", step * EPOCHS * samples / baseline.BATCH / median(totals)),)
    what = f"{name} {machine.precision}, {fleet} {policy}: a whole round, and its phases' shares"
    yield Measurement(what, tuple(1e3 * total for total in totals), shares)


def _lockstep(device: str) -> Iterator[Measurement]:
    machine = Machine("batched", device, precision="tf32").resolved()
    with machine.applied():
        loop = measurement(
            "mlp: plain eager loop, 10 clients", baseline.eager_step("mlp", device, repeats=20)
        )
    yield loop
    for clients in (10, *LOCKSTEP):
        seconds = step_seconds("mlp", machine, clients=clients, together=True)
        found = measurement(f"mlp tf32: {clients} clients in lockstep", seconds)
        rate = clients * baseline.BATCH / found.median_ms / 1e3
        yield Measurement(found.what, found.milliseconds, (("million images/s", rate),))


def page(
    lines: Sequence[Measurement],
    device: str,
    *,
    today: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> str:
    """The figures as a Markdown page with hardware, versions and date."""
    hardware = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{platform.machine()} CPU, one thread"
    )
    rows = [
        f"| {x.what} | {x.median_ms:.3f} | {min(x.milliseconds):.3f} to {max(x.milliseconds):.3f} "
        f"| {len(x.milliseconds)} | {', '.join(f'{name} {value:.3f}' for name, value in x.ratios)} |"
        for x in lines
    ]
    head = [
        f"# fedcover bench on {hardware}",
        "",
        f"{today():%Y-%m-%d}, fedcover {__version__}, torch {torch.__version__}, Python {platform.python_version()}.",
        "A step trains 10 clients by one mini-batch of 10 random images each: forward, backward, SGD with momentum.",
        "Milliseconds are the median of repetitions in one process. 'than the loop' is how many times faster, 'of the",
        "floor' and 'of the bound' the share of the speed that those have.",
        "",
        "| what | ms | from, to | repetitions | ratios |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])
