"""Memory of the processes that live through a run on Flower: the pages that they have, and what they hold.

Pages are anonymous ones, in KiB, seen from outside. What a process holds it tells itself, after every look for garbage:
pieces in Python's own memory, and bytes from `malloc`, large ones with pages of their own included. The two differ: a
heap in pieces has pages that nobody uses, and a reserve has room for things that come to stay.

A process rises if the bounds of the slope are above zero, in all rounds from the fifth on and in the second half of
these: the median of the slopes between any two rounds (one that the allocator's steps and dips do not move), its bounds
at two standard errors. Rounds are taken for independent, so that some level ones are called rising. It grows if it has
also gained half a percent; go by rising: the other was added when results were known.
"""

import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from fedcover.flower.local_federation import LocalFederation
from fedcover.host.orphans import descendants

SETTLED_ROUND = 5
"""Rounds after which memory must not grow."""
GROWTH_PERCENT = 0.5
"""Percent of its size that a process must have gained to be called growing."""
PROBE_SOURCE = """
import ctypes, gc, os, sys, time
if any(name in word for word in sys.orig_argv for name in ("flower-superlink", "flower-supernode", "flwr-serverapp")):
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c apart d e used free f".split()]
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Info
    file = os.path.join(os.path.dirname(__file__), f"held-{os.getpid()}.txt")
    def tell(phase, told):
        if phase == "stop" and told["generation"] == 2:
            found = library.mallinfo2()
            with open(file, "a") as out:
                out.write(f"{time.time()} {sys.getallocatedblocks()} {found.used + found.apart}\\n")
    gc.callbacks.append(tell)
"""
Sizes = dict[str, int]
Pids = dict[str, int]


def environment_info() -> dict[str, object]:
    """When, on what, and with which versions something was measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load {os.getloadavg()[1]:.1f}",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "flwr")},
    }


def long_lived_processes(federation: LocalFederation) -> Pids:
    """The processes that live through a run: the SuperLink, the SuperNodes, their executors and the server."""
    found: Pids = {}
    for name, process in federation.processes.items():
        if name == "submit":
            continue
        for pid in [process.pid, *sorted(descendants([process.pid]))]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            words = (Path(os.fsdecode(word)).name for word in command[1:])
            program = next((word for word in words if word.startswith(("flower-", "flwr-"))), "")
            if program and program != "flwr-clientapp":  # which lives for one message only
                found.setdefault(f"{name} {program}", pid)  # not a copy of it that becomes another
    return found


def sizes(pids: Mapping[str, int]) -> Sizes:
    """KiB of each process that is still there."""
    found: Sizes = {}
    for name, pid in pids.items():
        try:
            own = re.findall(
                r"(?:RssAnon|VmSwap):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()
            )
        except OSError:
            continue
        if own:
            found[name] = sum(map(int, own))
    return found


def install_probe(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, has long-lived processes write into it what they hold."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(PROBE_SOURCE)
    return folder


def read_probe(
    folder: Path, pids: Mapping[str, int], ends: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """What processes have held at least between two ends of rounds: in between they hold nothing of either.

    Those that hardly ever look for garbage tell too little.
    """
    found = {}
    for name, pid in pids.items():
        file = folder / f"held-{pid}.txt"
        looks = file.read_text().splitlines() if file.exists() else []
        rounds = minimum_by_round([tuple(map(float, look.split())) for look in looks], ends)
        if len(rounds) > len(ends) / 2:
            pieces, held = zip(*rounds, strict=True)
            found[name] = {"pieces": growth(pieces, "pieces"), "malloc": growth(held, "bytes")}
    return found


def minimum_by_round(looks: Iterable[Sequence[float]], ends: Sequence[float]) -> list[list[int]]:
    """The least of each figure in every round that there were looks in; a look is a time and its figures."""
    rounds: list[list[Sequence[float]]] = [[] for _ in ends]
    for moment, *figures in looks:
        round = sum(end < moment for end in ends)
        if round < len(ends):
            rounds[round].append(figures)
    return [[int(min(column)) for column in zip(*some, strict=True)] for some in rounds if some]


def median_sizes(seen: Sequence[Sizes]) -> Sizes:
    """The median of each process over the looks of one round."""
    names = dict.fromkeys(name for look in seen for name in look)
    return {name: round(median(look[name] for look in seen if name in look)) for name in names}


def trend(figures: Sequence[float], unit: str = "kib") -> dict[str, Any]:
    """The median slope of figures, round by round, and its bounds: Sen's, from the variance of Kendall's count."""
    rounds = len(figures)
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(figures), 2))
    off, last = round((rounds * (rounds - 1) * (2 * rounds + 5) / 18) ** 0.5), len(slopes) - 1
    upper = min(last, len(slopes) // 2 + off)
    low, high = slopes[last - upper], slopes[upper]  # as far from the one end as from the other
    return {
        f"{unit}_per_round": round(median(slopes), 1),
        "between": [round(low, 1), round(high, 1)],
    }


def growth(figures: Sequence[float], unit: str = "kib") -> dict[str, Any]:
    """Whether something has grown to the end, by its figures from the fifth round on."""
    settled = figures[SETTLED_ROUND - 1 :]
    whole, late = trend(settled, unit), trend(settled[len(settled) // 2 :], unit)
    percent = round(100 * (settled[-1] / settled[0] - 1), 2)
    return {
        **whole,
        "second_half": late,
        "rises": (rises := all(line["between"][0] > 0 for line in (whole, late))),
        "grows": rises and percent >= GROWTH_PERCENT,
        "percent": percent,
        unit: list(figures),
    }


def verdict(grown: Mapping[str, dict[str, Any]]) -> dict[str, object]:
    """Of some processes: who has risen or grown to the end, and how much the most it can have been."""
    return {
        "rise": [name for name, found in grown.items() if found["rises"]],
        "grow": [name for name, found in grown.items() if found["grows"]],
        "kib_per_round_at_most": max(
            found["second_half"]["between"][1] for found in grown.values()
        ),
        "percent_at_most": max(found["percent"] for found in grown.values()),
    }


def hold_more(holds: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[str]:
    """Who holds more and more, and of what."""
    return [
        f"{name}: {kind}"
        for name, kinds in holds.items()
        for kind, found in kinds.items()
        if found["rises"]
    ]
