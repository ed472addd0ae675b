"""Programs that are asked to stop: they keep the last whole round, say how to go on, and leave no
process behind.
"""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

import fedcover as fc
from fedcover.host import signals
from fedcover.host.orphans import descendants
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.processes import command, lines, running, settings, waited_for
from tests.helpers.runs import TINY

LONG = {**TINY, "clients": 100, "rounds": 100_000, "checkpoint_every": 1000}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@contextmanager
def started(*words, **options):
    """A process of the command line in a group of its own; at the end it and its children are
    killed.
    """
    process = command(*words, start_new_session=True, **options)
    family = set()
    try:
        yield process
    finally:
        family = descendants([process.pid]) | {process.pid}
        for pid in running(family):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def until(condition, process):
    """Wait until a condition is true while a process runs."""
    assert waited_for(lambda: process.poll() is not None or condition(), 180)
    assert process.poll() is None, process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_run_keeps_its_rounds_and_names_resume(tmp_path, number):
    folder = tmp_path / "runs" / "run"
    with started("run", "--runs", folder.parent, *settings(LONG), "--processes", "1") as process:
        until(lambda: lines(folder) >= 2, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=180)
    assert (process.returncode, out) == (128 + number, "")
    assert err.splitlines()[-1] == f"stopped; resume with: fedcover resume {folder}"
    assert "Traceback" not in err
    rounds_done = list_checkpoints(folder / "checkpoints")[0].round
    assert (
        0 < rounds_done <= lines(folder) <= rounds_done + 1
    )  # a line more, if that round was being written


@linux
def test_stopped_run_in_two_processes_keeps_its_rounds(tmp_path):
    folder = tmp_path / "runs" / "run"
    with started("run", "--runs", folder.parent, *settings(LONG), "--processes", "2") as process:
        until(lambda: lines(folder) >= 2, process)
        family = descendants([process.pid])
        process.terminate()
        _, err = process.communicate(timeout=180)
        assert waited_for(lambda: not running(family), 10)
    assert process.returncode == 143
    assert err.splitlines()[-1] == f"stopped; resume with: fedcover resume {folder}"
    assert "Traceback" not in err
    assert fc.load(folder).state.round >= lines(folder) - 1 > 0


SWEEP = ["--vary", "lr=0.1|0.05"]


@linux
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.system)])
def test_killed_sweep_keeps_the_rounds_of_every_run(tmp_path, processes):
    words = ["sweep", *settings({**LONG, "name": "s"}), *SWEEP, "--processes", processes]
    folders = [tmp_path / "runs" / f"s-lr-{lr}-seed-0" for lr in ("0.1", "0.05")]
    with started(*words, cwd=tmp_path) as process:
        until(lambda: max(map(lines, folders)) >= 2, process)
        going = [folder for folder in folders if lines(folder) >= 2]
        family = descendants([process.pid])
        process.terminate()
        out, err = process.communicate(timeout=180)
        assert waited_for(lambda: not running(family), 10)
    assert (process.returncode, out) == (143, "")
    again = shlex.join(["fedcover", *map(str, words)])
    assert err.splitlines()[-1] == f"stopped; resume with: {again}"
    assert "Traceback" not in err
    assert all(list_checkpoints(folder / "checkpoints") for folder in going)


