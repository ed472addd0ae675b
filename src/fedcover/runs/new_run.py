"""Begin a run in a folder, without losing what another run has left there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcover.errors import InvalidValue, RunError, TrainingDiverged
from fedcover.host.disk import write_atomically
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.manifest import build_manifest
from fedcover.runs.run_folder import Folder, to_json
from fedcover.runs.setup import Overrides

_FILES = ("summary.json", "metrics.jsonl", "events.jsonl", "manifest.json", "experiment.toml")


@contextmanager
def create_run(
    folder: Folder,
    experiment: Experiment,
    machine: Machine,
    overrides: Overrides,
    data: str | Path | None,
    overwrite: bool = False,
) -> Iterator[None]:
    """Create and lock the folder of a new run; replace an existing run only if asked to.

    A folder without a finished round holds no run. If this run is rejected or diverges before its
    first round ends, the folder is removed, except for what was there before.
    """
    if not overwrite:
        check_no_run(folder)
    other_files = _make_folder(folder)
    with folder.locked():
        if not overwrite:
            check_no_run(folder)  # another process may have been faster
        _remove_run(folder)
        manifest = build_manifest(experiment, machine, overrides, data)
        write_atomically(folder.path / "manifest.json", to_json(manifest))
        write_atomically(folder.path / "experiment.toml", experiment.to_toml().encode())
        try:
            yield
        except (InvalidValue, TrainingDiverged):
            if not os.path.exists(folder.path / "metrics.jsonl"):
                _remove_new_files(folder.path, other_files)
            raise


def _make_folder(folder: Folder) -> set[str] | None:
    """Make the folder; return the other files that it already held, or None if it is new."""
    try:
        other_files = None
        if os.path.isdir(folder.path):
            other_files = set(os.listdir(folder.path)) - {*_FILES}
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create the run folder {folder.path}: {error.strerror}") from error
    return other_files


def _remove_new_files(path: Path, other_files: set[str] | None) -> None:
    """Remove what was not in the folder before, or the whole folder if it is new."""
    if other_files is None:
        shutil.rmtree(path, ignore_errors=True)
        return
    for name in set(os.listdir(path)) - other_files:
        if (path / name).is_dir():
            shutil.rmtree(path / name, ignore_errors=True)
        else:
            (path / name).unlink(missing_ok=True)


# ── an earlier run ──────────────────────────────────────────────────────────────────────────────


def check_no_run(folder: Folder) -> None:
    """Raise if the folder already holds a run."""
    if has_run(folder):
        raise RunError(
            f"{folder.path} holds a run already: resume it with {folder.resume_hint()}, or choose "
            "another name (--set name=...), or lose it by --overwrite"
        )
    if os.path.isdir(folder.path) and _keeps_trained_states(folder):
        raise RunError(
            f"{folder.kept} holds models of another run: choose another name (--set name=...)"
        )


def has_run(folder: Folder) -> bool:
    """Return whether a round was finished in a folder; otherwise there is nothing to lose."""
    # unlike Path.is_dir, os.path.isdir is False for a path of any kind
    if not os.path.isdir(folder.path):
        return False
    for path in (folder.path / "metrics.jsonl", folder.path / "summary.json"):
        if os.path.lexists(path) and path.lstat().st_size > 0:
            return True
    return bool(list_checkpoints(folder.checkpoints))


def _keeps_trained_states(folder: Folder) -> bool:
    """Return whether a state is kept that was trained for at least one round."""
    return any(file.round for file in list_checkpoints(folder.kept))


def remove_run(folder: Folder) -> None:
    """Remove the run unless a process is using it; other files in the folder stay."""
    if os.path.isdir(folder.path):
        with folder.locked():
            _remove_run(folder)


def _remove_run(folder: Folder) -> None:
    described = os.path.isfile(folder.path / "experiment.toml")
    released = has_run(folder) or _keeps_trained_states(folder)
    # a folder of its own, as `fields` is read once, and here the file is about to change
    if described and released and Folder(folder.path).fields.get("privacy", "none") != "none":
        raise RunError(
            f"{folder.path} holds a private run, and what it has released counts whether it is "
            "here or not: choose another name (--set name=...), and add the epsilon of both"
        )
    for states in (folder.checkpoints, folder.kept):
        for file in list_checkpoints(states):
            file.path.unlink(missing_ok=True)
    for name in _FILES:
        (folder.path / name).unlink(missing_ok=True)
