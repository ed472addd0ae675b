"""The demo: one small fleet, five ways to assign parts of the model. Offline, under a minute."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fedcover.runs.api import RoundCallback, run
from fedcover.runs.experiment import Experiment
from fedcover.runs.run_result import Run

FLEET = "5x0.5 + 5x0.25"
"""No device of this fleet holds more than half of the model."""

DEMO_POLICIES = {
    "prefix": "nested sub-networks (HeteroFL)",
    "rolling(spread=true)": "sub-networks that move every round (FedRolex), spread over clients",
    "magnitude": "greedy weight pruning",
    "homogeneous": "every client trains what the smallest device can hold",
    "full": "every client trains the full model: needs larger devices than this fleet has",
}


def experiments(rounds: int, seed: int) -> list[Experiment]:
    """Return the five experiments, which differ only in the policy.

    A capacity is a share of the parameters.
    """
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
    """Run the five experiments, each in its own folder below `folder`."""
    results = []
    for experiment in experiments(rounds, seed):
        with show_progress(f"{experiment.name:12}", rounds) as watch:
            results.append(run(experiment, folder / experiment.name, watch=watch))
    return results
