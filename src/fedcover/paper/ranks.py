"""Which setting is better? Two cells at a time, seed by seed, since equal seeds share data, cohorts and weights."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedcover.paper.cells import cell_id
from fedcover.paper.claims import COLUMNS, DATASETS, claimed
from fedcover.paper.designs import Design, designs
from fedcover.paper.evidence import Evidence
from fedcover.paper.noise import Paired, paired
from fedcover.paper.wording import NAMES, column_name, table

TARGET = 0.95


@dataclass(frozen=True)
class Comparison:
    """The paper's claim in one place: the optimised design against the greedy one of the same fleet and kind."""

    dataset: str
    column: str
    kind: str
    greedy: Design
    optimised: Design

    @property
    def cells(self) -> tuple[str, str]:
        """The optimised cell and the greedy one."""
        return (
            cell_id(self.dataset, self.column, self.optimised.name),
            cell_id(self.dataset, self.column, self.greedy.name),
        )

    @property
    def claim(self) -> float | None:
        """The printed difference in points."""
        better = claimed(self.dataset, self.column, self.optimised.level, self.optimised.setting)
        worse = claimed(self.dataset, self.column, self.greedy.level, self.greedy.setting)
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


def block(evidence: Evidence) -> str:
    """The rank claim place by place, then pooled over all places of a data set, seed by seed."""
    seen = [(where, evidence.difference(*where.cells)) for where in comparisons()]
    known = [(where, found) for where, found in seen if found is not None]
    lead = f"{len(known)} of {len(seen)} comparisons have runs."
    if not known:
        return lead
    verdicts = Counter(found.verdict for _, found in known)
    counted = ", ".join(f"{verdicts[word]} {word}" for word in ("higher", "lower", "not decided", "one seed"))
    parts = [f"{lead} The optimised design is: {counted}.", _places(evidence, known), _pooled(evidence, known)]
    return "\n\n".join(parts)


def _places(evidence: Evidence, known: Sequence[tuple[Comparison, Paired]]) -> str:
    rows = [
        [
            NAMES[where.dataset], column_name(where.column), where.greedy.level, where.optimised.name,
            where.greedy.name, f"{where.claim:+.2f}", *difference(found), _speed(evidence, where),
        ]
        for where, found in known
    ]  # fmt: skip
    heads = [
        "data",
        "column",
        "level",
        "optimised",
        "greedy",
        "claimed difference",
        "ours",
        "seeds",
        "p",
        "optimised is",
    ]
    return table([*heads, "rounds to target"], rows)


def _speed(evidence: Evidence, where: Comparison) -> str:
    """Rounds until the target, optimised / greedy: 95 % of what the full model ends with in the same column."""
    full = evidence.sample(cell_id(where.dataset, where.column, "full"))
    if full is None:
        return ""
    rounds = [evidence.rounds_to(id, TARGET * full.mean) for id in where.cells]
    return " / ".join("never" if value is None else f"{value:.1f}" for value in rounds)


def difference(found: Paired) -> list[object]:
    """A paired difference in words."""
    spread = f" ± {found.spread:.2f}" if found.spread is not None else ""
    return [f"{found.mean:+.2f}{spread}", found.seeds, "" if found.p is None else f"{found.p:.3f}", found.verdict]


def _pooled(evidence: Evidence, known: Sequence[tuple[Comparison, Paired]]) -> str:
    """Each seed's mean difference over the places that have all the seeds: seeds are independent, places are not."""
    places: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for where, _ in known:
        places[where.dataset, where.kind].append(where)
    rows = []
    for (dataset, kind), some in places.items():
        most = max(len(evidence.of(where.cells[0])) for where in some)
        full = [where for where in some if all(len(evidence.of(id)) == most for id in where.cells)]
        better, worse = (_mean_by_seed(evidence, [where.cells[side] for where in full]) for side in (0, 1))
        found = paired(better, worse)
        if found:
            rows.append([NAMES[dataset], kind, len(full), *difference(found)])
    heads = ["data", "kind", "places", "mean difference", "seeds", "p", "optimised is"]
    return f"Pooled over levels and columns:\n\n{table(heads, rows)}"


def _mean_by_seed(evidence: Evidence, ids: Sequence[str]) -> dict[int, float]:
    shared = set.intersection(*(set(evidence.of(id)) for id in ids)) if ids else set()
    return {seed: fmean(evidence.of(id)[seed] for id in ids) for seed in sorted(shared)}
