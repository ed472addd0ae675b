"""Follow a run on Flower from outside: its rounds as they end, and the reason if it fails."""

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

MAX_SECONDS_WITHOUT_SERVER = 15.0
"""Seconds without a server after which its run has failed; Flower itself waits for a minute."""


def follow_run(
    process: subprocess.Popen[bytes],
    folder: Path,
    log: Path,
    watch: Callable[[RoundReport], None],
    server_is_running: Callable[[], bool] = lambda: True,
) -> None:
    """Report the rounds of a run until it ends.

    Args:
        process: Streams the log of the run, and ends when the run does.
        folder: The folder of the run.
        log: The file with the streamed log.
        watch: Called with each new round.
        server_is_running: Returns whether the server's process is there.

    Raises:
        RunError: If the run did not finish.
    """
    metrics = folder / "metrics.jsonl"
    last_round = _last_round(read_lines(metrics))
    summary = folder / "summary.json"
    old_summary_time = _modified_time(summary)
    last_seen: float | None = None
    while True:
        has_ended = process.poll() is not None
        lines = read_lines(metrics)
        for line in lines:
            if line["round"] > last_round:
                watch(RoundReport(line["round"], line))
        # may go back: a resumed run cuts off the rounds that it repeats
        last_round = _last_round(lines)
        if has_ended:
            break
        now = time.monotonic()
        if server_is_running():
            last_seen = now
        elif (
            last_seen is not None
            and now - last_seen > MAX_SECONDS_WITHOUT_SERVER
            and _modified_time(summary) == old_summary_time
            and not _server_has_ended(log)
        ):
            raise RunError(KILLED)
        time.sleep(0.3)
    has_new_summary = _modified_time(summary) not in (None, old_summary_time)
    if not has_new_summary or _STOPPED.search(log.read_text(errors="replace")):
        raise RunError(failure_message(log))


def _modified_time(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _server_has_ended(log: Path) -> bool:
    """Return whether the server has logged how its run ended."""
    text = log.read_text(errors="replace")
    return FINISHED in text or _STOPPED.search(text) is not None


def _last_round(lines: Metrics) -> int:
    return max((line["round"] for line in lines), default=-1)


def stream_log(command: list[str], environment: dict[str, str]) -> None:
    """Print the log of a run while a command streams it.

    What Flower writes after the server's reason to stop is not printed.

    Raises:
        RunError: If the run did not finish; with the server's reason if it gave one.
    """
    has_finished = has_stopped = False
    why = "the run on Flower did not finish; its log is above"
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
                # only at the start of a line: a node may have logged it, too
                has_finished = has_finished or line.startswith(FINISHED)
                if stopped := _STOPPED.match(line):
                    has_stopped, why = True, stopped[1]
                if not has_stopped:
                    print(line, end="", flush=True)
        except BaseException:
            streaming.terminate()  # or it would stream on, with nobody to read it
            raise
    if not has_finished:
        raise RunError(why)


def failure_message(log: Path) -> str:
    """Return the server's last reason to stop, or the end of the log."""
    text = log.read_text(errors="replace")
    reasons = _STOPPED.findall(text)
    if reasons:
        return str(reasons[-1])
    return f"the run on Flower did not finish; the end of its log:\n{text[-2000:].strip()}"
