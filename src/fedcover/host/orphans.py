"""End child processes when their parent ends, even if the parent was killed with `kill -9`.

The parent holds the write end of a pipe, its children the read end. When the parent ends, the
operating system closes the write end, and every child sees the end of the file. A child then kills
all processes that it has started, and itself.

    subprocess.Popen([...], **lifeline_arguments(os.environ))    # in the parent
    end_with_parent()                                            # at the start of the child

`python -P -m fedcover.host.orphans module:function ...` runs any Python program in this way.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

LIFELINE_VARIABLE = "FEDCOVER_LIFELINE"
"""The environment variable with the number of the read end of the pipe."""


@cache
def _read_end() -> int:
    """Open a pipe and return its read end; the write end stays open until this process ends."""
    read_end, _write_end = os.pipe()  # children inherit only what `pass_fds` names
    return read_end


def lifeline_arguments(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a child that calls `end_with_parent`.

    On Windows, children inherit no pipe, so they outlive their parent.

    >>> lifeline_arguments({"PATH": "/bin"})["env"]["PATH"]
    '/bin'
    """
    if os.name == "nt":
        return {"env": dict(environment)}
    read_end = _read_end()
    return {"env": {**environment, LIFELINE_VARIABLE: str(read_end)}, "pass_fds": (read_end,)}


def end_with_parent() -> None:
    """Kill this process and its descendants when the parent ends.

    Does nothing if the parent did not use `lifeline_arguments`.
    """
    # Remove the variable: this process's own children do not inherit the pipe.
    number = os.environ.pop(LIFELINE_VARIABLE, "")
    if not number.isdecimal():
        return
    read_end = int(number)
    os.set_inheritable(read_end, False)
    threading.Thread(target=_watch, args=(read_end,), name="lifeline", daemon=True).start()


def _watch(read_end: int) -> None:
    os.read(read_end, 1)  # nothing is ever written, so this returns when the parent has ended
    kill_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all processes that this one has started, directly or indirectly, in any session."""
    stopped: set[int] = set()
    # Stop all of them first, so that none can start another while they are being killed.
    while running := descendants([os.getpid()]) - stopped:
        for pid in running:
            send_signal(pid, signal.SIGSTOP)
        stopped |= running
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pids: Collection[int]) -> set[int]:
    """Return all processes that these have started, directly or indirectly."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    all_descendants: set[int] = set()
    to_visit = list(pids)
    while to_visit:
        parent = to_visit.pop()
        new_children = [pid for pid in children.get(parent, []) if pid not in all_descendants]
        all_descendants.update(new_children)
        to_visit += new_children
    return all_descendants


def _parents() -> dict[int, int]:
    """Return the parent of every process.

    Small containers have no `ps`, and systems other than Linux have no /proc.
    """
    return _parents_from_proc() if Path("/proc/self/stat").exists() else _parents_from_ps()


def _parents_from_proc() -> dict[int, int]:
    parents = {}
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            # The second field is the program's name in brackets, which may hold spaces.
            _, _, fields = stat_file.read_text(errors="replace").rpartition(")")
            _state, parent, *_ = fields.split()
            parents[int(stat_file.parent.name)] = int(parent)
    return parents


def _parents_from_ps() -> dict[int, int]:
    command = ["ps", "-A", "-o", "pid=,ppid="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        pairs = [line.split() for line in listing.stdout]
    return {int(pid): int(parent) for pid, parent in pairs if int(pid) != listing.pid}


def main() -> None:
    """Run a function of another program until it or the parent ends.

    The first argument names the function; it finds the others in `sys.argv`.
    """
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -P -m fedcover.host.orphans module:function [the program's own options]"
        )
    end_with_parent()
    sys.argv = sys.argv[1:]
    resolve_name(sys.argv[0])()


if __name__ == "__main__":
    main()
