"""All runs that a page or a plot is about, each seed of an experiment once; and, in words, what had to be left out."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from fedcover.analysis.report.load import (
    UNCOMPARED_SETTINGS,
    RunRecord,
    find_runs,
    folders_without_experiment,
    natural_key,
    read_run,
)
from fedcover.errors import RunError

LONGEST_LABEL = 44


@dataclass(frozen=True)
class RunGroup:
    """Runs of one experiment with different seeds, by their places in the list of runs."""

    label: str
    settings: dict[str, str]
    runs: tuple[int, ...]


def group_runs(records: Sequence[RunRecord]) -> list[RunGroup]:
    """The groups in natural order, each labelled by the settings in which it differs from others."""
    together: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        together.setdefault(experiment_key(record), []).append(place)
    members = [part for places in together.values() for part in _split_ambiguous(records, places)]
    firsts = [records[places[0]] for places in members]
    names = differing_settings(firsts)
    labels = _unique(
        [_label(record, names) for record in firsts],
        [_common_name(records, places) for places in members],
        firsts,
    )
    groups = [
        RunGroup(
            label, {name: setting_text(record.settings.get(name)) for name in names}, tuple(places)
        )
        for label, record, places in zip(labels, firsts, members, strict=True)
    ]
    return sorted(groups, key=lambda each: natural_key(each.label))


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """The settings that are not the same in all runs, in the order in which experiments list them."""
    names = dict.fromkeys(
        name for record in records for name in record.settings if name not in UNCOMPARED_SETTINGS
    )
    return [
        name
        for name in names
        if len({setting_text(record.settings.get(name)) for record in records}) > 1
    ]


def setting_text(value: Any) -> str:
    """A setting as people write it.

    >>> setting_text("prefix"), setting_text(True), setting_text(0.5), setting_text(None)
    ('prefix', 'true', '0.5', 'none')
    """
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def experiment_key(record: RunRecord) -> str:
    """What runs of one experiment have in common, whatever their seed."""
    same = {
        name: value for name, value in record.settings.items() if name not in UNCOMPARED_SETTINGS
    }
    # what was made in Python is known by the name of its run only
    return json.dumps(
        [same, [*record.custom, record.name] if record.custom else []], sort_keys=True, default=str
    )


def _split_ambiguous(records: Sequence[RunRecord], places: list[int]) -> list[list[int]]:
    """Runs that share a seed, of which settings and seed do not tell all, are not taken for repetitions."""
    seeds = {records[place].settings.get("seed") for place in places}
    if any(records[place].differs_beyond_settings for place in places) and len(seeds) < len(places):
        return [[place] for place in places]
    return [places]


def _label(record: RunRecord, names: Sequence[str]) -> str | None:
    """The settings that differ, if they can be said in a few words."""
    values = [setting_text(record.settings.get(name)) for name in names]
    spoken = {
        "policy",
        "model",
        "dataset",
        "recipe",
        "partition",
    }  # their values speak for themselves
    said = ", ".join(
        v if n in spoken or (len(names) == 1 and not v[:1].isdigit()) else f"{n} {v}"
        for n, v in zip(names, values, strict=True)
    )
    return said if said and len(said) <= LONGEST_LABEL and not record.custom else None


def _common_name(records: Sequence[RunRecord], places: Sequence[int]) -> str:
    """What the names of a group's runs have in common at their beginning; the first one if that is nothing."""
    names = [_without_seed(records[place]) for place in places]
    return commonprefix(names).rstrip("-_. ") or names[0]  # noqa: RUF071


def _without_seed(record: RunRecord) -> str:
    """The name of a run without what a sweep adds to it for the seed."""
    return record.name.removesuffix(f"-seed-{record.settings.get('seed', 0)}") or record.name


def _unique(
    said: Sequence[str | None], named: Sequence[str], firsts: Sequence[RunRecord]
) -> list[str]:
    """Labels from settings where all can be said, else names, with the folder behind those that would be equal."""
    labels = [label for label in said if label is not None] if None not in said else list(named)
    return [
        f"{label} ({record.folder})" if labels.count(label) > 1 else label
        for label, record in zip(labels, firsts, strict=True)
    ]


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
    nameless = [
        f"{folder} is left out: it has no experiment.toml"
        for folder in folders_without_experiment(named)
    ]
    return nameless + [_cut(record) for record in records if record.damaged_lines]


def _cut(record: RunRecord) -> str:
    lines = "1 line" if record.damaged_lines == 1 else f"{record.damaged_lines} lines"
    return f"{record.folder / 'metrics.jsonl'} is damaged: {lines} left out, {len(record.lines)} rounds can be read"


def _duplicate_runs(records: Sequence[RunRecord]) -> dict[int, int]:
    """The places of runs whose experiment and seed another run has, each with the place of the one that is used."""
    alike: dict[tuple[str, object], list[int]] = {}
    for place, record in enumerate(records):
        if not record.differs_beyond_settings:
            alike.setdefault((experiment_key(record), record.settings.get("seed")), []).append(
                place
            )
    longest = [
        (places, max(places, key=lambda place: len(records[place].lines)))
        for places in alike.values()
    ]
    return {place: used for places, used in longest for place in places if place != used}
