"""What a private run has released: a round that any file tells of is never run again, as epsilon counts it once.

A round of a private run is written in another order than any other: the checkpoint first, with the line of figures in
it, and only then what else tells of the round. So whatever a kill leaves, nothing is known of a round that must be run
again.
"""

from collections import Counter
from typing import Any

from fedcover.errors import RunError
from fedcover.log import log
from fedcover.runs import checkpoints
from fedcover.runs.metrics_log import Metrics, is_complete_line, read_lines
from fedcover.runs.run_folder import Folder
from fedcover.server.grid_noise import NOISE_SOURCE
from fedcover.types import State


def write_round(folder: Folder, line: dict[str, Any], state: State) -> None:
    """Put a private round on disk."""
    folder.checkpoint(state, line)
    folder.keep(state)
    folder.append(line)


def check_resumable(folder: Folder, state: State) -> None:
    """Refuse to go on from a state if that would release a round again, or if the noise so far can be taken off."""
    if complaint := noise_problem(folder):
        raise RunError(f"{complaint}; begin a new run under another name")
    last = max(_rounds(folder), default=0)
    if last > state.round:
        raise RunError(
            f"{folder.path} is private and tells of {last} rounds, but its newest whole checkpoint is of round "
            f"{state.round}: rounds that are run again release models that epsilon does not count; begin a new run "
            "under another name, and add the epsilon of both"
        )
    twice = [
        round
        for round, times in Counter(
            file.round for file in checkpoints.list_checkpoints(folder.kept)
        ).items()
        if times > 1
    ]
    if twice:
        raise RunError(
            f"{folder.kept} holds two models of round {twice[0]}, and epsilon counts one: this run is not private"
        )


def warn_of_removable_noise(folder: Folder) -> None:
    """Say that nothing in a folder is private, if it is of an earlier version."""
    if complaint := noise_problem(folder):
        log.warning("%s", complaint)


def noise_problem(folder: Folder) -> str:
    """What is wrong with the noise of a private run, if it is of an earlier version."""
    if folder.experiment.privacy == "none" or folder.manifest.get("noise") == NOISE_SOURCE:
        return ""
    return (
        f"{folder.path} is a private run of an earlier version: its noise can be found and taken off, so nothing that "
        "it has released is private, and its epsilon is not true"
    )


def finish_last_round(folder: Folder, state: State) -> None:
    """Write what a kill may have left out of the last round, once the run is where its newest checkpoint is."""
    folder.keep(state)
    known = folder.truncate_metrics(
        state.round
    )  # what is added to a line that is half written would be lost with it
    for line in all_metrics(folder, state)[len(known) :]:
        folder.append(line)


def all_metrics(folder: Folder, state: State) -> Metrics:
    """The figures up to a state, also those that only its checkpoint has: without them epsilon is too small."""
    known = folder.metrics(state.round)
    if not state.round or (known and known[-1]["round"] == state.round - 1):
        return known
    line = next(
        (
            file.line()
            for file in checkpoints.list_checkpoints(folder.checkpoints)
            if file.round == state.round
        ),
        None,
    )
    last = line is not None and type(line.get("round")) is int and line["round"] == state.round - 1
    return [*known, line] if line and last and is_complete_line(line) else known


def _rounds(folder: Folder) -> set[int]:
    """How many rounds were done when each thing in a folder was written."""
    files = {
        file.round
        for place in (folder.checkpoints, folder.kept)
        for file in checkpoints.list_checkpoints(place)
    }
    lines = {line["round"] + 1 for line in read_lines(folder.path / "metrics.jsonl")}
    ended = {folder.planned_rounds} if (folder.path / "summary.json").exists() else set()
    return files | lines | ended
