"""Run the comparison of plans/averaging.md, and write its tables.

    python -m benchmarks.averaging --only mnist --device cpu --workers 2
    python -m benchmarks.averaging --table

A finished run is one line of results/averaging.jsonl. Run the same command again to continue.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.coverage.student import Contrast, holm, paired_contrast, quantile
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.evaluation import evaluate
from fedcover.server.round import initial_state, run_round
from fedcover.server.round_cache import RoundCache
from fedcover.server.round_setup import Setup
from fedcover.types import Params, State

RESULTS = Path(__file__).parent / "results" / "averaging.jsonl"
WINDOWS = (5, 10, 20, 50)
DECAYS = (0.8, 0.9, 0.95, 0.98)
POLICIES = {
    "full": "full",
    "prefix": "prefix",
    "magnitude": "magnitude",
    "rolling": "rolling(spread=true)",
    "planned": "planned",
}
FLEETS = {"whole": "1x1.0", "mixed": "4x1.0 + 6x0.5", "halves": "4x0.5 + 6x0.25"}
SPLITS = {"iid": "iid", "labels2": "labels(limit=2)", "dirichlet": "dirichlet(alpha=0.1)"}
SHARED: dict[str, Any] = {
    "clients": 100,
    "active": 10,
    "assignment": "slot",
    "capacity": "parameters",
    "momentum": 0.5,
    "rounds": 100,
    "validation": 0.1,
    "lr": 0.1,
    "evaluate_every": 100,
}
DATA: dict[str, dict[str, Any]] = {
    "mnist": {"dataset": "mnist", "model": "mlp", "batch_size": 20, "epochs": 2},
    "cifar10": {
        "dataset": "cifar10",
        "model": "wide_resnet(depth=28, widen=2)",
        "batch_size": 10,
        "epochs": 5,
    },
}
SEEDS = {"mnist": range(5), "cifar10": range(3)}
SMALLEST_DIFFERENCE = 0.005
"""The difference of accuracies that matters."""


# ── runs ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cell:
    """One run of the comparison."""

    data: str
    split: str
    fleet: str
    policy: str
    seed: int

    @property
    def experiment(self) -> Experiment:
        """The run as an experiment."""
        return Experiment(
            **SHARED,
            **DATA[self.data],
            fleet=FLEETS[self.fleet],
            policy=POLICIES[self.policy],
            partition=SPLITS[self.split],
            seed=self.seed,
        )


CELL_FIELDS = ("data", "split", "fleet", "policy", "seed")


def cells(data: str) -> list[Cell]:
    """Return the runs of a data set, one seed after the other."""
    return [
        Cell(data, split, fleet, policy, seed)
        for seed, split, fleet, policy in product(SEEDS[data], SPLITS, FLEETS, POLICIES)
        if (fleet == "whole") == (policy == "full")
    ]


def run_cell(cell: Cell, machine: Machine) -> dict[str, Any]:
    """Train once, and score the last model and all candidates."""
    setup = prepare(cell.experiment, machine)
    with machine.applied():
        models, state = _train(setup)
        scores = {"last": _scores(setup, state)}
        for name, params in _averages(models):
            averaged = replace(state, params=params, statistics={})
            scores[name] = _scores(setup, averaged)
    shares = [
        float(torch.cat([c.flatten() for c in covered.values()]).double().mean())
        for _, covered in models
    ]
    return {
        "data": cell.data,
        "split": cell.split,
        "fleet": cell.fleet,
        "policy": cell.policy,
        "seed": cell.seed,
        "digest": cell.experiment.digest,
        "covered": round(fmean(shares), 4),
        "scores": scores,
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{machine.device}, torch {torch.__version__}, {machine.precision}",
    }


def _train(setup: Setup) -> tuple[list[tuple[Params, Params]], State]:
    """Return the model after each round with the entries that were trained, and the last state."""
    state, cache = initial_state(setup), RoundCache.of(setup)
    models = []
    for _ in range(setup.experiment.rounds):
        state, _ = run_round(setup, state, cache)
        covered = {name: counts > 0 for name, counts in state.coverage.window[-1].items()}
        models.append((dict(state.params), covered))
    return models, state


def _averages(models: Sequence[tuple[Params, Params]]) -> Iterator[tuple[str, Params]]:
    """Return all candidates by name."""
    everywhere = [
        (params, {name: torch.ones_like(mask) for name, mask in covered.items()})
        for params, covered in models
    ]
    for suffix, entries in (("", everywhere), (" covered", models)):
        for length in WINDOWS:
            yield f"window {length}{suffix}", window_mean(entries[-length:], models[-1][0])
        for decay in DECAYS:
            yield f"ema {decay:g}{suffix}", moving_average(entries, decay)


def window_mean(entries: Sequence[tuple[Params, Params]], last: Params) -> Params:
    """Average each entry over its covered rounds; without any, take its last value."""
    means = {}
    for name, value in last.items():
        total = torch.zeros_like(value, dtype=torch.float64)
        rounds = torch.zeros_like(total)
        for params, covered in entries:
            total += params[name].double() * covered[name]
            rounds += covered[name]
        mean = total / rounds.clamp(min=1)
        means[name] = torch.where(rounds > 0, mean, value.double()).to(value.dtype)
    return means


def moving_average(entries: Sequence[tuple[Params, Params]], decay: float) -> Params:
    """Average each entry over its covered rounds, with weights that decay by these rounds."""
    averages = {}
    for name, first in entries[0][0].items():
        average = first.double()
        rounds = torch.ones_like(average)
        for params, covered in entries[1:]:
            rounds += covered[name]
            rate = torch.clamp(1 / rounds, min=1 - decay) * covered[name]
            average = average + rate * (params[name].double() - average)
        averages[name] = average.to(first.dtype)
    return averages


def _scores(setup: Setup, state: State) -> dict[str, float]:
    source = setup.task.source
    assert source.validation is not None
    return {
        "validation": round(evaluate(setup.task, state, source.validation).accuracy, 5),
        "test": round(evaluate(setup.task, state, source.test).accuracy, 5),
    }


def run_missing(todo: Sequence[Cell], machine: Machine, workers: int, results: Path) -> None:
    """Run cells in worker processes, and write each line as soon as its run has ended."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        lines = pool.imap_unordered(partial(run_cell, machine=machine), todo)
        for number, line in enumerate(lines, 1):
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            accuracies = {name: score["test"] for name, score in line["scores"].items()}
            print(
                f"{number}/{len(todo)}",
                line["split"],
                line["policy"],
                line["seed"],
                accuracies["last"],
                accuracies["window 20"],
                flush=True,
            )


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return the stored runs; none if there is no file."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the decisions of the plan as Markdown."""
    parts = []
    for data in DATA:
        chosen = [line for line in lines if line["data"] == data]
        if chosen:
            parts += [f"## {data}: {len(chosen)} runs", "", candidates_table(chosen), ""]
            parts += [worth_table(chosen), "", policy_table(chosen), ""]
    return "\n".join(parts)


