"""The files of a run folder: who may write them, what is in them, and how they are kept in step."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedcover.errors import InvalidValue, RunError, TrainingDiverged
from fedcover.host import disk, locks
from fedcover.host.disk import write_atomically
from fedcover.runs import checkpoints, trust
from fedcover.runs.experiment import MAX_INT, Experiment, parse_fields
from fedcover.runs.machine import Machine
from fedcover.runs.manifest import manifest, override_names
from fedcover.runs.metrics_log import (
    Metrics,
    is_complete_line,
    read_lines,
    resume_command,
    summarise,
)
from fedcover.runs.setup import Overrides
from fedcover.types import State

_FILES = ("summary.json", "metrics.jsonl", "events.jsonl", "manifest.json", "experiment.toml")
_MUST_MATCH = {
    "engine": str,
    "device": str,
    "threads": int,
    "deterministic": bool,
    "precision": str,
    "torch": str,
}


@dataclass(frozen=True)
class Folder:
    """A run folder; `created`, `opened` (both lock it) or `read`."""

    path: Path
    trusted: bool = False
    """Whether every function that its experiment names may be called, not only those that this process has named."""

    @property
    def checkpoints(self) -> Path:
        """Where the newest states are."""
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """Where the states of chosen rounds are."""
        return self.path / "kept"

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What experiment.toml says, unchecked; nothing that it names is imported."""
        path = self.path / "experiment.toml"
        try:
            return parse_fields(disk.read_text(path), path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"experiment {path} cannot be read: {disk.reason(error)}") from error

    @cached_property
    def experiment(self) -> Experiment:
        """What is run here; functions that it names are imported, if they may be."""
        if not self.trusted:
            trust.check_trusted(self.path, self.fields)
        return Experiment(**self.fields)

    @property
    def planned_rounds(self) -> int:
        """How many rounds the run is to have, by its file alone."""
        rounds = self.fields.get("rounds", Experiment.model_fields["rounds"].default)
        if type(rounds) is not int or not 1 <= rounds <= MAX_INT:
            raise InvalidValue(
                f"{self.path / 'experiment.toml'}: rounds must be in 1..{MAX_INT}; got {rounds!r}"
            )
        return rounds

    def names_other_functions(self, experiment: Experiment) -> bool:
        """Whether the run cannot be of this experiment, as it names functions of its own; they are not imported."""
        return trust.custom_functions(self.fields) != trust.custom_functions(
            experiment.model_dump()
        )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """With what it is run."""
        try:
            read: dict[str, Any] = json.loads(disk.read_bytes(self.path / "manifest.json"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / 'manifest.json'} cannot be read: {disk.reason(error)}"
            ) from error
        for key, kind in _MUST_MATCH.items():
            if not isinstance(read, dict) or not isinstance(read.get(key), kind):
                raise RunError(
                    f"{self.path / 'manifest.json'} is no manifest of a run: it does not say its {key}"
                )
        return read

    @contextlib.contextmanager
    def created(
        self,
        experiment: Experiment,
        machine: Machine,
        parts: Overrides,
        data: str | Path | None,
        overwrite: bool = False,
    ) -> Iterator["Folder"]:
        """Make the folder for a new run; an existing run is overwritten only if that is asked for.

        What ended without a finished round is no run. A run that is refused, or diverges, before its first round is
        done takes its folder away, but nothing that was there before it.
        """
        if not overwrite:
            self.check_no_run()
        try:
            before = set(os.listdir(self.path)) - {*_FILES} if os.path.isdir(self.path) else None
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create the run folder {self.path}: {error.strerror}") from error
        with self._locked():
            if not overwrite:
                self.check_no_run()  # another process may have been faster
            self._clear()
            write_atomically(
                self.path / "manifest.json", _json(manifest(experiment, machine, parts, data))
            )
            write_atomically(self.path / "experiment.toml", experiment.to_toml().encode())
            try:
                yield self
            except (InvalidValue, TrainingDiverged):
                if not os.path.exists(self.path / "metrics.jsonl"):
                    self._take_back(before)
                raise

    def _take_back(self, before: set[str] | None) -> None:
        """Remove what was not in the folder before, or the folder itself if there was none."""
        if before is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in set(os.listdir(self.path)) - before:
            path = self.path / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator["Folder"]:
        """Open the folder of a run to go on with it."""
        self.read()
        with self._locked():
            yield self

    def read(self) -> "Folder":
        """Look at a run; complains if there is none."""
        if not os.path.isfile(
            self.path / "experiment.toml"
        ):  # unlike Path.is_file, False for any path at all
            raise RunError(f"{self.path} is no run folder: it has no experiment.toml")
        return self

    def check_no_run(self) -> None:
        """Complain if the folder holds a run already."""
        if self.has_run():
            other = "choose another name (--set name=...), or lose it by --overwrite"
            raise RunError(
                f"{self.path} holds a run already: go on with {self.resume_hint()}, or {other}"
            )
        if os.path.isdir(self.path) and any(state.round for state in checkpoints.found(self.kept)):
            raise RunError(
                f"{self.kept} holds models of another run: choose another name (--set name=...)"
            )

    def has_run(self) -> bool:
        """Whether a round was finished here; what ended before that has left nothing to lose."""
        if not os.path.isdir(self.path):  # unlike Path.is_dir, False for any path at all
            return False
        figures = any(_has_content(self.path / name) for name in ("metrics.jsonl", "summary.json"))
        return figures or bool(checkpoints.found(self.checkpoints))

    def clear(self) -> None:
        """Remove the run that is here, if nobody is at work on it; what else is in the folder stays."""
        if os.path.isdir(self.path):
            with self._locked():
                self._clear()

    def _clear(self) -> None:
        described = os.path.isfile(self.path / "experiment.toml")
        released = self.has_run() or any(state.round for state in checkpoints.found(self.kept))
        if described and released and Folder(self.path).fields.get("privacy", "none") != "none":
            raise RunError(
                f"{self.path} holds a private run, and what it has released counts whether it is here or not: choose "
                "another name (--set name=...), and add the epsilon of both"
            )
        states = [*checkpoints.found(self.checkpoints), *checkpoints.found(self.kept)]
        for path in [*(state.path for state in states), *(self.path / name for name in _FILES)]:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with locks.lock_folder(self.path):
            for folder in (self.checkpoints, self.kept):
                disk.check_not_linked(folder)
            for folder in (self.path, self.checkpoints, self.kept):
                checkpoints.remove_leftovers(folder)
            yield

    def in_use(self) -> bool:
        """Whether a process is at work in the folder, as far as this computer can tell."""
        return locks.is_locked(self.path)

    @property
    def latest_manifest(self) -> dict[str, Any]:
        """The manifest as it was when somebody last went on with the run."""
        resumed = self.manifest.get("resumed") or [{}]
        return {**self.manifest, **resumed[-1]}

    def record_machine(self, machine: Machine, round: int) -> None:
        """Let the manifest tell if from some round on the run is computed in another way than before."""
        now = {**asdict(machine), "torch": torch.__version__}
        if any(self.latest_manifest.get(key) != value for key, value in now.items()):
            resumed = [*self.manifest.get("resumed", []), {"round": round, **now}]
            self.__dict__["manifest"] = {
                **self.manifest,
                "resumed": resumed,
            }  # what was read of it before
            with self.explain_write_errors(self.path / "manifest.json") as path:
                write_atomically(path, _json(self.manifest))

    def check_same_machine(self, machine: Machine) -> None:
        """Complain if the run was computed in a way that gives other results than a sweep on this machine would."""
        kinds = ("device", "precision", "deterministic")
        other = [
            f"{k} {self.latest_manifest[k]}, not {getattr(machine, k)}"
            for k in kinds
            if self.latest_manifest[k] != getattr(machine, k)
        ]
        if other:
            raise InvalidValue(
                f"{self.path} was run with {', '.join(other)}; choose another name or folder of runs"
            )

    def machine(self, wanted: Machine | None, *, force: bool = False) -> Machine:
        """The machine settings to go on with: those it was run with last, unless a change is forced."""
        known: dict[str, Any] = {key: self.latest_manifest.get(key) for key in _MUST_MATCH}
        then = Machine(**{key: known[key] for key in known if key != "torch"})
        asked = wanted or Machine()
        now = Machine(
            asked.engine if asked.engine != "auto" else then.engine,
            asked.device if asked.device != "auto" else then.device,
            then.threads if asked.threads is None else asked.threads,
            asked.deterministic or then.deterministic,
            asked.precision if asked.precision != "fp32" else then.precision,
            # sums over other processes differ in the last digit at most, so their number may change
            asked.processes
            if wanted and wanted.processes != "auto"
            else self.latest_manifest.get("processes", 1),
        ).resolved()
        current = {**asdict(now), "torch": torch.__version__}
        changed = [
            f"{key} {known[key]} to {current[key]}"
            for key in _MUST_MATCH
            if known[key] != current[key]
        ]
        if changed and not force:
            raise RunError(
                f"going on with {self.path} would change {', '.join(changed)}, so it would not end like an "
                "uninterrupted run; use --force to accept that"
            )
        return now

    @property
    def data(self) -> str | None:
        """The data folder that the run was started with, if one was named."""
        known = self.manifest.get("data")
        return known if isinstance(known, str) else None

    def check_overrides(self, parts: Overrides) -> None:
        """Complain if the run needs things made in Python that were not given again."""
        given = set(override_names(parts))
        missing = [name for name in self.manifest.get("custom", []) if name not in given]
        if missing:
            raise RunError(
                f"{self.path} was started from Python with its own {', '.join(missing)}: give it again, as in "
                f"fedcover.load({str(self.path)!r}, {missing[0]}=...)"
            )

    def append(self, line: dict[str, Any]) -> None:
        """Add one round's line to metrics.jsonl, and see it on disk."""
        with self.explain_write_errors(self.path / "metrics.jsonl") as path:
            disk.append(path, _line(line))

    def metrics(self, rounds: int) -> Metrics:
        """The line of every round that is done, the last one if there are several; a torn or damaged one is none."""
        whole = [line for line in read_lines(self.path / "metrics.jsonl") if is_complete_line(line)]
        by_round = {line["round"]: line for line in whole}
        return [by_round[round] for round in sorted(by_round) if round < rounds]

    def truncate_metrics(self, rounds: int) -> Metrics:
        """Forget the lines of rounds that will be run again."""
        lines = self.metrics(rounds)
        write_atomically(self.path / "metrics.jsonl", b"".join(_line(line) for line in lines))
        return lines

    def checkpoint(self, state: State, line: dict[str, Any] | None = None) -> None:
        """Write the state so that the run can go on from it, with its round's line if that is to be as safe."""
        with self.explain_write_errors(self.checkpoints) as folder:
            checkpoints.save(folder, state, self.experiment.digest, line=line)

    def keeps(self, round: int) -> bool:
        """Whether the state at the beginning of a round is kept for good."""
        return round in self.experiment.keep_rounds

    def keep(self, state: State) -> None:
        """Write the state for good if its round is one of `keep_rounds`."""
        if self.keeps(state.round):
            with self.explain_write_errors(self.kept) as folder:
                folder.mkdir(exist_ok=True)
                checkpoints.save(folder, state, self.experiment.digest, keep=None)

    def finish(self, metrics: Metrics) -> None:
        """Write summary.json."""
        with self.explain_write_errors(self.path / "summary.json") as path:
            write_atomically(path, _json(summarise(metrics)))

    @contextlib.contextmanager
    def explain_write_errors(self, path: Path) -> Iterator[Path]:
        """If something cannot be written, tell what is left and how to go on."""
        try:
            yield path
        except (OSError, RunError) as error:
            wrong = (
                error if isinstance(error, RunError) else f"cannot write {path}: {error.strerror}"
            )
            older = checkpoints.found(self.checkpoints)
            last = (
                f"the checkpoint of round {older[0].round} is whole"
                if older
                else "there is no checkpoint yet"
            )
            raise RunError(f"{wrong}; {last}; mend that, then {self.resume_hint()}") from error

    def resume_hint(self) -> str:
        """The command that goes on with the run."""
        try:
            engine = self.manifest["engine"]
        except RunError:  # that command tells what is wrong with it
            engine = ""
        otherwise = " (or 'flower run --resume' as it was started)" if engine == "flower" else ""
        return f"'{resume_command(engine, self.path)}{self.trust_flag()}'{otherwise}"

    def trust_flag(self) -> str:
        """What that command needs if the run names functions; who has not named them here is not told to trust them."""
        try:
            named = trust.custom_functions(self.fields)
        except InvalidValue:  # that command tells what is wrong with it
            return ""
        return " --trust" if named and trust.all_trusted(named) else ""


def _has_content(path: Path) -> bool:
    return os.path.lexists(path) and path.lstat().st_size > 0


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _line(value: dict[str, Any]) -> bytes:
    return (json.dumps(value) + "\n").encode()
