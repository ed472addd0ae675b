"""Run folders made up for tests of what reads them: any number of runs and rounds without
training.
"""

import json
import random
from pathlib import Path
from typing import Any

from fedcover.runs.experiment import Experiment


def made_up_run(
    folder: Path, done: int | None = None, *, layers: int = 2, noisy: bool = False, **fields: Any
) -> Path:
    """A run folder whose figures follow a curve; `noisy` pictures are as hard to compress as
    pictures can be.
    """
    experiment = Experiment(
        **{"clients": 20, "rounds": 6, "fleet": "1x1.0 + 1x0.5", "name": folder.name, **fields}
    )
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    machine = {
        "engine": "sequential",
        "device": "cpu",
        "threads": 1,
        "deterministic": False,
        "torch": "2",
    }
    (folder / "manifest.json").write_text(json.dumps({**machine, "fedcover": "0", "custom": []}))
    chance = random.Random(f"{experiment.policy}{experiment.seed}")
    lines = [
        line(experiment, round, layers, chance, noisy)
        for round in range(experiment.rounds if done is None else done)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def on_flower(folder: Path, why: str = "12 of 500 numbers are not finite") -> Path:
    """The same run as if real devices had made it: client 4 is refused in every round, a node is
    late in the second.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "engine": "flower"}))
    rounds = range((folder / "metrics.jsonl").read_text().count("\n"))
    events = [
        {"round": round, "event": "answered", "node": 1, "client": 2, "why": ""} for round in rounds
    ]
    events += [
        {"round": round, "event": "rejected", "node": 1, "client": 4, "why": why}
        for round in rounds
    ]
    events += [{"round": 1, "event": "late", "node": 7, "client": None, "why": "no answer in 5 s"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def line(
    experiment: Experiment, round: int, layers: int, chance: random.Random, noisy: bool
) -> dict[str, Any]:
    """One round; evaluated when the experiment says so."""
    clients = {
        str(2 * n): {"capacity": 1.0 if n < 5 else 0.5, "delta2": 0.1 * n, "loss": 1.0}
        for n in range(10)
    }
    last = round + 1 == experiment.rounds
    scores = {
        "accuracy": 1 - 0.9 / (1 + 0.3 * round + chance.random()),
        "loss": 2.3 / (1 + 0.2 * round),
    }
    return {
        "round": round,
        "lr": experiment.lr,
        "train_loss": 2.4 / (1 + round),
        "gamma_round": round % 3,
        "gamma_window": round,
        "histogram": {"1": 3},
        "clients": clients,
        "dropped": [],
        "delta2_mean": 0.3 * chance.random(),
        "parameters": 500.5,
        "multiply_adds": 480.0,
        "bytes_down": 10_000,
        "bytes_up": 9_000,
        "pictures": picture(layers, clients, chance, noisy),
        **(scores if last or (round + 1) % experiment.evaluate_every == 0 else {}),
        **({"accuracy_common": 0.7, "accuracy_single": 0.6} if last else {}),
        "seconds": {"policy": 0.01, "training": 0.2},
    }


def picture(
    layers: int, clients: dict[str, Any], chance: random.Random, noisy: bool
) -> dict[str, Any]:
    """Half of the clients train everything, the other half a moving part."""

    def drawn(length: int) -> str:
        return "".join(str(chance.randrange(10)) for _ in range(length))

    part = [drawn(144) if noisy else f"{drawn(12)}/9" for _ in range(layers)]
    parts = (
        [[drawn(144) for _ in range(layers)] for _ in clients] if noisy else [["9"] * layers, part]
    )
    return {
        "layers": {f"layer{n}.weight": [64, 32] for n in range(layers)},
        "clients": {id: place if noisy else place % 2 for place, id in enumerate(clients)},
        "parts": parts,
        "trained": [drawn(144) for _ in range(layers)],
        "missed": [drawn(144) if chance.random() < 0.5 else "0" for _ in range(layers)],
    }
