"""Compare designs, two cells at a time and seed by seed: equal seeds share data and cohorts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fedcover.paper.cells import cell_id
from fedcover.paper.claims import COLUMNS, DATASETS, claimed_accuracy
from fedcover.paper.designs import Design, designs
from fedcover.paper.evidence import Evidence
from fedcover.paper.statistics import PairedDifference, paired_difference
from fedcover.paper.wording import DISPLAY_NAMES, column_name, markdown_table

TARGET = 0.95
"""The share of the full model's accuracy that a design has to reach."""

GREEDY_SETTINGS = {"pruning": "pruning-greedy", "subnet": "subnet-static"}

PLACE_HEADINGS = [
    "data",
    "column",
    "level",
    "optimised",
    "greedy",
    "Γ",
    "δ²",
    "claimed difference",
    "ours",
    "seeds",
    "p",
    "optimised is",
    "last ten rounds",
    "rounds to target",
]

POOLED_HEADINGS = [
    "data",
    "kind",
    "column",
    "places",
    "of",
    "mean difference",
    "seeds",
    "p",
    "optimised is",
]


@dataclass(frozen=True)
class Comparison:
    """One claim of the paper: the optimised design against the greedy one of equal capacity."""

    dataset: str
    column: str
    kind: str
    greedy: Design
    optimised: Design
    suffix: str = ""

    @property
    def cells(self) -> tuple[str, str]:
        """The ids of the optimised cell and of the greedy one."""
        return (
            cell_id(self.dataset, self.column, self.optimised.name, self.suffix),
            cell_id(self.dataset, self.column, self.greedy.name, self.suffix),
        )

    @property
    def claim(self) -> float | None:
        """The printed difference in points."""
        optimised, greedy = (
            claimed_accuracy(self.dataset, self.column, design.level, design.setting)
            for design in (self.optimised, self.greedy)
        )
        return None if optimised is None or greedy is None else optimised - greedy


def comparisons() -> list[Comparison]:
    """Return every pair of an optimised and a greedy row in the main table."""
    pairs = []
    for dataset in DATASETS:
        rows = designs(dataset)
        for kind, greedy_setting in GREEDY_SETTINGS.items():
            greedy_rows = [row for row in rows if row.setting == greedy_setting]
            optimised_rows = [row for row in rows if row.setting == f"{kind}-optimised"]
            for column in COLUMNS[dataset]:
                for greedy, optimised in zip(greedy_rows, optimised_rows, strict=True):
                    pairs.append(Comparison(dataset, column, kind, greedy, optimised))
    return pairs


ComparedPlaces = Sequence[tuple[Comparison, PairedDifference]]
"""Comparisons that have runs, with the difference of their last accuracies."""


def block(evidence: Evidence) -> str:
    """Return all comparisons one by one, then pooled over each data set, seed by seed."""
    planned = comparisons()
    compared = with_results(evidence, planned)
    lead = f"{len(compared)} of {len(planned)} comparisons have runs."
    if not compared:
        return lead
    parts = [
        f"{lead} The optimised design is: {count_verdicts(compared)}.",
        _place_table(evidence, compared),
        _pooled_table(evidence, compared),
    ]
    return "\n\n".join(parts)


def second_rate_block(evidence: Evidence) -> str:
    """Return the comparisons at the second learning rate, as far as they have been run."""
    compared = with_results(evidence, at_second_rates(evidence))
    if not compared:
        return "No comparison at a second learning rate has runs."
    lead = f"At the second rate the optimised design is: {count_verdicts(compared)}."
    return f"{lead}\n\n{_place_table(evidence, compared)}"


def with_results(evidence: Evidence, places: Sequence[Comparison]) -> ComparedPlaces:
    """Return the comparisons that have runs of both designs, and the difference in each."""
    compared = []
    for comparison in places:
        difference = evidence.difference(*comparison.cells)
        if difference is not None:
            compared.append((comparison, difference))
    return compared


def at_second_rates(evidence: Evidence) -> list[Comparison]:
    """Return the comparisons of the medium level at the second learning rates."""
    rates = evidence.rates
    return [
        replace(comparison, suffix=f"lr{rates[comparison.dataset]:g}")
        for comparison in comparisons()
        if comparison.greedy.level == "medium" and comparison.dataset in rates
    ]


