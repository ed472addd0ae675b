"""Chaos: nodes, servers and SuperLinks are killed and started again. How long is the longest gap?

Run by `make chaos`; prints JSON. A federation as `docs/deploy.md` describes it runs on this machine:
with that page's certificates, a key for every node, and a SuperLink that keeps its state in a file.
In 15 minutes `kill -9` hits nodes 8 times, servers 6 times and SuperLinks 4 times, in a random order,
once in every equal share of the time. What is killed ends with all that it has started, and like
anything else that ends it is started again two seconds later, by the same command: as a service
manager does (`Restart=always`, `RestartSec=2`). So is `fedcover flower run --resume`. Five rounds after
the last kill all is stopped: how many rounds there are until then depends on the machine.

A gap is the time from one new round to the next, looked at twice a second. A task is a client that
was asked in a round; it is accounted for if `events.jsonl` has its answer, or says that it was
rejected, late or lost.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import fedcover as fc
from benchmarks.environment import environment_info
from fedcover.flower.local_federation import STEADY_LAUNCHER, LocalFederation, free_port
from fedcover.host.orphans import descendants
from fedcover.runs.metrics_log import EVENTS, read_events, read_lines

KILLS = {"node": 8, "server": 6, "superlink": 4}
"""How often each is killed in 15 minutes."""
PAUSE = 2.0
"""Seconds until a program that has ended is started again."""
LONG = 45.0
"""Seconds from which on a gap is listed."""
PATIENCE = 900.0
"""Seconds that a round may take at most."""
ENOUGH = 100_000
"""More rounds than there can be."""
LAST = 5
"""Rounds after the last kill."""
PAGE = Path(__file__).parent.parent / "docs" / "deploy.md"


@dataclass
class Service:
    """A program that is started again whenever it has ended."""

    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    starts: int = 1
    ended: float | None = None

    def look(self) -> None:
        """Start the program again when it is time."""
        now = time.monotonic()
        if self.ended is None:
            self.ended = None if self.process.poll() is None else now
        elif now - self.ended > PAUSE:
            self.process, self.ended = self.start(), None
            self.starts += 1


@dataclass
class Secured(LocalFederation):
    """A federation as `docs/deploy.md` describes it: TLS, keys, and a SuperLink with a database."""

    def prepare(self) -> None:
        """Make certificates with that page's commands, and tell the administrator's machine where the SuperLink is."""
        found = re.search(
            r"^```bash\n(openssl .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
        )
        assert found is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.finish("bash", "-e", "-c", found[1])
        (self.home("admin") / "config.toml").write_text(
            f'[superlink]\ndefault = "fleet"\n\n[superlink.fleet]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.folder}/ca.crt"\n'
        )

    def finish(self, *command: str) -> None:
        """Run a command of the administrator's to its end."""
        told = {**self.environment("admin"), "SERVER": "127.0.0.1"}
        done = subprocess.run(command, cwd=self.folder, env=told, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"{' '.join(command)[:60]} has failed: {done.stdout!r} {done.stderr!r}"
            )

    def start_superlink(self, *, wait: bool = True) -> subprocess.Popen[bytes]:
        """Start the SuperLink, and wait until it listens."""
        started = self.start(
            "superlink", sys.executable, *STEADY_LAUNCHER, "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--enable-supernode-auth", "--database", "link.db", "--ssl-ca-certfile", "ca.crt",
            "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        if wait:
            self.wait_until_listening("superlink", self.port)
        return started

    def register(self, name: str) -> None:
        """Make a node's key, and make it known to the SuperLink."""
        self.finish("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key")
        self.finish("flwr", "supernode", "register", f"{name}.key.pub", "fleet")

    def start_supernode(self, name: str, config: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a SuperNode whose key is registered."""
        return self.start(
            name, sys.executable, *STEADY_LAUNCHER, "flower-supernode", "--superlink", self.address, "--root-certificates",
            "ca.crt", "--auth-supernode-private-key", f"{name}.key", "--host", "127.0.0.1", "--port", str(free_port()),
            "--node-config", " ".join(f"{key}={value}" for key, value in config.items()),
        )  # fmt: skip

    def start_run(self, experiment: str, nodes: int, *, resume: bool) -> subprocess.Popen[bytes]:
        """Begin a run as the administrator does, or go on with it."""
        return self.start(
            "admin", sys.executable, "-m", "fedcover", "flower", "run", experiment, "fleet", "--nodes", str(nodes),
            *(["--resume"] if resume else []),
        )  # fmt: skip


@dataclass
class Chaos:
    """A federation with TLS and keys, the run on it, and what is done to them."""

    federation: Secured
    nodes: int
    experiment: fc.Experiment
    services: dict[str, Service] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    kills: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run folder: below the one in which the SuperLink was started."""
        return self.federation.folder / "runs" / self.experiment.name

    def start(self) -> None:
        """Start everything for the first time."""
        self.federation.prepare()
        (self.federation.folder / "experiment.toml").write_text(self.experiment.to_toml())
        self._serve("superlink", partial(self.federation.start_superlink, wait=False))
        self.federation.wait_until_listening("superlink", self.federation.port)
        for node in range(self.nodes):
            self.federation.register(f"node-{node}")
            config = {"partition-id": node, "num-partitions": self.nodes}
            self._serve(
                f"node-{node}", partial(self.federation.start_supernode, f"node-{node}", config)
            )
        self._serve("admin", self._run)

    def _serve(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.services[name] = Service(start, start())

    def _run(self) -> subprocess.Popen[bytes]:
        begun = (self.folder / "experiment.toml").exists()
        return self.federation.start_run("experiment.toml", self.nodes, resume=begun)

    def until(self, done: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Keep everything going until something is so, or the time is over; whether it is so."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            for service in self.services.values():
                service.look()
            lines = read_lines(self.folder / "metrics.jsonl")
            if max((line["round"] for line in lines), default=-1) >= len(self.rounds):
                self.rounds.append(time.monotonic() - self.begun)
            time.sleep(0.5)
        return True

    def servers(self) -> list[int]:
        """The processes in which the run's rounds are made."""
        link = self.services["superlink"].process
        return [pid for pid in descendants([link.pid]) if b"flwr-serverapp" in _command(pid)]

    def kill(self, kind: str, draw: random.Random) -> None:
        """Kill a node or the SuperLink with all that it has started, or the server alone, once one is there."""
        names = {
            "node": [name for name in self.services if name.startswith("node-")],
            "superlink": ["superlink"],
        }
        name = draw.choice(names.get(kind, ["server"]))
        there = (
            self.servers if kind == "server" else lambda: self.services[name].process.poll() is None
        )
        if not self.until(lambda: bool(there())):
            return
        for pid in self.servers() if kind == "server" else []:
            os.kill(pid, signal.SIGKILL)
        if kind != "server":
            self.federation.kill(name)
        self.kills.append({"second": round(time.monotonic() - self.begun, 1), "killed": name})

    def gaps(self) -> Iterator[dict[str, Any]]:
        """The time before every round but the first, and what was killed in it or in the gap before."""
        for number, (start, end) in enumerate(
            zip(self.rounds, self.rounds[1:], strict=False), start=1
        ):
            before = self.rounds[max(0, number - 2)]
            yield {
                "round": number,
                "seconds": round(end - start, 1),
                "killed_seconds_before_its_end": [
                    [kill["killed"], round(end - kill["second"], 1)] for kill in self.kills
                    if before <= kill["second"] <= end
                ],
            }  # fmt: skip


def chaos(minutes: float, nodes: int, seed: int, place: Path) -> dict[str, object]:
    """Run an experiment while everything is killed."""
    draw = random.Random(seed)
    experiment = fc.Experiment(
        name="chaos", model="mlp(hidden=[48])", fleet="1x1.0 + 1x0.5", policy="rolling", clients=4 * nodes,
        active=4 * nodes, rounds=ENOUGH, epochs=1,
    )  # fmt: skip
    wanted = [
        kind for kind, often in KILLS.items() for _ in range(max(1, round(often * minutes / 15)))
    ]
    draw.shuffle(wanted)
    share = 60 * minutes / len(wanted)
    at = Chaos(Secured(place), nodes, experiment)
    try:
        at.start()
        at.until(lambda: bool(at.rounds))
        at.begun, at.rounds = (
            time.monotonic(),
            [0.0],
        )  # the first round waits for nodes to come for the first time
        for number, kind in enumerate(wanted):
            due = at.begun + share * (number + draw.random())
            at.until(lambda due=due: time.monotonic() > due)
            at.kill(kind, draw)
        for _ in range(LAST):
            before = len(at.rounds)
            at.until(lambda before=before: len(at.rounds) > before)
    finally:
        at.federation.stop()
    return {"minutes": minutes, "nodes": nodes, "seed": seed, **measured(at)}


def measured(at: Chaos) -> dict[str, object]:
    """What has come of it."""
    lines = read_lines(at.folder / "metrics.jsonl")
    told = {(e["round"], e["client"]): e["event"] for e in read_events(at.folder / "events.jsonl")
            if e["client"] is not None}  # fmt: skip
    asked = [
        (line["round"], int(client))
        for line in lines
        for client in [*line["clients"], *line["dropped"]]
    ]
    gaps = list(at.gaps())
    return {
        **environment_info(),
        "kills": dict(Counter(kill["killed"].partition("-")[0] for kill in at.kills)),
        "rounds": len(lines),
        "rounds_in_order": [line["round"] for line in lines] == list(range(len(lines))),
        "tasks": len(asked),
        "tasks_accounted_for": sum(told.get(task) in EVENTS for task in asked),
        "tasks_became": dict(Counter(told.get(task, "unknown") for task in asked)),
        "seconds_between_rounds_median": round(median(gap["seconds"] for gap in gaps), 1),
        "seconds_between_rounds_longest": max(gap["seconds"] for gap in gaps),
        "starts": {name: service.starts for name, service in at.services.items()},
        f"gaps_over_{LONG:g}_seconds": [gap for gap in gaps if gap["seconds"] > LONG],
        "kills_in_order": at.kills,
        "seconds_between_rounds": [gap["seconds"] for gap in gaps],
    }


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--logs", type=Path, help="a folder, not yet there, that keeps the run and all logs"
    )
    given = parser.parse_args()
    settings = (given.minutes, given.nodes, given.seed)
    if given.logs:
        given.logs.mkdir(parents=True)
        print(json.dumps(chaos(*settings, given.logs.resolve()), indent=2))
    else:
        with tempfile.TemporaryDirectory(prefix="fedcover-chaos-") as folder:
            print(json.dumps(chaos(*settings, Path(folder)), indent=2))
