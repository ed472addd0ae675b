"""What the system tests share: real Flower processes, runs submitted to them, and the same run in
this process.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import fedcover as fc
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import LocalFederation
from fedcover.host.orphans import descendants

WORLDS = {
    "sliced": {"policy": "rolling(spread=true)"},
    "masked": {"policy": "magnitude"},
    "drawn, tracked statistics": {
        "policy": "random",
        "norm": "tracked",
        "model": "wide_resnet(depth=10, widen=1)",
        "clients": 4,
        "active": 4,
        "dataset": ("synthetic(shape=(3, 8, 8), classes=3, samples=12, test_size=50)"),
        "calibration": 40,
    },
    "private masks": {"policy": "full", "recipe": "hermes(good_enough=0.0)"},
    "measured by clients": {"policy": "prunefl", "recipe": "prunefl", "fleet": "1x0.5"},
}

PATIENCE = 900.0
"""Seconds after which a test gives up; a loaded machine may need minutes for what an idle one does
in seconds.
"""

SMALL = {
    "model": "mlp(hidden=[24])",
    "clients": 8,
    "active": 6,
    "rounds": 3,
    "epochs": 1,
    "fleet": "1x1.0 + 1x0.5",
}


def experiment(**fields: object) -> fc.Experiment:
    """A small experiment on digits."""
    return fc.Experiment(**{**SMALL, **fields})


def wait_for(condition, what: str):
    """The first true answer of a condition."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.1)
    raise AssertionError(f"waited in vain: {what}")


@dataclass
class Submitted:
    """A run on a local federation."""

    federation: LocalFederation
    process: object
    folder: Path
    log: Path

    def finish(self) -> "Submitted":
        """Wait until Flower says that the run is over."""
        self.process.wait(PATIENCE)
        return self

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, name: str = "metrics.jsonl") -> list[dict]:
        path = self.folder / name
        text = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]

    def rounds(self, count: int) -> list[dict]:
        """Wait until so many rounds are done."""
        return wait_for(
            lambda: len(self.lines()) >= count and self.lines(),
            f"{count} rounds: {self.text[-3000:]}",
        )

    def events(self, kind: str) -> list[dict]:
        return [line for line in self.lines("events.jsonl") if line["event"] == kind]


def submit(
    federation: LocalFederation, wanted: fc.Experiment, folder: Path, **settings: object
) -> Submitted:
    """Submit an experiment, or go on with it."""
    config = RunConfig(
        wanted.to_toml(), str(folder), **{"deadline": 120.0, "device": "cpu", **settings}
    )
    place = federation.folder / f"app-{time.monotonic_ns()}"
    log = place.with_suffix(".txt")
    with log.open("wb") as out:
        process = federation.submit(write_app(place, config), out)
    return Submitted(federation, process, folder, log)


def fair_deadline(federation: LocalFederation, folder: Path) -> float:
    """Seconds that are more than enough for a round on this machine, whatever else it does: four
    times one round.
    """
    run = submit(federation, experiment(rounds=1), folder, wait=1.0, deadline=300.0).finish()
    return max(15.0, 4 * run.rounds(1)[0]["seconds"]["training"])


def reference(wanted: fc.Experiment, folder: Path, engine=None) -> list[str]:
    """The same experiment in this process, one client after another: the names of its checkpoints
    are digests.
    """
    fc.run(wanted, folder, machine=fc.Machine("sequential", "cpu"), engine=engine)
    return checkpoints(folder)


def checkpoints(folder: Path) -> list[str]:
    """The checkpoints of a run; their names hold the digest of their content, so equal names are
    equal bits.
    """
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def children(federation: LocalFederation, name: str, program: str) -> list[int]:
    """The processes of a program that one of the federation's processes has started."""
    result = []
    for pid in descendants([federation.processes[name].pid]):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if program.encode() in command:
            result.append(pid)
    return result


def alive(pids) -> list[int]:
    """Those that still run (a zombie does not)."""
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return [pid for pid, state in states.items() if state != "Z"]


def same_but_private(there, here):
    from safetensors.torch import load_file

    for left, right in zip(checkpoints(there), checkpoints(here), strict=True):
        actual = load_file(there / "checkpoints" / left)
        expected = load_file(here / "checkpoints" / right)
        assert any(name.startswith("private/") for name in expected)
        assert actual.keys() == {name for name in expected if not name.startswith("private/")}
        assert all(tensor.equal(expected[name]) for name, tensor in actual.items())
