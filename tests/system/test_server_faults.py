"""Faults of the server with real processes: it is killed, or its files are limited; it goes on from
its folder.
"""

import os
import resource
import signal
from pathlib import Path

from fedcover.flower.crash_report import KILLED
from fedcover.host.orphans import descendants
from tests.system.harness import (
    alive,
    checkpoints,
    children,
    experiment,
    reference,
    submit,
    wait_for,
)


def test_killed_server_resumes_from_its_folder(pair, tmp_path):
    """Nothing is lost but the round in progress."""
    settings = experiment(policy="rolling", rounds=4)
    run = submit(pair, settings, tmp_path / "run", nodes=2)
    run.rounds(2)
    (server,) = wait_for(lambda: children(pair, "superlink", "flwr-serverapp"), "a server")
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not alive([server]), "the server's end")
    run.process.kill()
    run.process.wait()
    rounds_done = len(run.lines())
    assert rounds_done in (2, 3)
    again = submit(pair, settings, tmp_path / "run", nodes=2, resume=True).finish()
    assert [line["round"] for line in again.rounds(4)] == [0, 1, 2, 3]
    assert checkpoints(tmp_path / "run") == reference(settings, tmp_path / "here")


def test_log_stream_reports_a_killed_server(pair, tmp_path):
    """By the server's reporter, with a sentence: Flower itself only notices a silence, a minute
    later.
    """
    run = submit(pair, experiment(policy="prefix", rounds=30), tmp_path / "run", nodes=2)
    run.rounds(1)
    (server,) = wait_for(lambda: children(pair, "superlink", "flwr-serverapp"), "a server")
    reporters = [pid for pid in descendants([server]) if b"crash_report" in command_of(pid)]
    assert len(reporters) == 1
    os.kill(server, signal.SIGKILL)
    run.finish()
    assert f"fedcover: stopped: {KILLED}" in run.text
    wait_for(lambda: not alive(reporters), "the end of the server's reporter")


def test_regular_end_reports_no_crash(pair, tmp_path):
    run = submit(pair, experiment(policy="prefix", rounds=1), tmp_path / "run", nodes=2).finish()
    assert run.rounds(1)
    assert "stopped" not in run.text
    assert "Traceback" not in pair.log("superlink").read_text()


def test_file_size_limit_at_the_server(pair, tmp_path):
    """The same where nobody may mount a disk: the run stops with a sentence, and goes on when there
    is room again.
    """
    settings = experiment(policy="prefix", rounds=4)
    expected = reference(settings, tmp_path / "here")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "here" / "checkpoints").iterdir())
    # the coverage of past rounds is part of a state, so states grow: the second last still fits,
    # the last does not
    with files_limited(pair, (sizes[0] + sizes[1]) // 2):
        run = submit(pair, settings, tmp_path / "run", nodes=2).finish()
    assert "cannot write" in run.text
    assert "the checkpoint of round 3 is whole" in run.text
    again = submit(pair, settings, tmp_path / "run", nodes=2, resume=True).finish()
    assert [line["round"] for line in again.rounds(4)] == [0, 1, 2, 3]
    assert checkpoints(tmp_path / "run") == expected


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class files_limited:  # noqa: N801
    """No file of the server may grow beyond a size: much like a full disk, and it needs
    no rights.
    """

    def __init__(self, federation, size):
        self.pids = [
            federation.processes["superlink"].pid,
            *children(federation, "superlink", "flower-superexec"),
        ]
        self.size = size

    def __enter__(self):
        for pid in self.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))

    def __exit__(self, *_):
        for pid in self.pids:
            resource.prlimit(
                pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
