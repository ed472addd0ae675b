"""Load: 64 virtual clients over 4 SuperNodes for 50 rounds. Does memory grow, is an update lost, what is Flower's own?

Run by `make soak`; prints JSON. Memory is what each process that lives through the run has for itself (anonymous
pages, in KiB): of each round the median of many looks, as what a step needs comes and goes. `kib_per_round` is the
median of the slopes between any two rounds from the fifth on (one that the allocator's steps and dips do not move),
`between` are its bounds at two standard errors; the same follows for the second half. `percent` is what has come to the
size in round 5 by the end. A process rises if both bounds are above zero (rounds are taken for independent, so
that some level ones are called rising), and grows if it has also gained half a percent. Go by `rise`: `grow` was added
later, when results were known. Fifty rounds do not tell a small leak from a heap that settles page by page, for which
`flower_messages.py` has more of them. Processes that run our code (the server) and Flower's own are told apart;
`together` is the sum of all.

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
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import fedcover as fc
from fedcover.flower.apps import Settings, write_app
from fedcover.flower.processes import Local, descendants, local
from fedcover.summary import read_lines

SETTLED = 5
"""Rounds after which memory must not grow."""
OURS = "flwr-serverapp"
"""The one program that lives through a run and runs our code; the nodes' part of it lives for one message."""
MUCH = 0.5
"""Percent of its size that a process must have gained to be called growing."""
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
            words = (Path(os.fsdecode(word)).name for word in command[1:])
            program = next((word for word in words if word.startswith(("flower-", "flwr-"))), "")
            if own and program and program != "flwr-clientapp":  # which lives for one message only
                found.setdefault(f"{name} {program}", sum(map(int, own)))  # not a copy of it that becomes another
    return found


def trend(kib: Sequence[float]) -> dict[str, Any]:
    """The median slope of sizes, round by round, and its bounds: Sen's, from the variance of Kendall's count."""
    rounds = len(kib)
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(kib), 2))
    off, last = round((rounds * (rounds - 1) * (2 * rounds + 5) / 18) ** 0.5), len(slopes) - 1
    upper = min(last, len(slopes) // 2 + off)
    low, high = slopes[last - upper], slopes[upper]  # as far from the one end as from the other
    return {"kib_per_round": round(median(slopes), 1), "between": [round(low, 1), round(high, 1)]}


def growth(kib: Sequence[float]) -> dict[str, Any]:
    """Whether a process has grown to the end, by its sizes from the fifth round on."""
    settled = kib[SETTLED - 1 :]
    whole, late = trend(settled), trend(settled[len(settled) // 2 :])
    percent = round(100 * (settled[-1] / settled[0] - 1), 2)
    return {
        **whole,
        "second_half": late,
        "rises": (rises := all(line["between"][0] > 0 for line in (whole, late))),
        "grows": rises and percent >= MUCH,
        "percent": percent,
        "kib": list(kib),
    }


def verdict(grown: Mapping[str, dict[str, Any]]) -> dict[str, object]:
    """Of some processes: who has risen or grown to the end, and how much the most it can have been."""
    return {
        "rise": [name for name, found in grown.items() if found["rises"]],
        "grow": [name for name, found in grown.items() if found["grows"]],
        "kib_per_round_at_most": max(found["second_half"]["between"][1] for found in grown.values()),
        "percent_at_most": max(found["percent"] for found in grown.values()),
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
        "ours": verdict({name: found for name, found in grown.items() if name.endswith(OURS)}),
        "flowers": verdict({name: found for name, found in grown.items() if not name.endswith(OURS)}),
        "together": growth([sum(look[name] for name in lived) for look in memory]),
        "memory": grown,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    if given.rounds < 3 * SETTLED:
        parser.error(f"--rounds must be at least {3 * SETTLED}: a slope needs some rounds after the {SETTLED}th")
    with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as folder:
        print(json.dumps(soak(given.rounds, given.clients, given.nodes, Path(folder)), indent=2))
