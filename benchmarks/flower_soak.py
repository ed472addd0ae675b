"""Load: 64 virtual clients over 4 SuperNodes for 50 rounds. Does memory grow, is an update lost, what is Flower's own?

Run by `make soak`; prints JSON. How memory is measured, and when a process is said to rise, is told in
`flower_memory.py`; of the pages in each round the median of many looks is taken, as what a step needs comes and goes.
`percent` is what has come to the size in round 5 by the end. Processes that run our code (the server) and Flower's own
are told apart; `together` is the sum of all. `holds` is what the processes that look for garbage have between messages,
`hold_more` those of them that have ever more, by the same rule.

Flower's own part of a round is its wall time less what the same clients take in one process, all cores of which the
nodes share.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import fedcover as fc
from benchmarks.flower_memory import (
    SETTLED_ROUND,
    Pids,
    Sizes,
    environment_info,
    growth,
    hold_more,
    install_probe,
    long_lived_processes,
    median_sizes,
    read_probe,
    sizes,
    verdict,
)
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import run_local_federation
from fedcover.runs.metrics_log import read_lines

OURS = "flwr-serverapp"
"""The one program that lives through a run and runs our code; the nodes' part of it lives for one message."""


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
    ends: list[float] = []
    pids: Pids = {}
    folder, holds = place / "run", install_probe(place / "telling")
    with (
        run_local_federation(place / "flower", configs, [str(holds)]) as federation,
        (place / "log.txt").open("wb") as log,
    ):
        app = write_app(
            place / "app",
            RunConfig(wanted.to_toml(), str(folder), device="cpu", nodes=nodes, deadline=600.0),
        )
        process = federation.submit(app, log)
        while process.poll() is None:
            done = (
                (folder / "metrics.jsonl").read_bytes().count(b"\n")
                if (folder / "metrics.jsonl").exists()
                else 0
            )
            pids |= long_lived_processes(federation)
            look = sizes(pids)
            if done > len(
                memory
            ):  # this look is of the next round already; after the last one the server ends
                memory.append(median_sizes(looks or [look]))
                ends.append(time.time())
                looks = []
            looks.append(look)
            time.sleep(0.5)
    lines = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    seconds = [sum(line["seconds"].values()) for line in lines]
    lived = [name for name in memory[-1] if all(name in look for look in memory)]
    grown = {name: growth([look[name] for look in memory]) for name in lived}
    held = read_probe(holds, pids, ends)
    return {
        **environment_info(),
        "rounds": len(lines),
        "clients": clients,
        "nodes": nodes,
        "updates_asked": rounds * clients,
        "updates_used": sum(event["event"] == "answered" for event in events),
        "updates_rejected_late_lost": [
            sum(line[k] for line in lines) for k in ("rejected", "late", "lost")
        ],
        "seconds_per_round_median": round(median(seconds), 2),
        "seconds_per_round": [round(s, 1) for s in seconds],
        "seconds_alone_per_round": round(alone, 3),
        "flowers_part": round(1 - alone / (os.cpu_count() or 1) / median(seconds), 3),
        "ours": verdict({name: found for name, found in grown.items() if name.endswith(OURS)}),
        "flowers": verdict(
            {name: found for name, found in grown.items() if not name.endswith(OURS)}
        ),
        "together": growth([sum(look[name] for name in lived) for look in memory]),
        "hold_more": hold_more(held),
        "holds": held,
        "memory": grown,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    if given.rounds < 3 * SETTLED_ROUND:
        parser.error(
            f"--rounds must be at least {3 * SETTLED_ROUND}: a slope needs some rounds after the {SETTLED_ROUND}th"
        )
    with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as folder:
        print(json.dumps(soak(given.rounds, given.clients, given.nodes, Path(folder)), indent=2))
