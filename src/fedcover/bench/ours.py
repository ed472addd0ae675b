"""The steps and rounds of our own engines on random data, measured like the plain loop."""

import time
from collections.abc import Callable
from functools import partial

import torch

from fedcover.bench.eager import BATCH, CLIENTS
from fedcover.engines.batched import crews
from fedcover.engines.lanes import Arrival, Job, arrival
from fedcover.engines.pools import Place, Pool, captured, compiled, drive, plainly
from fedcover.engines.streams import placed
from fedcover.experiment import Experiment
from fedcover.preparation import Machine, prepare
from fedcover.rounds import Setup, ask, first_state, run_round
from fedcover.types import Assignment

STEPS = 10
"""Steps of each repetition, made without waiting in between, as in a round."""

MODELS = {
    "mlp": ("mlp(hidden=[200])", "(1, 28, 28)", 10),
    "wrn28-2": ("wide_resnet(depth=28, widen=2)", "(3, 32, 32)", 10),
    "wrn28-8": ("wide_resnet(depth=28, widen=8)", "(3, 32, 32)", 100),
}


def described(name: str, *, clients: int, fleet: str, policy: str, samples: int, epochs: int, test: int) -> Experiment:
    """An experiment on random data in the shape of MNIST or CIFAR."""
    model, shape, classes = MODELS[name]
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
    together: bool = False,
    repeats: int = 10,
) -> list[float]:
    """Seconds of one step of all clients: each in a lane of its own, or `together` in crews."""
    wanted = described(name, clients=clients, fleet=fleet, policy=policy, samples=STEPS * BATCH, epochs=1, test=10)
    setup = prepare(wanted, machine)
    wait: Callable[[], None] = torch.cuda.synchronize if machine.device.startswith("cuda") else lambda: None
    with machine.applied():
        places = _crews(setup, machine) if together else placed(Pool(), _arrivals(setup), machine.precision)
        found = []
        for _ in range(repeats + 1):
            for place in places:
                place.load(place.lane.clients)
            wait()
            start = time.perf_counter()
            drive(places)
            wait()
            found.append((time.perf_counter() - start) / STEPS)
    return found[1:]


def _arrivals(setup: Setup) -> list[Arrival]:
    state = first_state(setup)
    return [arrival(Job(Assignment(setup.task, state, *each), setup.lr(0))) for each in ask(setup, state).work]


def _crews(setup: Setup, machine: Machine) -> list[Place]:
    make = captured if machine.device.startswith("cuda") else plainly if machine.engine == "streams" else compiled
    alike: dict[object, list[Arrival]] = {}
    for client in _arrivals(setup):
        alike.setdefault(client.shape(client.rows), []).append(client)
    places: list[Place] = []
    pool = Pool()
    for clients in alike.values():
        for crew in crews(clients, []):
            place = pool.place(crew, crew[0].shape(crew[0].rows), len(crew), len(places), make, machine.precision)
            place.load(crew)
            places.append(place)
    return places


def round_seconds(
    name: str, machine: Machine, *, fleet: str, policy: str, samples: int, rounds: int = 3
) -> list[dict[str, float]]:
    """Where the time of whole rounds goes, phase by phase; the first round, which prepares, is left out."""
    run = partial(described, name, clients=CLIENTS, samples=samples, epochs=5, test=10_000)
    setup = prepare(run(fleet=fleet, policy=policy), machine)
    found = []
    with machine.applied():
        state = first_state(setup)
        for _ in range(rounds + 1):
            state, report = run_round(setup, state)
            found.append(dict(report.metrics["seconds"]))
    return found[1:]
