"""Folders for a while: gone at the end, and after a kill gone when the next is made."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedcover.host import locks, scratch
from fedcover.runs.mps import MPS, mps_environment


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


HOLDING = """
import time
from fedcover.host import scratch
with scratch.folder("run") as place:
    (place / "content").write_text("much")
    print(place, flush=True)
    time.sleep(600)
"""


def killed(number=signal.SIGKILL):
    """The folder of a process that was killed some time ago."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, text=True
    ) as process:
        path = process.stdout.readline().strip()
        assert scratch.abandoned("run") == []  # it lives
        process.send_signal(number)
    aged(path)
    return path


def aged(path):
    before = time.time() - 60
    os.utime(os.path.join(path, locks.LOCK_NAME), (before, before))


def test_folder_of_a_killed_process_is_removed_by_the_next(place):
    left = killed()
    with scratch.folder("other"):
        assert os.path.exists(left)
    with scratch.folder("run") as new:
        assert list(place.iterdir()) == [new]
    assert list(place.iterdir()) == []


def test_folders_of_living_processes_and_of_others_stay(place):
    (place / "fedcover-run-of-somebody").mkdir()  # nobody says that it is ours
    with scratch.folder("run") as first:
        aged(first)
        with scratch.folder("run"):
            assert first.exists()
    assert [path.name for path in place.iterdir()] == ["fedcover-run-of-somebody"]


def test_scratch_folder_that_is_kept_stays(place):
    with scratch.folder("run") as folder:
        scratch.keep(folder)
    with scratch.folder("run"):
        pass
    assert folder.exists()


def test_mps_server_of_a_killed_sweep_is_told_to_quit(place, tmp_path, monkeypatch):
    server = tmp_path / "bin" / MPS
    server.parent.mkdir()
    server.write_text(
        f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $(test "$1" || cat)" >> {tmp_path}/said\n'
    )
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{server.parent}:/bin:/usr/bin")
    left = place / "fedcover-mps-left"
    left.mkdir()
    with locks.lock_folder(left):
        pass
    aged(left)
    with mps_environment(2):
        assert not left.exists()
    first, started, ended = (tmp_path / "said").read_text().splitlines()
    assert first == f"{left} quit"
    assert started.strip() == ended.removesuffix(" quit") != str(left)
