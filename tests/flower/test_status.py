"""The status of a run's server, as it writes it, and as the command that follows the run
reads it.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedcover.errors import InvalidValue, RunError
from fedcover.flower.crash_report import KILLED
from fedcover.flower.monitor import Launch, follow_run
from fedcover.flower.status import (
    FILE_NAME,
    ServerState,
    StatusFile,
    last_announcement,
    read_status,
    recorded_status,
    remove_lone_status,
    was_killed,
)
from fedcover.host import disk


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "mine"


def test_a_status_says_what_the_server_does(folder):
    with recorded_status(folder, "now") as status:
        assert read_status(folder, "now").state == "starting"
        status.write(ServerState.WAITING)
        assert json.loads((folder / FILE_NAME).read_text())["state"] == "waiting for nodes"
        status.rounds = 3
        status.write(ServerState.RUNNING)
        running = read_status(folder, "now")
        assert (running.state, running.rounds, running.process) == ("running", 3, os.getpid())
        assert not running.is_final
    finished = read_status(folder, "now")
    assert (finished.state, finished.rounds) == ("finished", 3)
    assert finished.is_final


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (RunError("no room"), "failed", "no room"),
        (InvalidValue("lr must be positive"), "failed", "lr must be positive"),
        (ZeroDivisionError("by zero"), "failed", "an unexpected error: ZeroDivisionError: by zero"),
        (SystemExit(), "stopped", "the server was told to stop"),
    ],
)
def test_a_status_says_how_a_run_ended(folder, error, state, message):
    with pytest.raises(type(error)), recorded_status(folder, "now"):
        raise error
    status = read_status(folder, "now")
    assert (status.state, status.message) == (state, message)
    assert not was_killed(folder, "now")


def test_the_status_of_an_earlier_launch_does_not_count(folder):
    with recorded_status(folder, "before"):
        pass
    assert read_status(folder, "now") is None
    assert not was_killed(folder, "now")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"state": "odd"}', '{"state": []}', "[" * 10**5]
)
def test_a_damaged_status_is_none(folder, content):
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_text(content)
    assert read_status(folder, "") is None


def test_a_status_that_is_a_link_is_not_read(folder, tmp_path):
    with recorded_status(folder, "now"):
        pass
    (folder / FILE_NAME).rename(tmp_path / "elsewhere.json")
    (folder / FILE_NAME).symlink_to(tmp_path / "elsewhere.json")
    assert read_status(folder, "now") is None


def test_a_server_that_was_killed_is_noticed(folder):
    """Not while it lives, and not for another launch."""
    server = f"""
