"""The experiment that a command is asked for."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fedcover.runs.experiment import Experiment, parse_change, read_experiment


def load_experiment(file: Path | None, changes: Sequence[str]) -> Experiment:
    """The experiment of a TOML file, or the defaults, with changes; functions and files it names may lie beside it."""
    add_working_folder_to_path()
    parsed = dict(parse_change(text) for text in changes)
    if file is None:
        return _with_absolute_dataset(Experiment(**parsed), None)
    sys.path.insert(1, str(file.parent.resolve()))
    return _with_absolute_dataset(read_experiment(file, parsed), file)


def add_working_folder_to_path() -> None:
    """Let `package.module:function` find the user's own files; not for commands that only look at files."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _with_absolute_dataset(wanted: Experiment, file: Path | None) -> Experiment:
    """The experiment with the full path of its data file, if it names one, so that it can be resumed from anywhere."""
    if Path(wanted.dataset).suffix not in (".npz", ".safetensors"):
        return wanted
    beside = file.parent / wanted.dataset if file else Path(wanted.dataset)
    found = beside if beside.exists() else Path(wanted.dataset)
    return wanted.model_copy(update={"dataset": str(found.expanduser().resolve())})
