"""Follow a run on Flower from outside: its rounds as they end, and the reason if it fails."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcover.errors import RunError
from fedcover.flower.crash_report import KILLED
from fedcover.flower.status import (
    ServerState,
    StatusFile,
    last_announcement,
    read_announcement,
    read_status,
    was_killed,
)
from fedcover.host.orphans import lifeline_arguments
from fedcover.runs.metrics_log import Metrics, read_lines
from fedcover.server.round import RoundReport

POLL = 0.3
"""Seconds between two looks at the files of a run."""


@dataclass(frozen=True)
class Launch:
    """A run that was launched on this machine.

    Attributes:
        name: The name by which its status is recognised.
        folder: The folder of the run.
        log: The file with the streamed log.
    """

    name: str
    folder: Path
    log: Path


def follow_run(
    process: subprocess.Popen[bytes], launch: Launch, watch: Callable[[RoundReport], None]
) -> None:
    """Report the rounds of a run until it ends.

    Args:
        process: Streams the log of the run, and ends when the run does.
        launch: The run.
        watch: Called with each new round.

    Raises:
        RunError: If the run did not finish.
    """
    metrics = launch.folder / "metrics.jsonl"
    last_round = _last_round(read_lines(metrics))
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None
        lines = read_lines(metrics)
        for line in lines:
            if line["round"] > last_round:
                watch(RoundReport(line["round"], line))
        # may go back: a resumed run cuts off the rounds that it repeats
        last_round = _last_round(lines)
        if was_killed(launch.folder, launch.name):
            status_file = StatusFile(launch.folder, launch.name, last_round + 1)
            status_file.write(ServerState.FAILED, KILLED)
            raise RunError(KILLED)
        if not has_ended:
            time.sleep(POLL)
    check_finished(launch)


def _last_round(lines: Metrics) -> int:
    return max((line["round"] for line in lines), default=-1)


def check_finished(launch: Launch) -> None:
    """Raise a RunError if a run that has ended did not finish: with the reason, or the log's end.

    The log only counts where the status could not be written, because the disk was full.
    """
    text = launch.log.read_text(errors="replace")
    status = read_status(launch.folder, launch.name)
    if status is None:
        status = last_announcement(text.splitlines())
    if status is None or not status.is_final:
        end = text[-2000:].strip()
        raise RunError(f"the run on Flower did not finish; the end of its log:\n{end}")
    if status.state != ServerState.FINISHED:
        raise RunError(status.message)


def stream_log(command: list[str], environment: dict[str, str]) -> None:
    """Print the log of a run while a command streams it.

    What Flower writes after the server's reason to stop is not printed.

    Raises:
        RunError: If the run did not finish; with the server's reason if it gave one.
    """
    outcome = None
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **lifeline_arguments(environment),
    ) as streaming:
        assert streaming.stdout is not None
        try:
            for content in streaming.stdout:
                line = content.decode(errors="replace")
                outcome = read_announcement(line) or outcome
                if outcome is None or outcome.state == ServerState.FINISHED:
                    print(line, end="", flush=True)
        except BaseException:
            streaming.terminate()  # or it would stream on, with nobody to read it
            raise
    if outcome is None:
        raise RunError("the run on Flower did not finish; its log is above")
    if outcome.state != ServerState.FINISHED:
        raise RunError(outcome.message)
