"""The memory of a federation's long-lived processes, round by round, and whether it grows.

Memory is the anonymous pages of a process in KiB, resident or swapped, seen from outside. It is
sampled many times a round, and the median counts, because the needs of a step come and go.

The slope is the median of the slopes between any two rounds (Theil and Sen). The allocator's steps
and dips do not move it. Its bounds are two standard errors away, from the variance of Kendall's
count, with rounds taken for independent.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from fedcover.flower.local_federation import LocalFederation
from fedcover.host.orphans import descendants

SETTLED_ROUND = 5
"""The first round that counts; before it, programs import and build what all rounds use."""
MAX_GAIN_PERCENT = 0.5
"""Percent of its size in round 5 that a level process may have gained by the end."""

Sizes = dict[str, int]
Pids = dict[str, int]


@dataclass
class MemoryLog:
    """The memory of every long-lived process in every round."""

    pids: Pids = field(default_factory=dict)
    rounds: list[Sizes] = field(default_factory=list)
    _samples: list[Sizes] = field(default_factory=list)

    def sample(self, federation: LocalFederation, finished_rounds: int) -> None:
        """Look at all processes once."""
        self.pids = {**long_lived_processes(federation), **self.pids}
        sizes = process_sizes(self.pids)
        if finished_rounds > len(self.rounds):  # so this sample belongs to the next round
            self.rounds.append(median_sizes(self._samples or [sizes]))
            self._samples = []
        self._samples.append(sizes)

    @property
    def survivors(self) -> list[str]:
        """Return the names of the processes that were there in every round."""
        return [name for name in self.pids if all(name in sizes for sizes in self.rounds)]

    def growth_by_process(self) -> dict[str, dict[str, Any]]:
        """Return the growth of every process that was there in every round."""
        return {name: growth([sizes[name] for sizes in self.rounds]) for name in self.survivors}


def long_lived_processes(federation: LocalFederation) -> Pids:
    """Return the SuperLink, the SuperNodes, their executors and the server of the run."""
    pids: Pids = {}
    for name, process in federation.processes.items():
        if name == "submit":
            continue
        for pid in [process.pid, *sorted(descendants([process.pid]))]:
            program = _flower_program(pid)
            if program and program != "flwr-clientapp":  # which lives for one message only
                pids.setdefault(f"{name} {program}", pid)  # not its fork, which becomes another
    return pids


def _flower_program(pid: int) -> str:
    """Return the name of the Flower program that a process runs; empty if it runs another."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return ""
    words = (Path(os.fsdecode(word)).name for word in command[1:])
    return next((word for word in words if word.startswith(("flower-", "flwr-"))), "")


def process_sizes(pids: Mapping[str, int]) -> Sizes:
    """Return the KiB of each process that is still there."""
    sizes: Sizes = {}
    for name, pid in pids.items():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            continue
        pages = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)
        if pages:
            sizes[name] = sum(map(int, pages))
    return sizes


def median_sizes(samples: Sequence[Sizes]) -> Sizes:
    """Return the median of each process over the samples of one round."""
    names = dict.fromkeys(name for sizes in samples for name in sizes)
    return {
        name: round(median(sizes[name] for sizes in samples if name in sizes)) for name in names
    }


def slope(kib: Sequence[float]) -> dict[str, Any]:
    """Return the slope of a series, and its bounds."""
    num_rounds = len(kib)
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(kib), 2))
    last = len(slopes) - 1
    distance = round((num_rounds * (num_rounds - 1) * (2 * num_rounds + 5) / 18) ** 0.5)
    upper = min(last, len(slopes) // 2 + distance)
    lower = last - upper
    return {
        "kib_per_round": round(median(slopes), 1),
        "between": [round(slopes[lower], 1), round(slopes[upper], 1)],
    }


def growth(kib: Sequence[float]) -> dict[str, Any]:
    """Return the slope of a process's memory from round 5 on, and whether it grows.

    It grows if the bounds of the slope are above zero in all these rounds and in their second half,
    and it has gained half a percent by the end.
    """
    settled = kib[SETTLED_ROUND - 1 :]
    whole, second_half = slope(settled), slope(settled[len(settled) // 2 :])
    percent = round(100 * (settled[-1] / settled[0] - 1), 2)
    rises = all(part["between"][0] > 0 for part in (whole, second_half))
    return {
        **whole,
        "second_half": second_half,
        "percent": percent,
        "grows": rises and percent >= MAX_GAIN_PERCENT,
        "kib": list(kib),
    }
