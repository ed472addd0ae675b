"""What a private run has released: such a round never runs again, because epsilon counts it once.

A private run writes the files of a round in a different order. The checkpoint comes first and
contains the line of metrics. Only then do other files mention the round. So whatever a killed
process leaves behind, nothing has been released of a round that will run again.
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
    """Write the files of a private round."""
    folder.checkpoint(state, line)
    folder.keep(state)
    folder.append(line)


def check_resumable(folder: Folder, state: State) -> None:
    """Raise if resuming from a state would release a round twice, or the noise is removable."""
    problem = noise_problem(folder)
    if problem:
        raise RunError(f"{problem}; begin a new run under another name")
    last = max(_mentioned_rounds(folder), default=0)
    if last > state.round:
        raise RunError(
            f"{folder.path} is private and has released {last} rounds, but its newest intact "
            f"checkpoint is of round {state.round}: rounds that are run again release models that "
            "epsilon does not count; begin a new run under another name, and add the epsilon of "
            "both"
        )
    files_per_round = Counter(file.round for file in checkpoints.list_checkpoints(folder.kept))
    for round, files in files_per_round.items():
        if files > 1:
            raise RunError(
                f"{folder.kept} holds two models of round {round}, and epsilon counts one: "
                "this run is not private"
            )


def warn_of_removable_noise(folder: Folder) -> None:
    """Warn that a folder of an earlier version is not private."""
    problem = noise_problem(folder)
    if problem:
        log.warning("%s", problem)


def noise_problem(folder: Folder) -> str:
    """Describe what is wrong with the noise of an earlier version; "" if nothing is."""
    if folder.experiment.privacy == "none" or folder.manifest.get("noise") == NOISE_SOURCE:
        return ""
    return (
        f"{folder.path} is a private run of an earlier version: its noise can be found and taken "
        "off, so nothing that it has released is private, and its epsilon is not true"
    )


def finish_last_round(folder: Folder, state: State) -> None:
    """Write what a killed process left unwritten of the round of the newest checkpoint."""
    folder.keep(state)
    # first: a line appended to a half-written one would be lost with it
    metrics = folder.truncate_metrics(state.round)
    for line in all_metrics(folder, state)[len(metrics) :]:
        folder.append(line)


def all_metrics(folder: Folder, state: State) -> Metrics:
    """Return the metrics up to a state, including a line that only its checkpoint has.

    Without that line epsilon would be too small.
    """
    metrics = folder.metrics(state.round)
    if not state.round or (metrics and metrics[-1]["round"] == state.round - 1):
        return metrics
    line = _line_in_checkpoint(folder, state.round)
    if not line or type(line.get("round")) is not int or line["round"] != state.round - 1:
        return metrics
    return [*metrics, line] if is_complete_line(line) else metrics


def _line_in_checkpoint(folder: Folder, round: int) -> dict[str, Any] | None:
    """Return the line of metrics in the checkpoint after some rounds, if any."""
    for file in checkpoints.list_checkpoints(folder.checkpoints):
        if file.round == round:
            return file.line()
    return None


def _mentioned_rounds(folder: Folder) -> set[int]:
    """Return the round counts that any file in a folder mentions."""
    rounds = set()
    for states in (folder.checkpoints, folder.kept):
        rounds |= {file.round for file in checkpoints.list_checkpoints(states)}
    rounds |= {line["round"] + 1 for line in read_lines(folder.path / "metrics.jsonl")}
    if (folder.path / "summary.json").exists():
        rounds.add(folder.planned_rounds)
    return rounds
