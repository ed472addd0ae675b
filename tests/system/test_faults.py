"""Faults with real processes: nodes that die, come back or are slow; a server that is killed; a full disk."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from fedcover.flower.processes import descendants, local
from tests.system.harness import (
    PATIENCE,
    alive,
    checkpoints,
    children,
    experiment,
    fair_deadline,
    reference,
    submit,
    wait_for,
)


def test_a_node_that_is_killed_and_comes_back(tmp_path):
    """The round ends by our deadline; with tolerate=1 nothing goes uncovered; a new node takes the old one's place."""
    wanted = experiment(
        clients=3, active=3, fleet="1x0.75", policy="planned(tolerate=1)", model="mlp(hidden=[16])", rounds=5, epochs=2
    )
    configs = [{"partition-id": place, "num-partitions": 3} for place in range(3)]
    with local(tmp_path / "flower", configs) as federation:
        deadline = fair_deadline(federation, tmp_path / "before")
        run = submit(federation, wanted, tmp_path / "run", nodes=3, deadline=deadline)
        run.rounds(1)
        wait_for(lambda: children(federation, "supernode-1", "flwr-clientapp"), "the node works on a round")
        federation.kill("supernode-1")
        hit = len(run.lines())
        run.rounds(hit + 1)
        federation.start_node("supernode-back", configs[1])
        lines = run.finish().rounds(5)
    assert lines[hit]["late"] + lines[hit]["lost"] == 1
    assert lines[hit]["dropped"] == [1]
    (told,) = [e for e in run.lines("events.jsonl") if e["round"] == hit and e["client"] == 1]
    assert told["event"] == "lost" or told["why"] == f"no answer in {deadline:g} s"
    assert all(line["gamma_round"] >= 1 for line in lines)
    back = [line for line in lines[hit + 1 :] if not line["dropped"]]
    assert back, "the node that came back was never asked"
    answered = {line["node"] for line in run.events("answered") if line["client"] == 1}
    assert len(answered) == 2  # to Flower it is another node


def test_stragglers_do_not_hold_up_a_round(tmp_path, monkeypatch):
    """Who has not answered by the deadline is left out; the others count."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom fedcover.recipes.plain import plain\n\n\n"
        "def recipe():\n    time.sleep(float(os.environ.get('SLOW', '0')))\n    return plain()\n"
    )
    wanted = experiment(recipe="plain", rounds=2, policy="prefix", active=8)
    monkeypatch.syspath_prepend(tmp_path)
    wanted = wanted.model_copy(update={"recipe": "slow:recipe"})
    with local(tmp_path / "flower", [{"partition-id": 0, "num-partitions": 2}], [str(tmp_path)]) as federation:
        deadline = fair_deadline(federation, tmp_path / "before")
        monkeypatch.setenv("SLOW", "1000")
        federation.start_node("supernode-slow", {"partition-id": 1, "num-partitions": 2})
        run = submit(federation, wanted, tmp_path / "run", nodes=2, deadline=deadline).finish()
    lines = run.rounds(2)
    assert [(line["late"], sorted(line["dropped"])) for line in lines] == [(4, [4, 5, 6, 7])] * 2
    assert all(sorted(map(int, line["clients"])) == [0, 1, 2, 3] for line in lines)


def test_a_server_that_is_killed_goes_on_from_its_folder(pair, tmp_path):
    """Nothing is lost but the round in progress."""
    wanted = experiment(policy="rolling", rounds=4)
    run = submit(pair, wanted, tmp_path / "run", nodes=2)
    run.rounds(2)
    (server,) = wait_for(lambda: children(pair, "superlink", "flwr-serverapp"), "a server")
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not alive([server]), "the server's end")
    run.process.kill()
    run.process.wait()
    done = len(run.lines())
    assert done in (2, 3)
    again = submit(pair, wanted, tmp_path / "run", nodes=2, resume=True).finish()
    assert [line["round"] for line in again.rounds(4)] == [0, 1, 2, 3]
    assert checkpoints(tmp_path / "run") == reference(wanted, tmp_path / "here")


def test_a_full_disk_at_the_server(pair, tmp_path):
    """The run stops with a sentence, what is done stays whole, and the run goes on when there is room again."""
    wanted = experiment(policy="prefix", rounds=4)
    expected = reference(wanted, tmp_path / "here")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "here" / "checkpoints").iterdir())
    # the coverage of past rounds is part of a state, so states grow: the second last still fits, the last does not
    with files_limited(pair, (sizes[0] + sizes[1]) // 2):
        run = submit(pair, wanted, tmp_path / "run", nodes=2).finish()
    assert "cannot write" in run.text
    assert "the checkpoint of round 3 is whole" in run.text
    again = submit(pair, wanted, tmp_path / "run", nodes=2, resume=True).finish()
    assert [line["round"] for line in again.rounds(4)] == [0, 1, 2, 3]
    assert checkpoints(tmp_path / "run") == expected


class files_limited:  # noqa: N801
    """No file of the server may grow beyond a size: as good as a full disk, and it needs no rights."""

    def __init__(self, federation, size):
        self.pids = [federation.processes["superlink"].pid, *children(federation, "superlink", "flower-superexec")]
        self.size = size

    def __enter__(self):
        for pid in self.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))

    def __exit__(self, *_):
        for pid in self.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def up(folder, *arguments):
    """`fedcover flower up` as a process, with a folder of its own for what is temporary."""
    (folder / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "fedcover", "flower", "up", "--nodes", "2", "--runs", str(folder / "runs")]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen([*command, *map(str, arguments)], stdout=log, stderr=log, env=environment)


@pytest.mark.parametrize(
    "stopped", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 2], ids=["Ctrl-C", "kill", "Ctrl-C twice"]
)
def test_up_leaves_nothing_behind(tmp_path, stopped):
    """After Ctrl-C, or a kill, or an impatient user, neither processes nor files are left."""
    (tmp_path / "mine.toml").write_text(experiment(policy="prefix", rounds=30, name="mine").to_toml())
    process = up(tmp_path, tmp_path / "mine.toml")
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes(), "a round")
    family = descendants([process.pid])
    assert len(family) >= 6
    for number in stopped:
        process.send_signal(number)
        time.sleep(1.0)
    assert process.wait(120) == 130
    wait_for(lambda: not alive(family), "the end of all processes")
    assert list((tmp_path / "tmp").glob("fedcover-*")) == []
    assert "go on with: fedcover flower up" in (tmp_path / "log.txt").read_text()


def test_up_runs_to_the_end_and_cleans_up(tmp_path):
    """Stopped after a round, it goes on with the folder and ends as the same run in one process."""
    wanted = experiment(policy="prefix", rounds=3, name="mine")
    (tmp_path / "mine.toml").write_text(wanted.to_toml())
    folder = tmp_path / "runs" / "mine"
    first = up(tmp_path, tmp_path / "mine.toml")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_bytes(), "a round")
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 130
    assert not (folder / "summary.json").exists()
    again = up(tmp_path, folder)
    wait_for(lambda: len(descendants([again.pid])) >= 6, "its processes")
    family = descendants([again.pid])
    assert again.wait(PATIENCE) == 0, (tmp_path / "log.txt").read_text()
    wait_for(lambda: not alive(family), "the end of all processes")
    assert list((tmp_path / "tmp").glob("fedcover-*")) == []
    assert checkpoints(folder) == reference(wanted, tmp_path / "here")
