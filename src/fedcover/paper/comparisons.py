"""Which setting is better? Two cells at a time, seed by seed, since equal seeds share data, cohorts and weights."""

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


@dataclass(frozen=True)
class Comparison:
    """The paper's claim in one place: the optimised design against the greedy one of the same fleet and kind."""

    dataset: str
    column: str
    kind: str
    greedy: Design
    optimised: Design
    suffix: str = ""

    @property
    def cells(self) -> tuple[str, str]:
        """The optimised cell and the greedy one."""
        place = self.dataset, self.column
        return cell_id(*place, self.optimised.name, self.suffix), cell_id(
            *place, self.greedy.name, self.suffix
        )

    @property
    def claim(self) -> float | None:
        """The printed difference in points."""
        better = claimed_accuracy(
            self.dataset, self.column, self.optimised.level, self.optimised.setting
        )
        worse = claimed_accuracy(self.dataset, self.column, self.greedy.level, self.greedy.setting)
        return None if better is None or worse is None else better - worse


def comparisons() -> list[Comparison]:
    """Every place of the main table in which an optimised row stands beside a greedy one."""
    found = []
    for dataset in DATASETS:
        rows = designs(dataset)
        for kind, plain in (("pruning", "pruning-greedy"), ("subnet", "subnet-static")):
            greedy = [row for row in rows if row.setting == plain]
            optimised = [row for row in rows if row.setting == f"{kind}-optimised"]
            found += [
                Comparison(dataset, column, kind, worse, better)
                for column in COLUMNS[dataset]
                for worse, better in zip(greedy, optimised, strict=True)
            ]
    return found


ComparedPlaces = Sequence[tuple[Comparison, PairedDifference]]
"""Places that have runs, with the difference of their last accuracies."""


def block(evidence: Evidence) -> str:
    """The rank claim place by place, then pooled over all places of a data set, seed by seed."""
    everywhere = comparisons()
    known = with_results(evidence, everywhere)
    lead = f"{len(known)} of {len(everywhere)} comparisons have runs."
    if not known:
        return lead
    parts = [
        f"{lead} The optimised design is: {count_verdicts(known)}.",
        _places(evidence, known),
        _pooled(evidence, known),
    ]
    return "\n\n".join(parts)


def second_rate_block(evidence: Evidence) -> str:
    """The rank claim at the second learning rate, where that has been run."""
    known = with_results(evidence, at_second_rates(evidence))
    if not known:
        return "No comparison at a second learning rate has runs."
    return f"At the second rate the optimised design is: {count_verdicts(known)}.\n\n{_places(evidence, known)}"


def with_results(evidence: Evidence, places: Sequence[Comparison]) -> ComparedPlaces:
    """The places that have runs of both designs, and the difference in each."""
    seen = [(where, evidence.difference(*where.cells)) for where in places]
    return [(where, found) for where, found in seen if found is not None]


def at_second_rates(evidence: Evidence) -> list[Comparison]:
    """The places of the medium level at the second learning rates that were chosen."""
    rates = evidence.rates
    medium = [
        where
        for where in comparisons()
        if where.greedy.level == "medium" and where.dataset in rates
    ]
    return [replace(where, suffix=f"lr{rates[where.dataset]:g}") for where in medium]


def count_verdicts(known: ComparedPlaces) -> str:
    """How often each verdict fell; of single seeds, which way they point."""
    verdicts = Counter(found.verdict for _, found in known)
    single = [found.mean for _, found in known if found.p is None]
    ways = (
        f" ({sum(mean > 0 for mean in single)} above, {sum(mean < 0 for mean in single)} below)"
        if single
        else ""
    )
    text = ", ".join(f"{verdicts[word]} {word}" for word in ("higher", "lower", "not decided"))
    return text + (f", {len(single)} with one seed, no verdict{ways}" if single else "")


def _places(evidence: Evidence, known: ComparedPlaces) -> str:
    rows = [
        [
            DISPLAY_NAMES[where.dataset], column_name(where.column), where.greedy.level, where.optimised.name,
            where.greedy.name, _both(where, evidence.gamma, "d"), _both(where, evidence.noise, ".3f"),
            f"{where.claim:+.2f}", *difference(found), _tails(evidence, where), _speed(evidence, where),
        ]
        for where, found in known
    ]  # fmt: skip
    heads = [
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
    ]
    return markdown_table([*heads, "optimised is", "last ten rounds", "rounds to target"], rows)


def _both(where: Comparison, figure: Callable[[str], float | None], form: str) -> str:
    """A figure of the optimised cell / of the greedy one."""
    return " / ".join(
        "" if (value := figure(id)) is None else format(value, form) for id in where.cells
    )


def _tails(evidence: Evidence, where: Comparison) -> str:
    found = evidence.difference(*where.cells, "tail")
    return "" if found is None else f"{difference(found)[0]}"


def _speed(evidence: Evidence, where: Comparison) -> str:
    """Rounds until the target, optimised / greedy: 95 % of what the full model ends with in the same column."""
    full = evidence.seed_statistics(
        cell_id(where.dataset, where.column, "full", where.suffix), "tail"
    )
    if full is None:
        return ""
    rounds = [evidence.rounds_to(id, TARGET * full.mean) for id in where.cells]
    return " / ".join("never" if value is None else f"{value:.1f}" for value in rounds)


def difference(found: PairedDifference) -> list[object]:
    """A paired difference in words."""
    spread = f" ± {found.spread:.2f}" if found.spread is not None else ""
    return [
        f"{found.mean:+.2f}{spread}",
        found.seeds,
        "" if found.p is None else f"{found.p:.3f}",
        found.verdict,
    ]


def _pooled(evidence: Evidence, known: ComparedPlaces) -> str:
    """Each seed's mean difference over the places that have all the seeds: seeds are independent, places are not."""
    places: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for where, _ in known:
        for column in ("all", where.column):
            places[where.dataset, where.kind, column].append(where)
    rows = []
    for (dataset, kind, column), some in places.items():
        most = max(len(evidence.of(where.cells[0])) for where in some)
        full = [where for where in some if all(len(evidence.of(id)) == most for id in where.cells)]
        for figure, name in (("last", "last"), ("tail", "last ten rounds")):
            better, worse = (
                _mean_by_seed(evidence, [w.cells[side] for w in full], figure) for side in (0, 1)
            )
            found = paired_difference(better, worse)
            if found:
                rows.append(
                    [
                        DISPLAY_NAMES[dataset],
                        kind,
                        column_name(column),
                        len(full),
                        name,
                        *difference(found),
                    ]
                )
    heads = [
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
    return f"Pooled over levels, by column and over all columns:\n\n{markdown_table(heads, rows)}"


def _mean_by_seed(evidence: Evidence, ids: Sequence[str], figure: str) -> dict[int, float]:
    seen = [evidence.of(id, figure) for id in ids]
    shared = set.intersection(*map(set, seen)) if seen else set()
    return {seed: fmean(values[seed] for values in seen) for seed in sorted(shared)}
