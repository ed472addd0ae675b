"""Time the engines of fedcover: single steps, the training of a round, and whole rounds."""

import time
from collections.abc import Callable
from dataclasses import replace

from fedcover.analysis.bench.baseline import (
    BATCH,
    BENCH_MODELS,
    CLIENTS,
    random_batches,
    synchronizer,
)
from fedcover.host import scratch
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, engine_for
from fedcover.runs.setup import Overrides, build_setup, prepare, prepare_workload
from fedcover.server.round import RoundReport, initial_state, start_round
from fedcover.server.round_setup import Setup
from fedcover.training.engines.batched import load_stack_runners
from fedcover.training.engines.client_inputs import ClientJob, client_inputs
from fedcover.training.engines.grouping import group_into_stacks
from fedcover.training.engines.runners import RunnerCache, run_steps
from fedcover.training.engines.streams import load_client_runners
from fedcover.types import Assignment, Dataset, Samples

EPOCHS = 5
STEPS = 10
"""Steps of each repetition, made without waiting in between, as in a round."""


def bench_experiment(
    name: str, *, clients: int, fleet: str, policy: str, samples: int, epochs: int, test: int
) -> Experiment:
    """Return an experiment on random data in the shape of MNIST or CIFAR."""
    model, shape, classes = BENCH_MODELS[name]
    return Experiment(
        dataset=f"synthetic(shape={shape}, classes={classes}, samples={samples}, test_size={test})",
        model=model,
        fleet=fleet,
        policy=policy,
        assignment="slot",
        clients=max(100, clients),
        active=clients,
        rounds=1000,
        epochs=epochs,
        batch_size=BATCH,
    )


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
    """Return the seconds of one step of all clients.

    With `together` the clients are trained in stacks, otherwise each by itself. None chooses as
    a run would.
    """
    experiment = bench_experiment(
        name, clients=clients, fleet=fleet, policy=policy, samples=STEPS * BATCH, epochs=1, test=10
    )
    workload = prepare_workload(experiment, machine.device)
    engine = engine_for(workload, machine.engine, machine.device)
    setup = build_setup(experiment, workload, replace(machine, engine=engine))
    if together is None:
        together = engine == "batched"
    wait = synchronizer(machine.device)
    with machine.applied():
        cache, jobs = RunnerCache(), _client_jobs(setup)
        if together:
            stacks = group_into_stacks(jobs, cache)[0]
            runners = load_stack_runners(stacks, cache, machine.precision)
        else:
            runners = load_client_runners(cache, list(client_inputs(jobs)), machine.precision)
        durations = []
        for _ in range(repeats + 1):
            for runner in runners:
                runner.load(runner.workspace.clients)
            wait()
            start = time.perf_counter()
            run_steps(runners)
            wait()
            durations.append((time.perf_counter() - start) / STEPS)
    return durations[1:]  # the first repetition warms up


def _client_jobs(setup: Setup) -> list[ClientJob]:
    state = initial_state(setup)
    return [
        ClientJob(Assignment(setup.task, state, *client_work), setup.lr(0))
        for client_work in start_round(setup, state).work
    ]


def training(
    name: str, machine: Machine, *, fleet: str, policy: str, samples: int
) -> Callable[[], None]:
    """Return a function that trains the clients of a round with the machine's engine.

    The images are in memory, as they are for the plain loop.
    """
    experiment = bench_experiment(
        name, clients=CLIENTS, fleet=fleet, policy=policy, samples=samples, epochs=EPOCHS, test=10
    )
    experiment = experiment.model_copy(update={"dataset": "digits"})
    images = random_images(name, machine.device, samples * experiment.clients, test=10)
    setup = prepare(experiment, machine, overrides=Overrides(dataset=images))
    state = initial_state(setup)
    work = start_round(setup, state).work

    def train() -> None:
        for _ in setup.engine(setup.task, state, work, setup.lr(0)):
            pass

    return train


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
    """Return the seconds of each phase of whole rounds; `files` is the time outside of phases.

    The first round, which prepares, and the last, which measures more, are left out.
    """
    experiment = bench_experiment(
        name, clients=CLIENTS, fleet=fleet, policy=policy, samples=samples, epochs=EPOCHS, test=10
    )
    experiment = experiment.model_copy(update={"dataset": "digits", "rounds": rounds + 2})
    images = random_images(name, machine.device, samples * experiment.clients, test)
    phases_by_round: list[dict[str, float]] = []
    round_ends: list[float] = []

    def watch(report: RoundReport) -> None:
        round_ends.append(time.perf_counter())
        phases_by_round.append(dict(report.metrics["seconds"]))

    with scratch.folder("bench") as folder:
        run(experiment, folder / "run", machine=machine, dataset=images, watch=watch)
    measured = range(1, len(phases_by_round) - 1)
    for index in measured:
        phases = phases_by_round[index]
        total = round_ends[index] - round_ends[index - 1]
        phases["files"] = total - sum(phases.values())
    return [phases_by_round[index] for index in measured]


def random_images(name: str, device: str, train: int, test: int) -> Dataset:
    """Return random images in the shape of a model's inputs, all in memory."""
    x_CN, y_CN = random_batches(name, device, 1, train + test)
    x_N, y_N = x_CN[0], y_CN[0]
    return Dataset(
        "random",
        Samples(x_N[:train], y_N[:train]),
        Samples(x_N[train:], y_N[train:]),
        BENCH_MODELS[name][2],
    )


def time_interleaved(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Time several functions in turn, so that all see the same load of the computer.

    The first turn, which warms up, does not count.
    """
    durations: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            durations[name].append(time.perf_counter() - start)
    return {name: measured[1:] for name, measured in durations.items()}
