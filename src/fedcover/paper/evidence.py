"""All results that lie in a folder, by cell and seed, in percent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcover.paper import results, store
from fedcover.paper.cells import RATES, Cell, cell_id, cells, smoke_cell
from fedcover.paper.statistics import (
    PairedDifference,
    SeedStatistics,
    paired_difference,
    seed_statistics,
)
from fedcover.paper.store import StoredResults

MAX_SEEDS = 10
"""Results of so many seeds are looked for."""

TAIL_ROUNDS = 10
"""The rounds at the end whose mean is shown beside the last one."""

SMOOTHING_ROUNDS = 5
"""Rounds whose mean must reach a target: one lucky round is none."""


@dataclass(frozen=True)
class Evidence:
    """What is known so far; everything that is written about the reproduction is made from this."""

    folder: Path
    smoke: bool = False

    @cached_property
    def records(self) -> StoredResults:
        """Every result in the folder."""
        return store.load(self.folder)

    @cached_property
    def rates(self) -> dict[str, float]:
        """The second learning rates, for data sets whose rates have been tried."""
        return results.second_rates(self.records, cells({}))

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """Every cell by its name in the tables; of a smoke run, the small ones."""
        return {cell.id: smoke_cell(cell) if self.smoke else cell for cell in cells(self.rates)}

    @cached_property
    def results(self) -> dict[str, list[Mapping[str, Any]]]:
        """Of every cell, what its seeds have given."""
        return {
            id: results.find_results(self.records, cell, cell.seeds(MAX_SEEDS))
            for id, cell in self.cells.items()
        }

    def of(self, id: str, figure: str = "last") -> dict[int, float]:
        """An accuracy in percent by seed; runs that diverged have none."""
        seen = {
            run["seed"]: _figure(run, figure)
            for run in self.results.get(id, [])
            if not run["diverged"]
        }
        return {seed: 100 * value for seed, value in seen.items() if value is not None}

    def seed_statistics(self, id: str, figure: str = "last") -> SeedStatistics | None:
        """Mean and spread of an accuracy over the seeds."""
        return seed_statistics(list(self.of(id, figure).values()))

    def diverged(self, id: str) -> int:
        """How many seeds of a cell diverged."""
        return sum(run["diverged"] is not None for run in self.results.get(id, []))

    def swing(self, id: str) -> float | None:
        """How far the accuracy moves from round to round at the end: its standard deviation, mean over the seeds."""
        ends = [tail(run) for run in self.results.get(id, []) if not run["diverged"]]
        return fmean(100 * stdev(end) for end in ends) if ends and min(map(len, ends)) > 1 else None

    def noise(self, id: str) -> float | None:
        """The mean reduction noise delta^2 of a cell."""
        seen = [
            run["delta2_mean"] for run in self.results.get(id, []) if run["delta2_mean"] is not None
        ]
        return fmean(seen) if seen else None

    def gamma(self, id: str) -> int | None:
        """The fewest clients that trained any parameter in any round, over all seeds."""
        return min(
            (run["gamma_min"] for run in self.results.get(id, []) if run["gamma_min"] is not None),
            default=None,
        )

    def difference(self, first: str, second: str, figure: str = "last") -> PairedDifference | None:
        """One cell minus another, seed by seed."""
        return paired_difference(self.of(first, figure), self.of(second, figure))

    def rounds_to(self, id: str, percent: float) -> float | None:
        """Mean over seeds of the first round by which the mean of `SMOOTHING_ROUNDS` rounds was reached; None if it never was."""
        first = []
        for run in self.results.get(id, []):
            rounds, scores = run["curve"]["round"], run["curve"]["accuracy"]
            ends = range(min(SMOOTHING_ROUNDS, len(scores)), len(scores) + 1)
            reached = [
                rounds[n - 1]
                for n in ends
                if 100 * fmean(scores[max(0, n - SMOOTHING_ROUNDS) : n]) >= percent
            ]
            if not reached:
                return None
            first.append(reached[0])
        return fmean(first) if first else None

    def rate_scores(self, dataset: str) -> dict[float, float | None]:
        """Validation accuracy in percent of the learning rates that were tried."""
        runs = {
            rate: self.results[cell_id(dataset, "iid", "full", f"rate{rate:g}")] for rate in RATES
        }
        return {
            rate: 100 * results.validation_score(found[0]) if found else None
            for rate, found in runs.items()
        }

    def machines(self) -> list[tuple[str, int, float]]:
        """With what runs were made: hardware and software, how many runs, how many seconds."""
        runs, seconds = Counter[str](), Counter[str]()
        for run in (run for found in self.results.values() for run in found):
            made = run["made"]
            name = f"{made['hardware']}, torch {made['torch']}, engine {made['engine']}, {made['precision']}"
            runs[name] += 1
            seconds[name] += run["seconds"] or 0
        return [(name, count, seconds[name]) for name, count in sorted(runs.items())]

    def states(self) -> Counter[str]:
        """From what source runs were made: a commit, a commit with changes, or a copy without git."""
        made = [run["made"]["commit"] for found in self.results.values() for run in found]
        return Counter(
            "copy" if not commit else "changed" if "dirty" in commit else "commit"
            for commit in made
        )

    def orphan_results(self) -> list[str]:
        """List results that belong to no cell and seed, and other JSON files in the folder."""
        claimed = {
            (cell.id, seed) for cell in self.cells.values() for seed in cell.seeds(MAX_SEEDS)
        }
        lines = [str(record) for key, record in self.records.items() if key not in claimed]
        return lines + [str(path) for path in store.other_files(self.folder)]


def tail(run: Mapping[str, Any]) -> list[float]:
    """The accuracies of the last rounds, as far as they were looked at."""
    curve = run["curve"]
    return [
        score
        for r, score in zip(curve["round"], curve["accuracy"], strict=True)
        if r > run["rounds"] - TAIL_ROUNDS
    ]


def _figure(run: Mapping[str, Any], figure: str) -> float | None:
    if figure != "tail":
        value: float | None = run[figure]
        return value
    return fmean(end) if (end := tail(run)) else None
