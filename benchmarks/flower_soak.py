"""Load: 64 virtual clients over 4 SuperNodes for 20 rounds. Does memory grow, is an update lost, what is Flower's own?

Run by `make soak`; prints JSON. Memory is what each process that lives through the run has for itself (anonymous pages,
in KiB): of each round the median of many looks, as what a step needs comes and goes. From the fifth round on a line is
laid through these figures, and another through their second half; `kib_per_round` is its slope, `plus_minus` twice the
standard error of that. A process grows if both slopes are above zero by more than that: one step up and then a level is
the allocator's, and whatever goes on to the end is kept.

Flower's own part of a round is its wall time less what the same clients take in one process, all cores of which the
nodes share.
"""

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import fedcover as fc
from fedcover.flower.apps import Settings, write_app
from fedcover.flower.processes import Local, descendants, local
from fedcover.summary import read_lines

SETTLED = 5
"""Rounds after which memory must not grow."""
Sizes = dict[str, int]


def sizes(federation: Local) -> Sizes:
    """KiB of every long-lived process: the SuperLink, the SuperNodes, their executors and the server."""
    found: dict[str, int] = {}
    for name, process in federation.processes.items():
        if name == "submit":
            continue
        for pid in [process.pid, *sorted(descendants([process.pid]))]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                own = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            program = Path(os.fsdecode(command[1])).name if len(command) > 1 else ""
            if own and program and program != "flwr-clientapp":  # which lives for one message only
                found.setdefault(f"{name} {program}", sum(map(int, own)))  # not a copy of it that becomes another
    return found


def trend(kib: Sequence[float]) -> dict[str, float]:
    """The slope of a line through sizes, round by round, and twice its standard error."""
    rounds = range(len(kib))
    middle, mean = fmean(rounds), fmean(kib)
    spread = sum((x - middle) ** 2 for x in rounds)
    slope = sum((x - middle) * (y - mean) for x, y in zip(rounds, kib, strict=True)) / spread
    rest = sum((y - mean - slope * (x - middle)) ** 2 for x, y in zip(rounds, kib, strict=True))
    return {
        "kib_per_round": round(slope, 1),
        "plus_minus": round(2 * (rest / (len(kib) - 2) / spread) ** 0.5, 1),
    }


def growth(kib: Sequence[float]) -> dict[str, object]:
    """Whether a process has grown to the end, by its sizes from the fifth round on."""
    settled = kib[SETTLED - 1 :]
    whole, late = trend(settled), trend(settled[len(settled) // 2 :])
    return {
        **whole,
        "second_half": late,
        "grows": all(line["kib_per_round"] > line["plus_minus"] for line in (whole, late)),
        "kib": list(kib),
    }


def usual(seen: Sequence[Sizes]) -> Sizes:
    """The median of each process over the looks of one round."""
    names = dict.fromkeys(name for look in seen for name in look)
    return {name: round(median(look[name] for look in seen if name in look)) for name in names}


def soak(rounds: int, clients: int, nodes: int, place: Path) -> dict[str, object]:
    """Run the load and measure it."""
    wanted = fc.Experiment(
        name="soak", model="mlp(hidden=[200])", fleet="1x1.0 + 1x0.5 + 2x0.25", policy="rolling", clients=clients,
        active=clients, rounds=rounds, epochs=1,
    )  # fmt: skip
    started = time.perf_counter()
    fc.run(wanted, machine=fc.Machine("sequential", "cpu", 1))
    alone = (time.perf_counter() - started) / rounds
    configs = [{"partition-id": place, "num-partitions": nodes} for place in range(nodes)]
    memory: list[Sizes] = []
    looks: list[Sizes] = []
    folder = place / "run"
    with local(place / "flower", configs) as federation, (place / "log.txt").open("wb") as log:
        app = write_app(
            place / "app", Settings(wanted.to_toml(), str(folder), device="cpu", nodes=nodes, deadline=600.0)
        )
        process = federation.submit(app, log)
        while process.poll() is None:
            done = (folder / "metrics.jsonl").read_bytes().count(b"\n") if (folder / "metrics.jsonl").exists() else 0
            look = sizes(federation)
            if done > len(memory):  # this look is of the next round already; after the last one the server ends
                memory.append(usual(looks or [look]))
                looks = []
            looks.append(look)
            time.sleep(0.5)
    lines = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    seconds = [sum(line["seconds"].values()) for line in lines]
    lived = [name for name in memory[-1] if all(name in look for look in memory)]
    grown = {name: growth([look[name] for look in memory]) for name in lived}
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load {os.getloadavg()[1]:.1f}",
        "rounds": len(lines),
        "clients": clients,
        "nodes": nodes,
        "updates_asked": rounds * clients,
        "updates_used": sum(event["event"] == "answered" for event in events),
        "updates_rejected_late_lost": [sum(line[k] for line in lines) for k in ("rejected", "late", "lost")],
        "seconds_per_round_median": round(median(seconds), 2),
        "seconds_per_round": [round(s, 1) for s in seconds],
        "seconds_alone_per_round": round(alone, 3),
        "flowers_part": round(1 - alone / (os.cpu_count() or 1) / median(seconds), 3),
        "grows_from_round_5_on": [name for name, found in grown.items() if found["grows"]],
        "memory": grown,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    if given.rounds < 3 * SETTLED:
        parser.error(f"--rounds must be at least {3 * SETTLED}: a slope needs some rounds after the {SETTLED}th")
    with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as folder:
        print(json.dumps(soak(given.rounds, given.clients, given.nodes, Path(folder)), indent=2))
