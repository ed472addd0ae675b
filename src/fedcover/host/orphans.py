"""End a process when the process that started it ends, however that ended: `kill -9` leaves it no time to say so.

The parent holds the write end of a pipe, and its children the read end. The operating system closes the write end when
the parent ends, so every child sees the end of the file. A child then ends all processes that it has started, too.

    subprocess.Popen([..., "-c", "..."], **tied(environment))    # in the parent
    end_with_parent()                                            # at the start of the child

`python -P -m fedcover.host.orphans module:function ...` runs a Python program of somebody else's so.
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
"""The environment variable that names the read end of the pipe to a child."""


@cache
def _read_end() -> int:
    """Open this process's pipe and return its read end; the write end stays open until the process ends."""
    read_end, _write_end = os.pipe()  # neither is inherited unless `pass_fds` names it
    return read_end


def lifeline_arguments(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` for a child that calls `end_with_parent`.

    Where Windows is the system, children are not tied: there they inherit no pipe.

    >>> lifeline_arguments({"PATH": "/bin"})["env"]["PATH"]
    '/bin'
    """
    if os.name == "nt":
        return {"env": dict(environment)}
    read_end = _read_end()
    return {"env": {**environment, LIFELINE_VARIABLE: str(read_end)}, "pass_fds": (read_end,)}


def end_with_parent() -> None:
    """Watch the parent, if it has tied this process to itself; its end ends this process and all its descendants."""
    number = os.environ.pop(
        LIFELINE_VARIABLE, ""
    )  # not for the children of this process: they do not inherit the pipe
    if not number.isdecimal():
        return
    read_end = int(number)
    os.set_inheritable(read_end, False)
    threading.Thread(target=_watch, args=(read_end,), name="lifeline", daemon=True).start()


def _watch(read_end: int) -> None:
    os.read(read_end, 1)  # nobody writes: it returns when the write end is closed
    kill_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all processes that this one has started, directly or not, whatever session they are in."""
    me = os.getpid()
    stopped: set[int] = set()
    while new := descendants([me]) - stopped:
        for pid in new:  # a stopped process starts no others meanwhile
            send_signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pids: Collection[int]) -> set[int]:
    """Return all processes that were started by these, directly or not."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    family: set[int] = set()
    left = list(pids)
    while left:
        new = [pid for pid in children.get(left.pop(), []) if pid not in family]
        family.update(new)
        left += new
    return family


def _parents() -> dict[int, int]:
    """Return the parent of every process; small containers have no `ps`, other systems no /proc."""
    if not Path("/proc/self/stat").exists():
        command = ["ps", "-A", "-o", "pid=,ppid="]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
            assert listing.stdout is not None
            pairs = [line.split() for line in listing.stdout]
        return {int(pid): int(parent) for pid, parent in pairs if int(pid) != listing.pid}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(
                stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            )
    return parents


def main() -> None:
    """Call the function that the first argument names, with the other arguments as its own, while the parent lives."""
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -P -m fedcover.host.orphans module:function [the program's own options]"
        )
    end_with_parent()
    sys.argv = sys.argv[1:]
    resolve_name(sys.argv[0])()


if __name__ == "__main__":
    main()
