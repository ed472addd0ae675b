"""All runs that a page or a plot is about, each seed of an experiment once; and, in words, what had to be left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcover.analysis.report.grouping import experiment_key
from fedcover.analysis.report.load import RunRecord, find_runs, folders_without_experiment, read_run
from fedcover.errors import RunError


@dataclass(frozen=True)
class CollectedRuns:
    """Runs that can be compared, and one sentence for everything that is missing among them."""

    records: list[RunRecord]
    notes: list[str]


def collect_runs(paths: Iterable[str | Path]) -> CollectedRuns:
    """Read the run folders that are named or lie below a named folder."""
    named = list(paths)
    read = read_runs(named)
    records, again = read.records, _duplicate_runs(read.records)
    kept = [record for place, record in enumerate(records) if place not in again]
    notes = [*read.notes, *damage_notes(named, kept)]
    notes += [
        f"{records[place].folder} is left out: the same experiment and seed as {records[first].folder}"
        for place, first in again.items()
    ]
    return CollectedRuns(kept, notes)


def read_runs(named: Sequence[str | Path]) -> CollectedRuns:
    """The runs below some folders, without those of which nothing can be read; of them there must be others."""
    records, errors = [], []
    for folder in find_runs(named):
        try:
            records.append(read_run(folder))
        except RunError as error:
            errors.append(error)
    if not records:
        raise errors[0]
    return CollectedRuns(records, [f"a run is left out: {error}" for error in errors])


def damage_notes(named: Sequence[str | Path], records: Iterable[RunRecord]) -> list[str]:
    """What cannot be read of the runs below some folders: whole runs, or lines of them."""
    nameless = [f"{folder} is left out: it has no experiment.toml" for folder in folders_without_experiment(named)]
    return nameless + [_cut(record) for record in records if record.damaged_lines]


def _cut(record: RunRecord) -> str:
    lines = "1 line" if record.damaged_lines == 1 else f"{record.damaged_lines} lines"
    return f"{record.folder / 'metrics.jsonl'} is damaged: {lines} left out, {len(record.lines)} rounds can be read"


def _duplicate_runs(records: Sequence[RunRecord]) -> dict[int, int]:
    """The places of runs whose experiment and seed another run has, each with the place of the one that is used."""
    alike: dict[tuple[str, object], list[int]] = {}
    for place, record in enumerate(records):
        if not record.differs_beyond_settings:
            alike.setdefault((experiment_key(record), record.settings.get("seed")), []).append(place)
    longest = [(places, max(places, key=lambda place: len(records[place].lines))) for places in alike.values()]
    return {place: used for places, used in longest for place in places if place != used}
