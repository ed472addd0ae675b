"""Follow a run on Flower from outside: its rounds as they end, and what went wrong if it did."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fedcover.errors import RunError
from fedcover.flower.crash_report import KILLED
from fedcover.host.orphans import lifeline_arguments
from fedcover.runs.metrics_log import Metrics, read_lines
from fedcover.server.round import RoundReport

FINISHED = "fedcover: finished"
_STOPPED = re.compile(r"^fedcover: stopped: (.*)", re.MULTILINE)

ENDING = 15.0
"""Seconds without a server after which its run has not ended as runs do; Flower itself waits for a minute."""


def follow_run(
    process: subprocess.Popen[bytes],
    folder: Path,
    log: Path,
    watch: Callable[[RoundReport], None],
    served: Callable[[], bool] = lambda: True,
) -> None:
    """Show the rounds of a run until the process that streams its log ends; complain if the run did not finish.

    `served` says whether the process that the rounds are made in is there.
    """
    metrics = folder / "metrics.jsonl"
    known = _last_round(read_lines(metrics))
    summary = folder / "summary.json"
    before = _stamp(summary)
    begun, last_seen = False, 0.0
    while True:
        ended = process.poll() is not None
        lines = read_lines(metrics)
        for line in lines:
            if line["round"] > known:
                watch(RoundReport(line["round"], line))
        known = _last_round(
            lines
        )  # lower than before once the server has cut off the rounds that it runs again
        if ended:
            break
        now = time.monotonic()
        if served():
            begun, last_seen = True, now
        elif (
            begun and now - last_seen > ENDING and _stamp(summary) == before and not _said_why(log)
        ):
            raise RunError(KILLED)
        time.sleep(0.3)
    if _stamp(summary) in (None, before) or _STOPPED.search(log.read_text(errors="replace")):
        raise RunError(failure_message(log))


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _said_why(log: Path) -> bool:
    """Whether the server has told how its run ended."""
    text = log.read_text(errors="replace")
    return FINISHED in text or _STOPPED.search(text) is not None


def _last_round(lines: Metrics) -> int:
    return max((line["round"] for line in lines), default=-1)


def stream_log(command: list[str], environment: dict[str, str]) -> None:
    """Show what a command that streams a run's log says, as it comes; complain if the run did not finish.

    Once the server has said why it stops, that is the complaint; what Flower makes of it is not shown.
    """
    finished, stopped, why = False, False, "the run on Flower did not finish; its log is above"
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **lifeline_arguments(environment),
    ) as streaming:
        assert streaming.stdout is not None
        try:
            for each in streaming.stdout:
                line = each.decode(errors="replace")
                finished = finished or line.startswith(
                    FINISHED
                )  # a node may have said so, too, further on
                if said_why := _STOPPED.match(line):
                    stopped, why = True, said_why[1]
                if not stopped:
                    print(line, end="", flush=True)
        except BaseException:
            streaming.terminate()  # it would stream on, with nobody to read it
            raise
    if not finished:
        raise RunError(why)


def failure_message(log: Path) -> str:
    """The sentence with which the server stopped, or the end of its log."""
    text = log.read_text(errors="replace")
    sentences = _STOPPED.findall(text)
    return (
        sentences[-1]
        if sentences
        else f"the run on Flower did not finish; its log ends so:\n{text[-2000:].strip()}"
    )
