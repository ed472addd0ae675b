"""The steps and rounds of our own engines on random data, measured like the plain loop."""

import time
from collections.abc import Callable

import torch

from fedcover.analysis.bench.baseline import BATCH, BENCH_MODELS, CLIENTS, random_batches
from fedcover.host import scratch
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import engine_for
from fedcover.runs.setup import Machine, Overrides, prepare
from fedcover.server.round import RoundReport, Setup, initial_state, start_round
from fedcover.training.engines.batched import group_into_stacks, load_stack_runners
from fedcover.training.engines.buffers import ClientJob, client_inputs
from fedcover.training.engines.runners import RunnerCache, run_steps
from fedcover.training.engines.streams import load_client_runners
from fedcover.types import Assignment, Dataset, Samples

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
    wait: Callable[[], None] = torch.cuda.synchronize if machine.device.startswith("cuda") else lambda: None
    with machine.applied():
        cache, jobs = RunnerCache(), _jobs(setup)
        if together:
            runners = load_stack_runners(group_into_stacks(jobs, cache)[0], cache, machine.precision)
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


def training(name: str, machine: Machine, *, fleet: str, policy: str, samples: int) -> Callable[[], None]:
    """What the clients of a round do, by the machine's engine; their images are in memory, as the plain loop's are."""
    wanted = bench_experiment(
        name, clients=CLIENTS, fleet=fleet, policy=policy, samples=samples, epochs=EPOCHS, test=10
    )
    wanted = wanted.model_copy(update={"dataset": "digits"})
    images = random_images(name, machine.device, samples * wanted.clients, test=10)
    setup = prepare(wanted, machine, parts=Overrides(dataset=images))
    state = initial_state(setup)
    work = start_round(setup, state).work

    def train() -> None:
        for _ in setup.engine(setup.task, state, work, setup.lr(0)):
            pass

    return train


def _jobs(setup: Setup) -> list[ClientJob]:
    state = initial_state(setup)
    return [ClientJob(Assignment(setup.task, state, *each), setup.lr(0)) for each in start_round(setup, state).work]


def round_seconds(
    name: str, machine: Machine, *, fleet: str, policy: str, samples: int, test: int = 10_000, rounds: int = 3
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
        "random", Samples(x_N[:train], y_N[:train]), Samples(x_N[train:], y_N[train:]), BENCH_MODELS[name][2]
    )
