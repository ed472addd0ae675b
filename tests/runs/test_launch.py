"""Runs in several processes, as users start them: what is written, how they stop, fail
and go on.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs.setup import prepare_workload
from tests.helpers.worlds import same

FIELDS = {
    "fleet": "1x1.0 + 1x0.5",
    "policy": "prefix",
    "clients": 20,
    "active": 4,
    "rounds": 4,
    "epochs": 1,
}
OPTIONS = [text for name, value in FIELDS.items() for text in ("--set", f"{name}={value}")]
FEDCOVER = [sys.executable, "-m", "fedcover"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "fedcover",
]


@pytest.fixture(scope="module")
def alone():
    return fc.run(fc.Experiment(**FIELDS))


def command(*words, **how):
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, **how)


def figures(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Stop(Exception):
    """Raised by a watcher, as if the power went."""


def test_run_resumed_in_two_processes_equals_one_process(tmp_path, alone):
    def stop(report):
        if report.round == 1:
            raise Stop

    with pytest.raises(Stop):
        fc.run(fc.Experiment(**FIELDS), tmp_path / "a", watch=stop)
    again = fc.resume(tmp_path / "a", machine=fc.Machine(processes=2))
    same(again.state.params, alone.state.params, 1e-6)
    assert [line["round"] for line in figures(tmp_path / "a")] == [0, 1, 2, 3]
    assert again.accuracy == pytest.approx(alone.accuracy)
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rounds"] == 4


def test_torchrun_writes_one_run_that_resumes_in_one_process(tmp_path, alone):
    rounds_done = command(
        *TORCHRUN,
        "run",
        *OPTIONS,
        "--set",
        "name=b",
        "--set",
        "checkpoint_every=2",
        "--json",
        cwd=tmp_path,
    )
    assert rounds_done.returncode == 0, rounds_done.stderr
    summary = json.loads(rounds_done.stdout)
    assert summary["accuracy"] == pytest.approx(alone.accuracy)
    assert rounds_done.stderr.count("round 4/4") == 1
    folder = tmp_path / "runs" / "b"
    assert json.loads((folder / "manifest.json").read_text())["processes"] == 2
    newest = max((folder / "checkpoints").iterdir())
    newest.unlink()
    again = fc.resume(folder, machine=fc.Machine(processes=1))
    same(again.state.params, alone.state.params, 1e-6)


def test_error_in_one_process_ends_all_with_one_sentence(tmp_path):
    wrong = ["--set", "lr=1e30", "--set", "name=c", "--processes", "2"]
    rounds_done = command(*FEDCOVER, "run", *OPTIONS, *wrong, cwd=tmp_path)
    assert rounds_done.returncode == 1
    assert rounds_done.stderr.count("training diverged in round 0") == 1
    assert "Traceback" not in rounds_done.stderr
    assert not (tmp_path / "runs" / "c").exists()


@pytest.mark.system
def test_ctrl_c_stops_all_processes_and_the_run_resumes(tmp_path):
    long = ["--set", "rounds=100000", "--set", "name=d", "--processes", "2"]
    running = subprocess.Popen(
        [*FEDCOVER, "run", *OPTIONS, *long],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        for line in running.stderr:
            if "round 2/" in line:
                break
        os.killpg(running.pid, signal.SIGINT)
        _, rest = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "stopped; resume with: fedcover resume runs/d" in rest
    assert "Traceback" not in rest
    wait_for_nobody(running.pid)
    rounds_done = fc.load(tmp_path / "runs" / "d").state.round
    assert rounds_done >= 2
    with pytest.raises(Stop):
        fc.resume(tmp_path / "runs" / "d", watch=raise_stop)
    assert figures(tmp_path / "runs" / "d")[rounds_done]["round"] == rounds_done


def raise_stop(report):
    raise Stop


def wait_for_nobody(group):
    """All processes of a group must have ended, soon."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process is left over")


def test_process_that_is_killed_ends_the_run_with_one_sentence(tmp_path):
    killed = []

    def kill(report):
        if not killed:
            killed.append(other_processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(RunError, match="process 1 of 2 has lost the others"):
        fc.run(fc.Experiment(**FIELDS), tmp_path / "e", machine=fc.Machine(processes=2), watch=kill)
    assert fc.load(tmp_path / "e").state.round >= 1


def other_processes():
    """The children of this process that take part in a run."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"fedcover.runs.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def height_of_the_other(hidden):
    """The most memory, in bytes, that the second process of a run of two had by the end of its
    second round.
    """
    heights = []

    def look(report):
        if report.round == 1:  # after the third round it may have ended
            status = Path(f"/proc/{other_processes()[0]}/status").read_text().splitlines()
            heights.append(
                1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
            )

    experiment = fc.Experiment(**{**FIELDS, "model": f"mlp(hidden={hidden})", "rounds": 3})
    fc.run(experiment, machine=fc.Machine("sequential", "cpu", processes=2), watch=look)
    return heights[0]


@pytest.mark.system
def test_process_needs_memory_for_few_copies_of_the_model():
    """In float64 a sum and its weights take four copies, training three besides the update.

    Earlier the process needed 17 copies.
    """
    rise = height_of_the_other([3000, 3000]) - height_of_the_other([10])
    assert rise <= 12 * 4 * (64 * 3000 + 3000 * 3000 + 3000 * 10), rise


def test_parts_that_processes_cannot_import_are_refused(tmp_path):
    with pytest.raises(
        fc.InvalidValue, match="reaches other processes only if it lies in a module"
    ):
        fc.run(
            fc.Experiment(**FIELDS), machine=fc.Machine(processes=2),
            policy=lambda view: [fc.Masks({}) for _ in view.cohort],
        )  # fmt: skip


@pytest.mark.parametrize("wanted", [0, -1, "two", 5000])
def test_wrong_number_of_processes_is_refused(wanted):
    with pytest.raises(fc.InvalidValue, match=r"processes must be 'auto' or in 1\.\.1024"):
        fc.run(fc.Experiment(**FIELDS), machine=fc.Machine(processes=wanted))


def test_processes_are_at_most_the_clients_of_a_round(tmp_path, caplog):
    few = fc.Experiment(**{**FIELDS, "active": 2, "rounds": 1})
    fc.run(few, tmp_path / "few", machine=fc.Machine(processes=50))
    assert json.loads((tmp_path / "few" / "manifest.json").read_text())["processes"] == 2
    assert "processes: 2, as a round has no more clients; 50 were asked for" in caplog.text
    again = fc.resume(tmp_path / "few", machine=fc.Machine(processes=50))
    assert again.state.round == 1
    assert json.loads((tmp_path / "few" / "manifest.json").read_text())["processes"] == 2


def test_processes_auto_depends_on_the_length_of_a_run(monkeypatch):
    monkeypatch.setattr("fedcover.runs.machine.physical_cores", lambda: 2)
    chosen = []
    for rounds in (2, 100_000):
        experiment = fc.Experiment(**{**FIELDS, "rounds": rounds})
        machine = fc.Machine(device="cpu", processes="auto").resolved()
        chosen.append(machine.for_workload(prepare_workload(experiment, "cpu")).processes)
    assert chosen == [1, 2]