def best_candidate(lines: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the plain candidate of a kind with the highest mean validation accuracy."""
    names = [name for name in lines[0]["scores"] if name.startswith(kind) and "cov" not in name]
    return max(names, key=lambda name: _mean(lines, name, "validation"))


def candidates_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return mean validation accuracies by candidate and split, in percent."""
    rows = ["| candidate (validation) | " + " | ".join([*SPLITS, "mean"]) + " |"]
    rows.append("|---" * (len(SPLITS) + 2) + "|")
    for name in lines[0]["scores"]:
        means = [_mean(_of_split(lines, split), name, "validation") for split in SPLITS]
        cells = [f"{100 * mean:.2f}" for mean in [*means, _mean(lines, name, "validation")]]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def worth_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what the best window is worth against the last round, on test data."""
    best = best_candidate(lines, "window")
    rows = [
        f"| split | last round | {best} | difference of the seeds' means |",
        "|---|---|---|---|",
    ]
    for split in SPLITS:
        chosen = _of_split(lines, split)
        if not chosen:
            continue
        differences = []
        for seed in sorted({line["seed"] for line in chosen}):
            own = [line for line in chosen if line["seed"] == seed]
            differences.append(_mean(own, best, "test") - _mean(own, "last", "test"))
        rows.append(
            f"| {split} | {100 * _mean(chosen, 'last', 'test'):.2f} | "
            f"{100 * _mean(chosen, best, 'test'):.2f} | {_interval(differences)} |"
        )
    return "\n".join(rows)


def policy_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return accuracies by fleet and policy, and all contrasts, for the averaged model."""
    best = best_candidate(lines, "window")
    rows = ["| split | fleet | policy | last round | averaged |", "|---|---|---|---|---|"]
    verdicts = [
        "| split | fleet | contrast (averaged) | points | corrected p | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for split, fleet in product(SPLITS, FLEETS):
        of_fleet = [line for line in _of_split(lines, split) if line["fleet"] in ("whole", fleet)]
        by_policy: dict[str, dict[int, float]] = {}
        for policy in POLICIES:
            of_policy = [line for line in of_fleet if line["policy"] == policy]
            if not of_policy:
                continue
            averaged = {line["seed"]: line["scores"][best]["test"] for line in of_policy}
            by_policy[policy] = averaged
            if of_policy[0]["fleet"] == fleet:
                last = [line["scores"]["last"]["test"] for line in of_policy]
                accuracies = f"{_spread(last)} | {_spread(list(averaged.values()))}"
                rows.append(f"| {split} | {fleet} | {policy} | {accuracies} |")
        for contrast in _contrasts(by_policy):
            verdict = contrast.verdict(SMALLEST_DIFFERENCE, ("higher", "lower"))
            points = f"{100 * contrast.mean:+.2f} ± {100 * contrast.half_width:.2f}"
            verdicts.append(
                f"| {split} | {fleet} | {contrast.name} | {points} | "
                f"{contrast.corrected:.3f} | {verdict} |"
            )
    return "\n".join([*rows, "", *verdicts])


def _contrasts(by_policy: Mapping[str, Mapping[int, float]]) -> list[Contrast]:
    contrasts: list[Contrast] = []
    for first, second in combinations(by_policy, 2):
        name = f"{first} minus {second}"
        contrasts += paired_contrast(name, by_policy[first], by_policy[second])
    return holm(contrasts)


def _of_split(lines: Sequence[Mapping[str, Any]], split: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["split"] == split]


def _mean(lines: Sequence[Mapping[str, Any]], name: str, rows: str) -> float:
    values = [line["scores"][name][rows] for line in lines]
    return fmean(values) if values else float("nan")


def _spread(values: Sequence[float]) -> str:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{100 * fmean(values):.2f} ± {100 * deviation:.2f}"


def _interval(differences: Sequence[float]) -> str:
    """Return mean and half width of the 95 % interval, in points."""
    if len(differences) < 2:
        return f"{100 * fmean(differences):+.2f}"
    half = quantile(0.95, len(differences) - 1) * stdev(differences) / sqrt(len(differences))
    return f"{100 * fmean(differences):+.2f} ± {100 * half:.2f}"


def main() -> None:
    """Read the command line; run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=DATA, action="append", help="data sets (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="batched")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="only so many seeds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the tables")
    words = parser.parse_args()
    if not words.table:
        finished = {
            Cell(*(line[name] for name in CELL_FIELDS)) for line in read_lines(words.results)
        }
        todo = [
            cell
            for data in words.only or DATA
            for cell in cells(data)
            if cell not in finished and (words.seeds is None or cell.seed < words.seeds)
        ]
        machine = Machine(words.engine, words.device, 1, precision=words.precision).resolved()
        run_missing(todo, machine, words.workers, words.results)
    print(tables(read_lines(words.results)))


if __name__ == "__main__":
    main()