import sys, time
from pathlib import Path
from fedcover.flower.status import recorded_status
with recorded_status(Path({str(folder)!r}), "now"):
    print("begun", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n"
        assert not was_killed(folder, "now")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert was_killed(folder, "now")
    assert not was_killed(folder, "another")
    with recorded_status(folder, "again"):  # what it has left behind is in nobody's way
        assert not was_killed(folder, "again")
        assert not was_killed(folder, "now")


def test_two_servers_do_not_share_a_folder(folder):
    with (
        recorded_status(folder, "first"),
        pytest.raises(RunError, match="in use by another process"),
        recorded_status(folder, "second"),
    ):
        pytest.fail("the second one has begun")
    assert read_status(folder, "first").state == "finished"


def test_a_status_that_cannot_be_written_is_removed_and_the_run_goes_on(folder, monkeypatch):
    def full(path, content):
        raise RunError(f"cannot write {path}: No space left on device")

    with recorded_status(folder, "now") as status:
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_atomically", full)
            status.write(ServerState.RUNNING)
        assert read_status(folder, "now") is None
        assert not was_killed(folder, "now")
    assert read_status(folder, "now").state == "finished"


def test_a_run_that_has_not_begun_leaves_no_folder(folder):
    """Unless somebody has to read its status there, who removes it."""
    with pytest.raises(RunError), recorded_status(folder, ""):
        raise RunError("no")
    assert not folder.exists()
    with pytest.raises(RunError), recorded_status(folder, "now"):
        raise RunError("no")
    assert read_status(folder, "now").message == "no"
    (folder / "notes.txt").write_text("mine")
    remove_lone_status(folder)
    assert (folder / FILE_NAME).exists()
    (folder / "notes.txt").unlink()
    remove_lone_status(folder)
    assert not folder.exists()
    remove_lone_status(folder)


def test_the_last_announcement_of_a_log_counts():
    """Not what a node has said, which the log quotes within a line."""
    log = [
        "INFO : hello",
        "fedcover: stopped: cannot write x: No space left",
        "fedcover: round 2: client 3 rejected: its node says: 'fedcover: stopped: a lie'",
        "INFO : bye",
    ]
    assert last_announcement(log).message == "cannot write x: No space left"
    assert last_announcement([*log, "fedcover: finished: runs/x"]).state == "finished"
    assert last_announcement(["Traceback: oh"]) is None


# ── following a run ─────────────────────────────────────────────────────────────────────────────


class Played:
    """A process that takes its next step whenever somebody asks whether it has ended, and ends
    after the last.
    """

    def __init__(self, *steps):
        self.steps = list(steps)

    def poll(self):
        if not self.steps:
            return 0
        self.steps.pop(0)()
        return None


@pytest.fixture
def launch(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    folder.mkdir(parents=True)
    (tmp_path / "log.txt").write_text("the beginning of a log\n")
    return Launch("now", folder, tmp_path / "log.txt")


def follow(launch, *steps):
    """Follow a run that takes these steps; return the rounds that were shown."""
    rounds = []
    follow_run(Played(*steps), launch, lambda report: rounds.append(report.round))
    return rounds


def writes(launch, state, message="", name="now"):
    return lambda: StatusFile(launch.folder, name).write(state, message)


def test_rounds_that_are_run_again_are_shown_again(launch):
    def done(*rounds):
        lines = "".join(json.dumps({"round": round}) + "\n" for round in rounds)
        return lambda: (launch.folder / "metrics.jsonl").write_text(lines)

    done(*range(9))()
    again = [done(*range(count)) for count in (5, 6, 8, 9, 10)]
    finish = writes(launch, ServerState.FINISHED)
    assert follow(launch, lambda: None, *again, finish) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("state", [ServerState.FAILED, ServerState.STOPPED])
def test_the_reason_in_the_status_is_what_a_user_sees(launch, state):
    launch.log.write_text("fedcover: finished: runs/x\n")
    with pytest.raises(RunError, match=r"^no room$"):
        follow(launch, writes(launch, state, "no room"))


def test_a_killed_server_is_reported_while_its_log_is_still_streamed(launch):
    never = [lambda: pytest.fail("it is still waited for")]
    with pytest.raises(RunError) as refusal:
        follow(launch, lambda: None, writes(launch, ServerState.RUNNING), *never)
    assert str(refusal.value) == KILLED


def test_a_run_without_a_status_is_judged_by_its_log(launch):
    """A server that has never begun, or one whose disk was full."""
    writes(launch, ServerState.FINISHED, name="an earlier run in this folder")()
    with pytest.raises(RunError, match="did not finish; the end of its log:\nthe beginning"):
        follow(launch, lambda: None)
    launch.log.write_text("fedcover: stopped: cannot write x: No space left\nTraceback\n")
    with pytest.raises(RunError, match=r"^cannot write x: No space left$"):
        follow(launch, lambda: None)
    launch.log.write_text("fedcover: finished: runs/x\n")
    follow(launch, lambda: None)


def test_a_log_that_ends_while_the_server_lives_is_no_success(launch):
    """As when the SuperLink has ended."""
    with recorded_status(launch.folder, "now"), pytest.raises(RunError, match="did not finish"):
        follow(launch, lambda: None)
