"""Load: 64 virtual clients over 4 SuperNodes for 20 rounds. Does memory grow, is an update lost, what is Flower's own?

Run by `make soak`; prints JSON. Memory is the resident size of every process that lives through the run, read when a
round ends. Flower's own part of a round is its wall time less what the same clients take in one process, all cores
of which the nodes share.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

import fedcover as fc
from fedcover.flower.apps import Settings, write_app
from fedcover.flower.processes import Local, descendants, local
from fedcover.summary import read_lines

SETTLED = 5
"""Rounds after which memory must not grow."""


def resident(federation: Local) -> dict[str, int]:
    """MiB of every long-lived process: the SuperLink, the SuperNodes, their executors and the server."""
    found: dict[str, int] = {}
    for name, process in federation.processes.items():
        if name == "submit":
            continue
        for pid in [process.pid, *sorted(descendants([process.pid]))]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            program = Path(os.fsdecode(command[1])).name if len(command) > 1 else ""
            if program and program != "flwr-clientapp":  # which lives for one message only
                found[f"{name} {program}"] = pages * 4096 // 2**20
    return found


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
    memory: list[dict[str, int]] = []
    folder = place / "run"
    with local(place / "flower", configs) as federation, (place / "log.txt").open("wb") as log:
        app = write_app(
            place / "app", Settings(wanted.to_toml(), str(folder), device="cpu", nodes=nodes, deadline=600.0)
        )
        process = federation.submit(app, log)
        while process.poll() is None:
            done = (folder / "metrics.jsonl").read_bytes().count(b"\n") if (folder / "metrics.jsonl").exists() else 0
            if done > len(memory):
                memory.append(resident(federation))
            time.sleep(0.2)
    lines = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    seconds = [sum(line["seconds"].values()) for line in lines]
    settled, last = memory[SETTLED - 1], memory[-1]
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
        "mib_after_round_5": settled,
        "mib_at_the_end": last,
        "growth_mib": {name: last[name] - size for name, size in settled.items() if name in last},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as folder:
        print(json.dumps(soak(given.rounds, given.clients, given.nodes, Path(folder)), indent=2))
