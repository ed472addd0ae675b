"""Load: 64 virtual clients over 4 SuperNodes for 50 rounds.

Run by `make soak`; prints JSON, and fails if the list `failures` in it is not empty: if an update
was lost, our server grows, or a process of Flower's grows by more than 64 KiB a round from round 5
on. `process_memory.py` says how memory is measured.

Flower's part of a round is its wall time less the time of the same clients in one process. That
time is divided by the number of cores, which all nodes share.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import fedcover as fc
from benchmarks.environment import environment_info
from benchmarks.process_memory import SETTLED_ROUND, MemoryLog, growth
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import run_local_federation
from fedcover.runs.metrics_log import read_lines

OUR_PROGRAM = "flwr-serverapp"
"""The only long-lived program that runs our code; on a node it runs for one message at a time."""
FLOWER_LIMIT = 64
"""KiB a round by which a process of Flower's may grow."""


def soak(rounds: int, clients: int, nodes: int, place: Path) -> dict[str, Any]:
    """Run the load and measure it."""
    experiment = fc.Experiment(
        name="soak",
        model="mlp(hidden=[200])",
        fleet="1x1.0 + 1x0.5 + 2x0.25",
        policy="rolling",
        clients=clients,
        active=clients,
        rounds=rounds,
        epochs=1,
    )
    alone = seconds_alone(experiment) / rounds
    folder = place / "run"
    memory = run_on_flower(experiment, nodes, place, folder)
    lines = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    seconds = [sum(line["seconds"].values()) for line in lines]
    figures = {
        **environment_info(),
        "rounds": len(lines),
        "clients": clients,
        "nodes": nodes,
        "updates_asked": rounds * clients,
        "updates_used": sum(event["event"] == "answered" for event in events),
        "updates_rejected_late_lost": [
            sum(line[key] for line in lines) for key in ("rejected", "late", "lost")
        ],
        "seconds_per_round_median": round(median(seconds), 2),
        "seconds_per_round": [round(second, 1) for second in seconds],
        "seconds_alone_per_round": round(alone, 3),
        "flowers_part": round(1 - alone / (os.cpu_count() or 1) / median(seconds), 3),
        "processes": len(memory.pids),
        "memory": memory.growth_by_process(),
        "together": growth(
            [sum(sizes[name] for name in memory.survivors) for sizes in memory.rounds]
        ),
    }
    return {"failures": list(failures(figures)), **figures}


def seconds_alone(experiment: fc.Experiment) -> float:
    """Return the seconds that an experiment takes in one process."""
    start = time.perf_counter()
    fc.run(experiment, machine=fc.Machine("sequential", "cpu", 1))
    return time.perf_counter() - start


def run_on_flower(experiment: fc.Experiment, nodes: int, place: Path, folder: Path) -> MemoryLog:
    """Run an experiment on a federation of its own; return the memory of its processes."""
    configs = [{"partition-id": node, "num-partitions": nodes} for node in range(nodes)]
    settings = RunConfig(
        experiment.to_toml(), str(folder), device="cpu", nodes=nodes, deadline=600.0
    )
    metrics = folder / "metrics.jsonl"
    memory = MemoryLog()
    with (
        run_local_federation(place / "flower", configs) as federation,
        (place / "log.txt").open("wb") as log,
    ):
        process = federation.submit(write_app(place / "app", settings), log)
        while process.poll() is None:
            finished = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            memory.sample(federation, finished)
            time.sleep(0.5)
    return memory


def failures(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not as it should be."""
    asked, used = figures["updates_asked"], figures["updates_used"]
    if used != asked:
        yield f"{asked - used} of {asked} updates were lost"
    memory = figures["memory"]
    if len(memory) != figures["processes"]:
        yield f"{figures['processes'] - len(memory)} long-lived processes ended before the run"
    for name, process in memory.items():
        per_round = process["kib_per_round"]
        if name.endswith(OUR_PROGRAM) and process["grows"]:
            yield f"{name} grows by {per_round} KiB a round; it must not grow"
        if not name.endswith(OUR_PROGRAM) and per_round > FLOWER_LIMIT:
            yield f"{name} grows by {per_round} KiB a round; the limit is {FLOWER_LIMIT}"


def main() -> None:
    """Run the load of the arguments, print the figures, and fail if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    arguments = parser.parse_args()
    least = SETTLED_ROUND + 6
    if arguments.rounds < least:
        parser.error(f"--rounds must be at least {least}: slopes need rounds after {SETTLED_ROUND}")
    with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as folder:
        figures = soak(arguments.rounds, arguments.clients, arguments.nodes, Path(folder))
    print(json.dumps(figures, indent=2))
    if figures["failures"]:
        sys.exit("\n".join(figures["failures"]))


if __name__ == "__main__":
    main()
