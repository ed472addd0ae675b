"""`fedcover flower up` with real processes: to the end, and stopped in every way; nothing is left
behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.host.orphans import descendants
from tests.helpers.own_rows import written
from tests.system.harness import PATIENCE, alive, checkpoints, experiment, reference, wait_for


def up(folder, *arguments):
    """`fedcover flower up` as a process, with a folder of its own for what is temporary."""
    (folder / "tmp").mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "fedcover",
        "flower",
        "up",
        "--nodes",
        "2",
        "--runs",
        str(folder / "runs"),
    ]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [*command, *map(str, arguments)], stdout=log, stderr=log, env=environment
        )


@pytest.mark.parametrize(
    "stopped",
    [[signal.SIGHUP], [signal.SIGTERM], [signal.SIGINT] * 2],
    ids=["hang-up", "kill", "Ctrl-C twice"],
)
def test_stopped_up_leaves_no_process_or_file(tmp_path, stopped):
    """After a closed terminal, a kill, or an impatient user, neither processes nor files
    are left.
    """
    (tmp_path / "mine.toml").write_text(
        experiment(policy="prefix", rounds=30, name="mine").to_toml()
    )
    process = up(tmp_path, tmp_path / "mine.toml")
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes(), "a round")
    family = descendants([process.pid])
    assert len(family) >= 6
    for number in stopped:
        process.send_signal(number)
        time.sleep(1.0)
    assert process.wait(120) == 128 + stopped[0]
    wait_for(lambda: not alive(family), "the end of all processes")
    assert list((tmp_path / "tmp").glob("fedcover-*")) == []
    assert "resume with: fedcover flower up" in (tmp_path / "log.txt").read_text()


def test_killed_up_ends_every_process_within_ten_seconds(tmp_path):
    """SuperLink, SuperNodes, executors, the server app, client apps and `flwr run` notice that `up`
    is gone.
    """
    (tmp_path / "mine.toml").write_text(
        experiment(policy="prefix", rounds=30, name="mine").to_toml()
    )
    process = up(tmp_path, tmp_path / "mine.toml")
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes(), "a round")

    family = wait_for(lambda: len(pids := descendants([process.pid])) >= 9 and pids, "a client app")
    process.kill()
    process.wait()
    time.sleep(10.0)
    left = alive(family)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_up_refuses_a_run_that_every_node_would_refuse(tmp_path):
    settings = experiment(policy="prefix", recipe="hermes", rounds=2, name="mine")
    (tmp_path / "mine.toml").write_text(settings.to_toml())
    process = up(tmp_path, tmp_path / "mine.toml")
    assert process.wait(PATIENCE) == 1
    assert (
        "recipe hermes prunes at the client, so it needs the policy 'full'"
        in (tmp_path / "log.txt").read_text()
    )
    assert list((tmp_path / "runs").iterdir()) == []


def test_up_refuses_wrong_experiments_before_it_starts_anything(tmp_path):
    (tmp_path / "mine.toml").write_text(
        experiment(partition="labels(limit=99)", name="mine").to_toml()
    )
    assert up(tmp_path, tmp_path / "mine.toml").wait(PATIENCE) == 2
    output = (tmp_path / "log.txt").read_text()
    assert "limit must be a whole number between 1 and the number of labels, 10; got 99" in output
    assert "SuperLink" not in output


def test_up_fails_without_any_answer(tmp_path):
    (tmp_path / "mine.toml").write_text(
        experiment(policy="prefix", rounds=2, name="mine").to_toml()
    )
    process = up(tmp_path, tmp_path / "mine.toml", "--deadline", "0.2")
    assert process.wait(PATIENCE) == 1
    output = (tmp_path / "log.txt").read_text()
    assert "no client has answered in any round" in output
    assert " late" in output
    assert "fix that, then choose another name or remove" in output


def test_up_on_rows_that_stay_on_nodes(tmp_path):
    files = written(tmp_path)
    experiment = files.experiment(name="mine")
    (tmp_path / "mine.toml").write_text(experiment.to_toml())
    process = up(tmp_path, tmp_path / "mine.toml", "--rows", tmp_path / "node-{}.npz")
    assert process.wait(PATIENCE) == 0, (tmp_path / "log.txt").read_text()
    there = fc.load(tmp_path / "runs" / "mine")
    here = fc.run(files.in_one_process(experiment), machine=fc.Machine("sequential", "cpu"))
    assert all(tensor.equal(here.state.params[name]) for name, tensor in there.state.params.items())
    assert there.model()(here.setup.task.source.test.x).shape == (360, 10)


def test_up_notices_a_killed_server(tmp_path):
    """Up says what has happened and how to go on, and does not wait for Flower to notice."""
    (tmp_path / "mine.toml").write_text(
        experiment(policy="prefix", rounds=30, name="mine").to_toml()
    )
    process = up(tmp_path, tmp_path / "mine.toml")
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes(), "a round")
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants([process.pid])
    }
    (server,) = (pid for pid, command in commands.items() if b"flwr-serverapp" in command)
    os.kill(server, signal.SIGKILL)
    assert process.wait(PATIENCE) == 1
    output = " ".join((tmp_path / "log.txt").read_text().split())
    assert "the server's process was killed" in output
    assert "resume with: fedcover flower up --nodes 2" in output


def test_up_runs_to_the_end_and_removes_its_files(tmp_path):
    """Stopped after a round, it goes on with the folder and ends as the same run in one process."""
    settings = experiment(policy="prefix", rounds=3, name="mine")
    (tmp_path / "mine.toml").write_text(settings.to_toml())
    folder = tmp_path / "runs" / "mine"
    first = up(tmp_path, tmp_path / "mine.toml")
    wait_for(
        lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_bytes(),
        "a round",
    )
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 130
    assert not (folder / "summary.json").exists()
    refused = up(tmp_path, tmp_path / "mine.toml")
    assert refused.wait(120) == 1
    assert (
        f"resume it with 'fedcover flower up --nodes N {folder}'"
        in (tmp_path / "log.txt").read_text()
    )
    again = up(tmp_path, folder)
    wait_for(lambda: len(descendants([again.pid])) >= 6, "its processes")
    family = descendants([again.pid])
    assert again.wait(PATIENCE) == 0, (tmp_path / "log.txt").read_text()
    wait_for(lambda: not alive(family), "the end of all processes")
    assert list((tmp_path / "tmp").glob("fedcover-*")) == []
    assert checkpoints(folder) == reference(settings, tmp_path / "here")
