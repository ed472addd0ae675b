"""The main job in under a minute, offline: one small fleet, five ways to share the model out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fedcover.runs.api import RoundCallback, Run, run
from fedcover.runs.experiment import Experiment

FLEET = "5x0.5 + 5x0.25"
"""No device of this fleet holds more than half of the model."""

DEMO_POLICIES = {
    "prefix": "nested sub-networks (HeteroFL)",
    "rolling(spread=true)": "sub-networks that move every round (FedRolex), spread over the clients",
    "magnitude": "greedy weight pruning",
    "homogeneous": "everybody trains what the smallest device holds",
    "full": "everybody trains everything: needs devices that this fleet has not",
}


def experiments(rounds: int, seed: int) -> list[Experiment]:
    """The five experiments, equal in everything but the policy; capacity is a share of the parameters."""
    return [
        Experiment(
            name=policy.partition("(")[0],
            dataset="digits",
            model="mlp(hidden=[64])",
            fleet=FLEET,
            capacity="parameters",
            policy=policy,
            clients=20,
            rounds=rounds,
            seed=seed,
        )
        for policy in DEMO_POLICIES
    ]


def demo(
    folder: Path,
    rounds: int,
    seed: int,
    show_progress: Callable[[str, int], AbstractContextManager[RoundCallback]],
) -> list[Run]:
    """Run the line-up into one folder."""
    results = []
    for experiment in experiments(rounds, seed):
        with show_progress(f"{experiment.name:12}", rounds) as watch:
            results.append(run(experiment, folder / experiment.name, watch=watch))
    return results
