"""Real processes of the command line, and which of them still run."""

import subprocess
import sys
import time
from pathlib import Path


def command(*args: str | Path, **options) -> subprocess.Popen:
    """A real process of the command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedcover", *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def settings(fields: dict) -> list[str]:
    return [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def running(pids):
    """Those that still run; a zombie does not."""
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return {pid for pid, state in states.items() if state != "Z"}


def waited_for(condition, seconds=180):
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met
