"""The folder of a run: its files, who may write them, and how they stay consistent."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcover.errors import InvalidValue, RunError
from fedcover.host import disk, locks
from fedcover.host.disk import write_atomically
from fedcover.runs import checkpoints, metrics_log, trust
from fedcover.runs.experiment import MAX_INT, Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.manifest import (
    describe_changes,
    machine_fields,
    machine_to_resume,
    override_names,
    read_manifest,
)
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.setup import Overrides
from fedcover.runs.toml_fields import parse_fields
from fedcover.types import State


@dataclass(frozen=True)
class Folder:
    """A run folder; use `opened` (which locks it) or `read`; `new_run` creates one."""

    path: Path
    trusted: bool = False
    """Whether all functions named in the experiment may be called, even new ones."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the newest states."""
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """The folder of the states of `keep_rounds`."""
        return self.path / "kept"

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields in experiment.toml, unchecked; no function is imported."""
        path = self.path / "experiment.toml"
        try:
            return parse_fields(disk.read_text(path), path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"experiment {path} cannot be read: {disk.reason(error)}") from error

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment; the functions it names are imported if they are trusted."""
        if not self.trusted:
            trust.check_trusted(self.path, self.fields)
        return Experiment(**self.fields)

    @property
    def planned_rounds(self) -> int:
        """The number of rounds that experiment.toml asks for."""
        rounds = self.fields.get("rounds", Experiment.model_fields["rounds"].default)
        if type(rounds) is not int or not 1 <= rounds <= MAX_INT:
            raise InvalidValue(
                f"{self.path / 'experiment.toml'}: rounds must be in 1..{MAX_INT}; got {rounds!r}"
            )
        return rounds

    def names_other_functions(self, experiment: Experiment) -> bool:
        """Return whether the folder names other functions than an experiment.

        Then it holds another experiment, and nothing has to be imported to know that.
        """
        requested = trust.custom_functions(experiment.model_dump())
        return trust.custom_functions(self.fields) != requested

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest: versions and machine."""
        return read_manifest(self.path / "manifest.json")

    @contextlib.contextmanager
    def opened(self) -> Iterator["Folder"]:
        """Lock the folder of an existing run, to resume it."""
        self.read()
        with self.locked():
            yield self

    def read(self) -> "Folder":
        """Return the folder itself, or raise if it holds no run."""
        # unlike Path.is_file, os.path.isfile is False for a path of any kind
        if not os.path.isfile(self.path / "experiment.toml"):
            raise RunError(f"{self.path} is not a run folder: it has no experiment.toml")
        return self

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for a `with` block, and remove what a process left half-written."""
        with locks.lock_folder(self.path):
            for folder in (self.checkpoints, self.kept):
                disk.check_not_linked(folder)
            for folder in (self.path, self.checkpoints, self.kept):
                checkpoints.remove_leftovers(folder)
            yield

    def in_use(self) -> bool:
        """Return whether a process is using the folder, as far as this computer can tell."""
        return locks.is_locked(self.path)

    @property
    def latest_manifest(self) -> dict[str, Any]:
        """The manifest as of the last time the run was resumed."""
        resumed = self.manifest.get("resumed") or [{}]
        return {**self.manifest, **resumed[-1]}

    def record_machine(self, machine: Machine, round: int) -> None:
        """Add the machine to the manifest if it has changed, with the round of the change."""
        current = machine_fields(machine)
        latest = self.latest_manifest
        if all(latest.get(key) == value for key, value in current.items()):
            return
        resumed = [*self.manifest.get("resumed", []), {"round": round, **current}]
        # replaces the cached property of a frozen dataclass
        self.__dict__["manifest"] = {**self.manifest, "resumed": resumed}
        with self.explain_write_errors(self.path / "manifest.json") as path:
            write_atomically(path, to_json(self.manifest))

    def check_same_machine(self, machine: Machine) -> None:
        """Raise if a sweep on this machine would give other results than the run so far."""
        latest = self.latest_manifest
        changes = [
            f"{key} {latest[key]}, not {getattr(machine, key)}"
            for key in ("device", "precision", "deterministic")
            if latest[key] != getattr(machine, key)
        ]
        if changes:
            raise InvalidValue(
                f"{self.path} was run with {', '.join(changes)}; "
                "choose another name or folder of runs"
            )

    def machine(self, requested: Machine | None, *, force: bool = False) -> Machine:
        """Return the machine to resume on: the last one, unless `force` allows a change."""
        machine = machine_to_resume(self.latest_manifest, requested)
        changes = describe_changes(self.latest_manifest, machine)
        if changes and not force:
            raise RunError(
                f"resuming {self.path} would change {', '.join(changes)}, so it would not "
                "end like an uninterrupted run; use --force to accept that"
            )
        return machine

    @property
    def data(self) -> str | None:
        """The data folder that the run was started with, if any."""
        data = self.manifest.get("data")
        return data if isinstance(data, str) else None

    def check_overrides(self, overrides: Overrides) -> None:
        """Raise if the run was started with objects made in Python that are missing now."""
        names = override_names(overrides)
        missing = [name for name in self.manifest.get("custom", []) if name not in names]
        if missing:
            raise RunError(
                f"{self.path} was started from Python with its own {', '.join(missing)}: give it "
                f"again, as in fedcover.load({str(self.path)!r}, {missing[0]}=...)"
            )

    def append(self, line: dict[str, Any]) -> None:
        """Add the line of a round to metrics.jsonl and flush it to disk."""
        with self.explain_write_errors(self.path / "metrics.jsonl") as path:
            disk.append(path, metrics_log.encode_line(line))

    def metrics(self, rounds: int) -> Metrics:
        """Return the intact lines of the first rounds, the last one of each round."""
        lines = metrics_log.read_lines(self.path / "metrics.jsonl")
        by_round = {line["round"]: line for line in lines if metrics_log.is_complete_line(line)}
        return [by_round[round] for round in sorted(by_round) if round < rounds]

    def truncate_metrics(self, rounds: int) -> Metrics:
        """Remove the lines of rounds that will be run again; return the others."""
        metrics = self.metrics(rounds)
        content = b"".join(map(metrics_log.encode_line, metrics))
        write_atomically(self.path / "metrics.jsonl", content)
        return metrics

    def checkpoint(self, state: State, line: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, with the line of its round if that must not get lost."""
        with self.explain_write_errors(self.checkpoints) as folder:
            checkpoints.save_checkpoint(folder, state, self.experiment.digest, line=line)

    def keeps(self, round: int) -> bool:
        """Return whether the state at the beginning of a round is kept for good."""
        return round in self.experiment.keep_rounds

    def keep(self, state: State) -> None:
        """Write the state for good if its round is one of `keep_rounds`."""
        if self.keeps(state.round):
            with self.explain_write_errors(self.kept) as folder:
                folder.mkdir(exist_ok=True)
                checkpoints.save_checkpoint(folder, state, self.experiment.digest, keep=None)

    def finish(self, metrics: Metrics) -> None:
        """Write summary.json."""
        with self.explain_write_errors(self.path / "summary.json") as path:
            write_atomically(path, to_json(metrics_log.summarise(metrics)))

    @contextlib.contextmanager
    def explain_write_errors(self, path: Path) -> Iterator[Path]:
        """Add to an error in writing what is left of the run and how to resume it."""
        try:
            yield path
        except (OSError, RunError) as error:
            cause = str(error)
            if isinstance(error, OSError):
                cause = f"cannot write {path}: {error.strerror}"
            files = checkpoints.list_checkpoints(self.checkpoints)
            remains = "there is no checkpoint yet"
            if files:
                remains = f"the checkpoint of round {files[0].round} is whole"
            raise RunError(f"{cause}; {remains}; mend that, then {self.resume_hint()}") from error

    def resume_hint(self) -> str:
        """Return the command that resumes the run, in quotes."""
        try:
            engine = self.manifest["engine"]
        except RunError:  # that command reports what is wrong with the manifest
            engine = ""
        hint = f"'{metrics_log.resume_command(engine, self.path)}{self.trust_flag()}'"
        if engine == "flower":
            hint += " (or 'flower run --resume' as it was started)"
        return hint

    def trust_flag(self) -> str:
        """Return " --trust" if the run names functions, and this process trusts all of them."""
        try:
            functions = trust.custom_functions(self.fields)
        except InvalidValue:  # that command reports what is wrong with the file
            return ""
        return " --trust" if functions and trust.all_trusted(functions) else ""


def to_json(value: dict[str, Any]) -> bytes:
    """Return a value as it is written to a file of the run."""
    return (json.dumps(value, indent=2) + "\n").encode()
