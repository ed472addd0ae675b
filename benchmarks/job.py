"""The MNIST job as plain arrays: everybody who is compared trains the same batches from the same
weights.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedcover.rng import generator
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.cohort import cohort_of
from fedcover.server.round import initial_state
from fedcover.server.round_setup import Setup

CLIENTS, ACTIVE, EPOCHS, BATCH, LR, MOMENTUM = 100, 10, 5, 10, 0.01, 0.5


@dataclass(frozen=True)
class Job:
    """Normalised images, who holds which rows, who takes part in which round, and the order of
    their rows.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    rows_CN: np.ndarray
    cohorts_RA: np.ndarray
    orders_RAEN: np.ndarray
    weights: dict[str, np.ndarray]


def experiment(rounds: int, dataset: str = "mnist") -> Experiment:
    """The job as fedcover describes it: federated averaging of the whole MLP 784-200-10."""
    return Experiment(
        dataset=dataset,
        partition="iid",
        model="mlp(hidden=[200])",
        fleet="1x1.0",
        policy="full",
        clients=CLIENTS,
        active=ACTIVE,
        epochs=EPOCHS,
        batch_size=BATCH,
        lr=LR,
        momentum=MOMENTUM,
        rounds=rounds,
        evaluate_every=1,
    )


def mnist_job(rounds: int, dataset: str = "mnist", data: str | Path | None = None) -> Job:
    """The arrays of that job, drawn from the same addresses from which fedcover draws."""
    setup = prepare(experiment(rounds, dataset), Machine(device="cpu").resolved(), data=data)
    source = setup.task.source
    shards = [source.shard(client) for client in range(CLIENTS)]
    cohorts = [[client.id for client in cohort_of(setup, round)] for round in range(rounds)]
    samples = shards[0].samples
    return Job(
        train_x=samples.x.flatten(1).numpy(),
        train_y=samples.y.numpy(),
        test_x=source.test.x.flatten(1).numpy(),
        test_y=source.test.y.numpy(),
        rows_CN=np.stack([shard.index.numpy() for shard in shards]),
        cohorts_RA=np.array(cohorts),
        orders_RAEN=np.stack(
            [[_orders(setup, r, client) for client in cohort] for r, cohort in enumerate(cohorts)]
        ),
        weights={name: tensor.numpy() for name, tensor in initial_state(setup).params.items()},
    )


def _orders(setup: Setup, round: int, client: int) -> np.ndarray:
    rows = len(setup.task.source.shard(client).index)
    draws = [generator(setup.task.seed, "shuffle", round, client, epoch) for epoch in range(EPOCHS)]
    return np.stack([torch.randperm(rows, generator=draw).numpy() for draw in draws]).astype(
        np.int32
    )


def save(job: Job, path: Path) -> None:
    """Write the job as one file that needs only NumPy to read."""
    arrays = {name: getattr(job, name) for name in Job.__dataclass_fields__ if name != "weights"}
    np.savez(path, **arrays, **{f"weights/{name}": value for name, value in job.weights.items()})
