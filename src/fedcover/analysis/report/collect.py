"""Collect runs for a page or a plot, group them by experiment, and note what is left out."""

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
SELF_EXPLANATORY = frozenset({"policy", "model", "dataset", "recipe", "partition"})
"""Settings whose values are clear without their name."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one experiment with different seeds, as indices into the list of runs."""

    label: str
    settings: dict[str, str]
    runs: tuple[int, ...]


def group_runs(records: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by experiment, in natural order of the labels.

    A label consists of the settings in which a group differs from others.
    """
    indices_by_experiment: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        indices_by_experiment.setdefault(experiment_key(record), []).append(index)
    members: list[list[int]] = []
    for indices in indices_by_experiment.values():
        members += _split_ambiguous(records, indices)
    first_records = [records[indices[0]] for indices in members]
    names = differing_settings(first_records)
    labels = _labels(records, members, names)
    groups = []
    for label, record, indices in zip(labels, first_records, members, strict=True):
        settings = {name: setting_text(record.settings.get(name)) for name in names}
        groups.append(RunGroup(label, settings, tuple(indices)))
    return sorted(groups, key=lambda group: natural_key(group.label))


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ between runs, in the order of the experiments' files."""
    differing = []
    for name in dict.fromkeys(name for record in records for name in record.settings):
        values = {setting_text(record.settings.get(name)) for record in records}
        if name not in UNCOMPARED_SETTINGS and len(values) > 1:
            differing.append(name)
    return differing


def setting_text(value: Any) -> str:
    """Return a setting as people write it.

    >>> setting_text("prefix"), setting_text(True), setting_text(0.5), setting_text(None)
    ('prefix', 'true', '0.5', 'none')
    """
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value)


def experiment_key(record: RunRecord) -> str:
    """Return a key that is equal for runs of one experiment, whatever their seed."""
    compared = {
        name: value for name, value in record.settings.items() if name not in UNCOMPARED_SETTINGS
    }
    # Objects that were passed in Python are identified only by the name of the run.
    custom = [*record.custom, record.name] if record.custom else []
    return json.dumps([compared, custom], sort_keys=True, default=str)


def _split_ambiguous(records: Sequence[RunRecord], indices: list[int]) -> list[list[int]]:
    """Split runs that share a seed but are not repetitions: settings do not determine them."""
    seeds = {records[index].settings.get("seed") for index in indices}
    has_repeated_seed = len(seeds) < len(indices)
    if has_repeated_seed and any(records[index].differs_beyond_settings for index in indices):
        return [[index] for index in indices]
    return [indices]


def _labels(
    records: Sequence[RunRecord], members: Sequence[list[int]], names: Sequence[str]
) -> list[str]:
    """Return one label per group.

    Labels are made of settings if that works for all groups, and of run names otherwise. Equal
    labels are followed by the folder.
    """
    first_records = [records[indices[0]] for indices in members]
    by_settings = [_label_by_settings(record, names) for record in first_records]
    labels = [label for label in by_settings if label is not None]
    if len(labels) < len(members):
        labels = [_common_name(records, indices) for indices in members]
    return [
        f"{label} ({record.folder})" if labels.count(label) > 1 else label
        for label, record in zip(labels, first_records, strict=True)
    ]


def _label_by_settings(record: RunRecord, names: Sequence[str]) -> str | None:
    """Return the differing settings as a label, or None if they are too long or not enough."""
    parts = []
    for name in names:
        value = setting_text(record.settings.get(name))
        is_clear = name in SELF_EXPLANATORY or (len(names) == 1 and not value[:1].isdigit())
        parts.append(value if is_clear else f"{name} {value}")
    label = ", ".join(parts)
    if not label or len(label) > LONGEST_LABEL or record.custom:
        return None
    return label


def _common_name(records: Sequence[RunRecord], indices: Sequence[int]) -> str:
    """Return the common beginning of the names of a group's runs, or else the first name."""
    names = [_name_without_seed(records[index]) for index in indices]
    return commonprefix(names).rstrip("-_. ") or names[0]  # noqa: RUF071


def _name_without_seed(record: RunRecord) -> str:
    """Return the name of a run without the suffix that a sweep adds for the seed."""
    return record.name.removesuffix(f"-seed-{record.settings.get('seed', 0)}") or record.name


@dataclass(frozen=True)
class CollectedRuns:
    """Runs that can be compared, and a sentence about each run or line that is left out."""

    records: list[RunRecord]
    notes: list[str]


def collect_runs(paths: Iterable[str | Path]) -> CollectedRuns:
    """Read the run folders among or below some paths, each experiment and seed once.

    Raises:
        RunError: if no run can be read.
    """
    named_paths = list(paths)
    runs = read_runs(named_paths)
    used_instead = _duplicate_runs(runs.records)
    records = [record for index, record in enumerate(runs.records) if index not in used_instead]
    notes = [*runs.notes, *damage_notes(named_paths, records)]
    for index, used_index in used_instead.items():
        folder, used_folder = runs.records[index].folder, runs.records[used_index].folder
        notes.append(f"{folder} is left out: the same experiment and seed as {used_folder}")
    return CollectedRuns(records, notes)


def read_runs(named: Sequence[str | Path]) -> CollectedRuns:
    """Read the runs below some folders, and note those that cannot be read.

    Raises:
        RunError: if no run can be read.
    """
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
    """Return a note about each run without experiment.toml, and about damaged lines."""
    notes = [
        f"{folder} is left out: it has no experiment.toml"
        for folder in folders_without_experiment(named)
    ]
    for record in records:
        if record.damaged_lines:
            lines = "1 line" if record.damaged_lines == 1 else f"{record.damaged_lines} lines"
            notes.append(
                f"{record.folder / 'metrics.jsonl'} is damaged: {lines} left out,"
                f" {len(record.lines)} rounds can be read"
            )
    return notes


def _duplicate_runs(records: Sequence[RunRecord]) -> dict[int, int]:
    """Return the runs that repeat another one, each with the index of the run used instead.

    The run with the most rounds is used.
    """
    repetitions: dict[tuple[str, object], list[int]] = {}
    for index, record in enumerate(records):
        if not record.differs_beyond_settings:
            key = experiment_key(record), record.settings.get("seed")
            repetitions.setdefault(key, []).append(index)
    used_instead = {}
    for indices in repetitions.values():
        longest = max(indices, key=lambda index: len(records[index].lines))
        for index in indices:
            if index != longest:
                used_instead[index] = longest
    return used_instead