def count_verdicts(compared: ComparedPlaces) -> str:
    """Count the verdicts. For single seeds, which have none, count the signs."""
    counts = Counter(difference.verdict for _, difference in compared)
    text = ", ".join(f"{counts[word]} {word}" for word in ("higher", "lower", "undecided"))
    single_seed_means = [difference.mean for _, difference in compared if difference.p is None]
    if not single_seed_means:
        return text
    above = sum(mean > 0 for mean in single_seed_means)
    below = sum(mean < 0 for mean in single_seed_means)
    count = len(single_seed_means)
    return f"{text}, {count} with one seed, no verdict ({above} above, {below} below)"


def _place_table(evidence: Evidence, compared: ComparedPlaces) -> str:
    rows = [_place_row(evidence, comparison, paired) for comparison, paired in compared]
    return markdown_table(PLACE_HEADINGS, rows)


def _place_row(
    evidence: Evidence, comparison: Comparison, paired: PairedDifference
) -> list[object]:
    return [
        DISPLAY_NAMES[comparison.dataset],
        column_name(comparison.column),
        comparison.greedy.level,
        comparison.optimised.name,
        comparison.greedy.name,
        _both(comparison, evidence.gamma, "d"),
        _both(comparison, evidence.noise, ".3f"),
        f"{comparison.claim:+.2f}",
        *difference(paired),
        _tail_difference(evidence, comparison),
        _rounds_to_target(evidence, comparison),
    ]


def _both(comparison: Comparison, metric: Callable[[str], float | None], form: str) -> str:
    """Return a metric as optimised / greedy."""
    values = [metric(id) for id in comparison.cells]
    return " / ".join("" if value is None else format(value, form) for value in values)


def _tail_difference(evidence: Evidence, comparison: Comparison) -> str:
    paired = evidence.difference(*comparison.cells, "tail")
    return "" if paired is None else f"{difference(paired)[0]}"


def _rounds_to_target(evidence: Evidence, comparison: Comparison) -> str:
    """Return the rounds to 95 % of the full model's final accuracy, as optimised / greedy."""
    full_id = cell_id(comparison.dataset, comparison.column, "full", comparison.suffix)
    full = evidence.seed_statistics(full_id, "tail")
    if full is None:
        return ""
    rounds = [evidence.rounds_to(id, TARGET * full.mean) for id in comparison.cells]
    return " / ".join("never" if value is None else f"{value:.1f}" for value in rounds)


def difference(paired: PairedDifference) -> list[object]:
    """Return a paired difference as cells of a table."""
    spread = f" ± {paired.spread:.2f}" if paired.spread is not None else ""
    p = "" if paired.p is None else f"{paired.p:.3f}"
    return [f"{paired.mean:+.2f}{spread}", paired.seeds, p, paired.verdict]


def _pooled_table(evidence: Evidence, compared: ComparedPlaces) -> str:
    """Return each seed's mean difference over the comparisons that have all the seeds.

    Seeds are independent; comparisons of one seed are not.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for comparison, _ in compared:
        for column in ("all", comparison.column):
            groups[comparison.dataset, comparison.kind, column].append(comparison)
    rows = []
    for (dataset, kind, column), group in groups.items():
        complete = _with_all_seeds(evidence, group)
        for figure, figure_name in (("last", "last"), ("tail", "last ten rounds")):
            paired = _pooled_difference(evidence, complete, figure)
            if paired:
                names = [DISPLAY_NAMES[dataset], kind, column_name(column)]
                rows.append([*names, len(complete), figure_name, *difference(paired)])
    table = markdown_table(POOLED_HEADINGS, rows)
    return f"Pooled over levels, by column and over all columns:\n\n{table}"


def _with_all_seeds(evidence: Evidence, group: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons whose cells have as many seeds as any optimised cell."""
    most_seeds = max(len(evidence.of(comparison.cells[0])) for comparison in group)
    return [
        comparison
        for comparison in group
        if all(len(evidence.of(id)) == most_seeds for id in comparison.cells)
    ]


def _pooled_difference(
    evidence: Evidence, group: Sequence[Comparison], figure: str
) -> PairedDifference | None:
    optimised = _mean_by_seed(evidence, [pair.cells[0] for pair in group], figure)
    greedy = _mean_by_seed(evidence, [pair.cells[1] for pair in group], figure)
    return paired_difference(optimised, greedy)


def _mean_by_seed(evidence: Evidence, ids: Sequence[str], figure: str) -> dict[int, float]:
    """Return the mean over cells for each seed that all of them have."""
    accuracies = [evidence.of(id, figure) for id in ids]
    shared_seeds = set.intersection(*map(set, accuracies)) if accuracies else set()
    return {seed: fmean(by_seed[seed] for by_seed in accuracies) for seed in sorted(shared_seeds)}
