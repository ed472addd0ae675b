"""Measure how each departure of the public code changes the result of the algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcover.errors import unknown
from fedcover.paper.public_code import SWITCHES, public_code
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.run_result import Run
from fedcover.types import Params


def settings(only: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the settings to compare: no switch, every switch alone, and all of them."""
    for name in only:
        if name not in SWITCHES:
            raise unknown("switch", name, SWITCHES)
    switches = tuple(only) or SWITCHES
    return {"faithful": (), **{name: (name,) for name in switches}, "all": switches}


@dataclass(frozen=True)
class Algorithm:
    """What all settings run: a codename on a data set, after another codename has run."""

    codename: str
    previous: str
    dataset: str
    rounds: int
    clients: int
    data: str | Path | None


def explain(
    codename: str,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    dataset: str = "digits",
    rounds: int = 20,
    clients: int = 100,
    previous: str = "1111111111",
    only: Sequence[str] = (),
    data: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Run every setting with every seed, and return one row per setting.

    `previous` is the codename that ran before, which the switch `leak` needs.
    """
    algorithm = Algorithm(codename, previous, dataset, rounds, clients, data)
    rows = []
    for name, switches in settings(only).items():
        runs = []
        for seed in seeds:
            tell(f"{name}, seed {seed}")
            runs.append(_run(algorithm, switches, seed))
        accuracies = [result.accuracy for result in runs]
        rows.append({
            "setting": name,
            "accuracy": fmean(accuracies),
            "spread": stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "first_round": fmean(result.metrics[0]["accuracy"] for result in runs),
            "noise": fmean(result.summary["delta2_mean"] for result in runs),
            "gamma_min": min(result.gamma_min for result in runs),
            "seeds": len(seeds),
        })  # fmt: skip
    return rows


def _run(algorithm: Algorithm, switches: Sequence[str], seed: int) -> Run:
    experiment = Experiment(
        dataset=algorithm.dataset,
        model="mlp(dropout=0.5)" if "dropout" in switches else "mlp",
        policy=f"regions(codename={algorithm.codename!r})",
        uncovered="zero" if "zero" in switches else "keep",
        clients=algorithm.clients,
        rounds=algorithm.rounds,
        seed=seed,
    )
    policy = partial(
        public_code,
        codename=algorithm.codename,
        argsort="argsort" in switches,
        wrong_net="wrong_net" in switches,
        unmasked="unmasked" in switches,
        leaked=_previous_params(algorithm, switches, seed) if "leak" in switches else None,
    )
    return run(experiment, policy=policy, data=algorithm.data)


def _previous_params(algorithm: Algorithm, switches: Sequence[str], seed: int) -> Params:
    """Return the trained model of the codename that ran before, without a leak of its own."""
    previous = replace(algorithm, codename=algorithm.previous)
    other_switches = [switch for switch in switches if switch != "leak"]
    return _run(previous, other_switches, seed).state.params
