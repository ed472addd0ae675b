"""Measure how each departure of the public code changes the result of the algorithm."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcover.errors import unknown
from fedcover.paper.public_code import SWITCHES, public_code
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.run_result import Run


def settings(only: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the settings to compare: no switch, every switch alone, and all of them."""
    for name in only:
        if name not in SWITCHES:
            raise unknown("switch", name, SWITCHES)
    chosen = tuple(only) or SWITCHES
    return {"faithful": (), **{name: (name,) for name in chosen}, "all": chosen}


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
    rows = []
    for name, switches in settings(only).items():
        runs = []
        for seed in seeds:
            tell(f"{name}, seed {seed}")
            runs.append(_run(codename, switches, seed, dataset, rounds, clients, previous, data))
        accuracy = [result.accuracy for result in runs]
        rows.append({
            "setting": name,
            "accuracy": fmean(accuracy),
            "spread": stdev(accuracy) if len(accuracy) > 1 else 0.0,
            "first_round": fmean(result.metrics[0]["accuracy"] for result in runs),
            "noise": fmean(result.summary["delta2_mean"] for result in runs),
            "gamma_min": min(result.gamma_min for result in runs),
            "seeds": len(seeds),
        })  # fmt: skip
    return rows


def _run(
    codename: str,
    switches: Sequence[str],
    seed: int,
    dataset: str,
    rounds: int,
    clients: int,
    previous: str,
    data: str | Path | None,
) -> Run:
    experiment = Experiment(
        dataset=dataset,
        model="mlp(dropout=0.5)" if "dropout" in switches else "mlp",
        policy=f"regions(codename={codename!r})",
        uncovered="zero" if "zero" in switches else "keep",
        clients=clients,
        rounds=rounds,
        seed=seed,
    )
    leaked = None
    if "leak" in switches:
        before = _run(
            previous,
            [s for s in switches if s != "leak"],
            seed,
            dataset,
            rounds,
            clients,
            previous,
            data,
        )
        leaked = before.state.params
    policy = partial(
        public_code,
        codename=codename,
        argsort="argsort" in switches,
        wrong_net="wrong_net" in switches,
        unmasked="unmasked" in switches,
        leaked=leaked,
    )
    return run(experiment, policy=policy, data=data)