@linux
@pytest.mark.parametrize("what", ["run", pytest.param("sweep", marks=pytest.mark.system)])
def test_child_processes_end_with_their_parent(tmp_path, what, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = [
        what,
        *settings({**LONG, "name": "s"}),
        "--processes",
        "2",
        *(SWEEP if what == "sweep" else []),
    ]
    name = "s-lr-0.1-seed-0" if what == "sweep" else "s"
    folder = tmp_path / "runs" / name
    with started(*words, cwd=tmp_path) as process:
        until(lambda: lines(folder) >= 2, process)
        family = descendants([process.pid])
        assert family
        process.kill()
        assert waited_for(lambda: not running(family), 10)
        _, err = process.communicate(timeout=180)
    assert "Traceback" not in err
    again = ["resume", folder] if what == "run" else words
    with started(*again, cwd=tmp_path) as process:
        before = lines(folder)
        until(lambda: lines(folder) > before or lines(folder) == 1, process)
        process.terminate()
        _, err = process.communicate(timeout=180)
    assert process.returncode == 143
    assert "Traceback" not in err
    assert not list(
        (tmp_path / "temporary").glob("fedcover-*")
    )  # neither of the one nor of the other


TURNING = """
import sys, time
try:
    print("importing", flush=True)
    time.sleep(60)
except BaseException:
    raise ImportError("you should not try to import this from its source directory") from None
"""
"""What packages make of an exception that is raised while they import: NumPy says this."""


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_during_imports_shows_no_traceback(tmp_path, number):
    (tmp_path / "torch.py").write_text(TURNING)
    with started("list", "engines", cwd=tmp_path) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate(timeout=180) == ("", "")
    assert process.returncode == 128 + number


def test_stop_raised_as_another_error_is_a_stop(tmp_path):
    (tmp_path / "mine.py").write_text("def policy(view):" + TURNING.replace("\n", "\n    "))
    fields = {**LONG, "policy": "mine:policy", "name": "odd"}
    with started("run", *settings(fields), cwd=tmp_path) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("stopped")
    assert "Traceback" not in err


SCRIPT = """
import fedcover as fc
fields = {fields!r}
try:
    fc.run(fc.Experiment(**fields), "run")
finally:
    print("after", flush=True)
"""


def test_own_program_ends_by_the_signal_with_its_rounds_kept(tmp_path):
    script = [sys.executable, "-c", SCRIPT.format(fields=LONG)]
    with subprocess.Popen(
        script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: lines(tmp_path / "run") >= 2, process)
        process.terminate()
        assert process.communicate(timeout=180) == (
            "",
            "",
        )  # as ever: it does not go on with what comes after
    assert process.returncode == -signal.SIGTERM
    assert fc.load(tmp_path / "run").state.round >= lines(tmp_path / "run") - 1 > 0


def test_own_signal_handlers_stay():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with signals.raise_on_signals():
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_simultaneous_signals_stop_once():
    def interrupted():
        with signals.raise_on_signals():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)  # what a terminal and torchrun both send
                verdicts.append(True)

    verdicts: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert verdicts == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signals.exit_code(ValueError()) is None


@pytest.fixture
def nohup():
    """Hang-ups are ignored here, and so by the processes that are started from here."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("nohup")
def test_ignored_hang_up_stays_ignored(tmp_path):
    folder = tmp_path / "runs" / "run"
    fields = {**TINY, "clients": 100, "rounds": 40, "checkpoint_every": 1000}
    with started("run", "--runs", folder.parent, *settings(fields), "--processes", "1") as process:
        until(lambda: lines(folder) >= 2, process)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=180)
    assert process.returncode == 0
    assert (folder / "summary.json").exists()


LATE = """
import os, signal, sys
import fedcover.__main__

class Late:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGINT):
        kill(me, number)

late = Late()  # it goes when the interpreter takes its modules down, and has given up its handlers
sys.argv = ["fedcover", "list", "policies"]
fedcover.__main__.main()
"""


def test_signal_at_interpreter_exit_keeps_the_exit_code():
    process = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "rolling" in process.stdout


DROPPED = """
import os, signal, time
from fedcover.host.signals import raise_on_signals
class Sends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
with raise_on_signals():
    sends = Sends()
    del sends
    time.sleep(30)
"""
"""A signal that arrives in `__del__`, where Python drops what is raised."""


def test_stop_that_arrives_in_a_del_method_is_raised_after_it():
    process = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=180
    )
    assert process.stderr == ""
    assert process.returncode == -signal.SIGTERM
