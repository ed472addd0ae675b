"""Follow a run on Flower from outside: its rounds as they end, and what went wrong if it did."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fedcover.errors import RunError
from fedcover.rounds import Report
from fedcover.summary import read_lines

FINISHED = "fedcover: finished"
_STOPPED = re.compile(r"^fedcover: stopped: (.*)", re.MULTILINE)


def follow(process: subprocess.Popen[bytes], folder: Path, log: Path, watch: Callable[[Report], None]) -> None:
    """Show the rounds of a run until the process that streams its log ends; complain if the run did not finish."""
    metrics = folder / "metrics.jsonl"
    known = len(read_lines(metrics))
    summary = folder / "summary.json"
    before = summary.stat().st_mtime_ns if summary.exists() else None
    while True:
        ended = process.poll() is not None
        lines = read_lines(metrics)
        for line in lines[known:]:
            watch(Report(line["round"], line))
        known = max(known, len(lines))
        if ended:
            break
        time.sleep(0.3)
    if not summary.exists() or summary.stat().st_mtime_ns == before:
        raise RunError(said(log))


def pass_on(command: list[str], environment: dict[str, str]) -> bool:
    """Show what a command that streams a run's log says, as it comes; tells whether the run finished."""
    finished = False
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as streaming:
        assert streaming.stdout is not None
        for line in streaming.stdout:
            finished = finished or line.startswith(FINISHED.encode())  # a node may have said so, too, further on
            print(line.decode(errors="replace"), end="", flush=True)
    return finished


def said(log: Path) -> str:
    """The sentence with which the server stopped, or the end of its log."""
    text = log.read_text(errors="replace")
    sentences = _STOPPED.findall(text)
    return sentences[-1] if sentences else f"the run on Flower did not finish; its log ends so:\n{text[-2000:].strip()}"
