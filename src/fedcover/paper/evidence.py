"""All results in a folder, by cell and seed, in percent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcover.paper import results, store
from fedcover.paper.cells import RATES, Cell, cell_id, cells
from fedcover.paper.smoke import smoke_cell
from fedcover.paper.statistics import (
    PairedDifference,
    SeedStatistics,
    paired_difference,
    seed_statistics,
)
from fedcover.paper.store import StoredResults

MAX_SEEDS = 10
"""Number of seeds whose results are looked up."""

TAIL_ROUNDS = 10
"""Number of last rounds whose mean is shown next to the last accuracy."""

SMOOTHING_ROUNDS = 5
"""Number of rounds whose mean must reach a target, so that a single lucky round does not count."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The results so far. The whole document is made from them and the paper's numbers."""

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
        """Every cell by its id in the tables; the small ones for a smoke run."""
        return {cell.id: smoke_cell(cell) if self.smoke else cell for cell in cells(self.rates)}

    @cached_property
    def results(self) -> dict[str, list[Result]]:
        """The results of each cell, one per seed."""
        return {
            id: results.find_results(self.records, cell, cell.seeds(MAX_SEEDS))
            for id, cell in self.cells.items()
        }

    def _completed(self, id: str) -> list[Result]:
        """Return the results of a cell that did not diverge."""
        return [result for result in self.results.get(id, []) if not result["diverged"]]

    def of(self, id: str, figure: str = "last") -> dict[int, float]:
        """Return an accuracy in percent by seed; runs that diverged have none."""
        percents = {}
        for result in self._completed(id):
            value = _accuracy(result, figure)
            if value is not None:
                percents[result["seed"]] = 100 * value
        return percents

    def seed_statistics(self, id: str, figure: str = "last") -> SeedStatistics | None:
        """Return mean and spread of an accuracy over the seeds."""
        return seed_statistics(list(self.of(id, figure).values()))

    def diverged(self, id: str) -> int:
        """Return the number of seeds of a cell that diverged."""
        return sum(result["diverged"] is not None for result in self.results.get(id, []))

    def swing(self, id: str) -> float | None:
        """Return how much the accuracy varies over the last rounds, as mean over seeds.

        The measure is the standard deviation in percent.
        """
        tails = [tail(result) for result in self._completed(id)]
        if not tails or min(map(len, tails)) < 2:
            return None
        return fmean(100 * stdev(accuracies) for accuracies in tails)

    def noise(self, id: str) -> float | None:
        """Return the mean reduction noise delta^2 of a cell."""
        noises = [result["delta2_mean"] for result in self.results.get(id, [])]
        known_noises = [noise for noise in noises if noise is not None]
        return fmean(known_noises) if known_noises else None

    def gamma(self, id: str) -> int | None:
        """Return the fewest clients that trained any parameter in any round, over all seeds."""
        gammas = [result["gamma_min"] for result in self.results.get(id, [])]
        return min((gamma for gamma in gammas if gamma is not None), default=None)

    def difference(self, first: str, second: str, figure: str = "last") -> PairedDifference | None:
        """Return one cell minus another, seed by seed."""
        return paired_difference(self.of(first, figure), self.of(second, figure))

    def rounds_to(self, id: str, percent: float) -> float | None:
        """Return after how many rounds the smoothed accuracy reached a target, as mean over seeds.

        None means that some seed never reached it.
        """
        rounds = []
        for result in self.results.get(id, []):
            round = _first_round_at(result["curve"], percent)
            if round is None:
                return None
            rounds.append(round)
        return fmean(rounds) if rounds else None

    def rate_scores(self, dataset: str) -> dict[float, float | None]:
        """Return the validation accuracy in percent of each learning rate."""
        scores: dict[float, float | None] = {}
        for rate in RATES:
            rate_results = self.results[cell_id(dataset, "iid", "full", f"rate{rate:g}")]
            scores[rate] = None
            if rate_results:
                scores[rate] = 100 * results.validation_score(rate_results[0])
        return scores

    def _all_results(self) -> list[Result]:
        return [result for cell_results in self.results.values() for result in cell_results]

    def machines(self) -> list[tuple[str, int, float]]:
        """Return hardware with software, the number of runs on it, and their seconds."""
        runs, seconds = Counter[str](), Counter[str]()
        for result in self._all_results():
            made = result["made"]
            machine = (
                f"{made['hardware']}, torch {made['torch']},"
                f" engine {made['engine']}, {made['precision']}"
            )
            runs[machine] += 1
            seconds[machine] += result["seconds"] or 0
        return [(machine, count, seconds[machine]) for machine, count in sorted(runs.items())]

    def states(self) -> Counter[str]:
        """Count the runs from a commit, from a changed commit, and from a copy without git."""
        return Counter(_source_state(result["made"]["commit"]) for result in self._all_results())

    def orphan_results(self) -> list[str]:
        """List results that belong to no cell and seed, and other JSON files in the folder."""
        claimed = {
            (cell.id, seed) for cell in self.cells.values() for seed in cell.seeds(MAX_SEEDS)
        }
        lines = [str(record) for key, record in self.records.items() if key not in claimed]
        return lines + [str(path) for path in store.other_files(self.folder)]


def tail(result: Result) -> list[float]:
    """Return the accuracies of the last rounds, as far as they were evaluated."""
    curve = result["curve"]
    first_round = result["rounds"] - TAIL_ROUNDS
    return [
        accuracy
        for round, accuracy in zip(curve["round"], curve["accuracy"], strict=True)
        if round > first_round
    ]


def _accuracy(result: Result, figure: str) -> float | None:
    if figure == "tail":
        accuracies = tail(result)
        return fmean(accuracies) if accuracies else None
    accuracy: float | None = result[figure]
    return accuracy


def _first_round_at(curve: Mapping[str, Any], percent: float) -> float | None:
    """Return the first round at which the mean of the last few rounds reaches a target."""
    rounds, accuracies = curve["round"], curve["accuracy"]
    first_end = min(SMOOTHING_ROUNDS, len(accuracies))
    for end in range(first_end, len(accuracies) + 1):
        window = accuracies[max(0, end - SMOOTHING_ROUNDS) : end]
        if 100 * fmean(window) >= percent:
            round: float = rounds[end - 1]
            return round
    return None


def _source_state(commit: str | None) -> str:
    if not commit:
        return "copy"
    return "changed" if "dirty" in commit else "commit"
