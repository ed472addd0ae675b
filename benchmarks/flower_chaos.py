"""Chaos: nodes, servers and SuperLinks are killed and restarted. How long is the longest gap?

Run by `make chaos`; prints JSON. A federation as `docs/deploy.md` describes it runs on this
machine, with that page's certificates, a key for every node, and a SuperLink with a database.

In 15 minutes `kill -9` hits nodes 8 times, servers 6 times and SuperLinks 4 times, in a random
order, once in every equal share of the time. A killed program ends with all that it has started.
Every program that has ended, `fedcover flower run --resume` too, is started again two seconds later
with the same command, as a service manager would do (`Restart=always`, `RestartSec=2`). Five rounds
after the last kill everything is stopped. So the number of rounds depends on the machine.

A gap is the time from one new round to the next, sampled twice a second. A task is a client that
was asked in a round. It is accounted for if `events.jsonl` has its answer, or says that it was
rejected, late or lost.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import fedcover as fc
from benchmarks.environment import environment_info
from benchmarks.tls_federation import TLSFederation
from fedcover.host.orphans import descendants
from fedcover.runs.metrics_log import EVENTS, read_events, read_lines

KILLS = {"node": 8, "server": 6, "superlink": 4}
"""How often each is killed in 15 minutes."""
RESTART_DELAY = 2.0
"""Seconds until a program that has ended is started again."""
LONG_GAP = 45.0
"""Seconds from which a gap is listed."""
ROUND_TIMEOUT = 900.0
"""Seconds that a round may take at most."""
MANY_ROUNDS = 100_000
"""More rounds than there can be."""
LAST_ROUNDS = 5
"""Rounds after the last kill."""


@dataclass
class Service:
    """A program that is started again whenever it has ended."""

    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    starts: int = 1
    ended: float | None = None

    def restart_if_due(self) -> None:
        """Start the program again if it ended long enough ago."""
        now = time.monotonic()
        if self.ended is None:
            self.ended = None if self.process.poll() is None else now
        elif now - self.ended > RESTART_DELAY:
            self.process, self.ended = self.start(), None
            self.starts += 1


@dataclass
class Chaos:
    """A federation with TLS and keys, the run on it, and the kills."""

    federation: TLSFederation
    nodes: int
    experiment: fc.Experiment
    services: dict[str, Service] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
    kills: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Return the run folder, which is below the one in which the SuperLink was started."""
        return self.federation.folder / "runs" / self.experiment.name

    def start(self) -> None:
        """Start everything for the first time."""
        federation = self.federation
        federation.prepare()
        (federation.folder / "experiment.toml").write_text(self.experiment.to_toml())
        self._add_service("superlink", partial(federation.start_superlink, wait=False))
        federation.wait_until_listening("superlink", federation.port)
        for node in range(self.nodes):
            name = f"node-{node}"
            config = {"partition-id": node, "num-partitions": self.nodes}
            federation.register(name)
            self._add_service(name, partial(federation.start_supernode, name, config))
        self._add_service("admin", self._start_run)

    def _add_service(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.services[name] = Service(start, start())

    def _start_run(self) -> subprocess.Popen[bytes]:
        exists = (self.folder / "experiment.toml").exists()
        return self.federation.start_run("experiment.toml", self.nodes, resume=exists)

    def restart_clock(self) -> None:
        """Count the time from the last round on."""
        self.begin = time.monotonic()
        self.rounds = [0.0]

    def run_until(self, is_done: Callable[[], bool], seconds: float = ROUND_TIMEOUT) -> bool:
        """Restart what ends until a condition holds; return whether it came to hold in time."""
        end = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > end:
                return False
            for service in self.services.values():
                service.restart_if_due()
            lines = read_lines(self.folder / "metrics.jsonl")
            if max((line["round"] for line in lines), default=-1) >= len(self.rounds):
                self.rounds.append(time.monotonic() - self.begin)
            time.sleep(0.5)
        return True

    def run_one_round(self) -> None:
        """Restart what ends until there is another round."""
        num_rounds = len(self.rounds)
        self.run_until(lambda: len(self.rounds) > num_rounds)

    def server_pids(self) -> list[int]:
        """Return the processes of the run's server."""
        superlink = self.services["superlink"].process
        return [
            pid for pid in descendants([superlink.pid]) if b"flwr-serverapp" in _command_of(pid)
        ]

    def kill(self, kind: str, draw: random.Random) -> None:
        """Kill the server, the SuperLink or any node, once it runs."""
        nodes = [name for name in self.services if name.startswith("node-")]
        name = draw.choice(nodes if kind == "node" else [kind])
        kill = self._kill_server if kind == "server" else self._kill_service
        if kill(name):
            second = round(time.monotonic() - self.begin, 1)
            self.kills.append({"second": second, "killed": name})

    def _kill_server(self, _name: str) -> bool:
        """Kill the server alone; return whether there was one."""
        if not self.run_until(lambda: bool(self.server_pids())):
            return False
        for pid in self.server_pids():
            os.kill(pid, signal.SIGKILL)
        return True

    def _kill_service(self, name: str) -> bool:
        """Kill a program with all that it has started; return whether it was running."""
        if not self.run_until(lambda: self.services[name].process.poll() is None):
            return False
        self.federation.kill(name)
        return True

    def gaps(self) -> Iterator[dict[str, Any]]:
        """Yield the time before each round but the first, and the kills in this gap or the last."""
        for number, (start, end) in enumerate(pairwise(self.rounds), start=1):
            last_start = self.rounds[max(0, number - 2)]
            kills = [kill for kill in self.kills if last_start <= kill["second"] <= end]
            yield {
                "round": number,
                "seconds": round(end - start, 1),
                "killed_seconds_before_its_end": [
                    [kill["killed"], round(end - kill["second"], 1)] for kill in kills
                ],
            }


def run_chaos(minutes: float, nodes: int, seed: int, place: Path) -> dict[str, object]:
    """Run an experiment while everything is killed; return the figures."""
    draw = random.Random(seed)
    experiment = fc.Experiment(
        name="chaos",
        model="mlp(hidden=[48])",
        fleet="1x1.0 + 1x0.5",
        policy="rolling",
        clients=4 * nodes,
        active=4 * nodes,
        rounds=MANY_ROUNDS,
        epochs=1,
    )
    kinds = kinds_to_kill(minutes, draw)
    share = 60 * minutes / len(kinds)
    chaos = Chaos(TLSFederation(place), nodes, experiment)
    try:
        chaos.start()
        chaos.run_until(lambda: bool(chaos.rounds))
        chaos.restart_clock()  # the first round waited for the nodes to connect
        for number, kind in enumerate(kinds):
            due = chaos.begin + share * (number + draw.random())
            chaos.run_until(lambda due=due: time.monotonic() > due)
            chaos.kill(kind, draw)
        for _ in range(LAST_ROUNDS):
            chaos.run_one_round()
    finally:
        chaos.federation.stop()
    return {"minutes": minutes, "nodes": nodes, "seed": seed, **chaos_figures(chaos)}


def kinds_to_kill(minutes: float, draw: random.Random) -> list[str]:
    """Return what to kill in some minutes, in a random order."""
    kinds = [
        kind for kind, often in KILLS.items() for _ in range(max(1, round(often * minutes / 15)))
    ]
    draw.shuffle(kinds)
    return kinds


def chaos_figures(chaos: Chaos) -> dict[str, object]:
    """Return the rounds, the tasks and the gaps of a run."""
    lines = read_lines(chaos.folder / "metrics.jsonl")
    events = {
        (event["round"], event["client"]): event["event"]
        for event in read_events(chaos.folder / "events.jsonl")
        if event["client"] is not None
    }
    tasks = [
        (line["round"], int(client))
        for line in lines
        for client in [*line["clients"], *line["dropped"]]
    ]
    gaps = list(chaos.gaps())
    return {
        **environment_info(),
        "kills": dict(Counter(kill["killed"].partition("-")[0] for kill in chaos.kills)),
        "rounds": len(lines),
        "rounds_in_order": [line["round"] for line in lines] == list(range(len(lines))),
        "tasks": len(tasks),
        "tasks_accounted_for": sum(events.get(task) in EVENTS for task in tasks),
        "tasks_became": dict(Counter(events.get(task, "unknown") for task in tasks)),
        "seconds_between_rounds_median": round(median(gap["seconds"] for gap in gaps), 1),
        "seconds_between_rounds_longest": max(gap["seconds"] for gap in gaps),
        "starts": {name: service.starts for name, service in chaos.services.items()},
        f"gaps_over_{LONG_GAP:g}_seconds": [gap for gap in gaps if gap["seconds"] > LONG_GAP],
        "kills_in_order": chaos.kills,
        "seconds_between_rounds": [gap["seconds"] for gap in gaps],
    }


def _command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """Run the chaos of the arguments, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="a new folder that keeps the run and all logs")
    arguments = parser.parse_args()
    settings = (arguments.minutes, arguments.nodes, arguments.seed)
    if arguments.logs:
        arguments.logs.mkdir(parents=True)
        print(json.dumps(run_chaos(*settings, arguments.logs.resolve()), indent=2))
        return
    with tempfile.TemporaryDirectory(prefix="fedcover-chaos-") as folder:
        print(json.dumps(run_chaos(*settings, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
