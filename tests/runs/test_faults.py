"""What may happen to a run: killed at any moment, interrupted, damaged files, a full disk, a folder in use."""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs import session
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.disks import small_disk
from tests.helpers.processes import command, lines, settings
from tests.helpers.runs import RESNET, TINY, assert_same_end, figures, last_checkpoint, tiny

pytestmark = pytest.mark.usefixtures("only_the_cpu")

KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
import torch
import fedcover as fc
torch.set_num_threads(1)
fc.run(fc.Experiment(rounds=1, clients=100, active=1, epochs=1))  # so that all is imported
experiment, target = fc.Experiment.from_toml(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
def dying(function, left):
    def step(*args, **kwargs):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*args, **kwargs)
    return step
for moment in range(1000):
    child = os.fork()
    if child == 0:
        left = [moment]
        for name in ("fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, dying(getattr(os, name), left))
        fc.run(experiment, target / f"{moment:03}")
        os._exit(0)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        break
"""
"""Runs an experiment again and again; each time it is killed one step later, until it comes through."""


def wait_until(true: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def images(folder: Path, go: Callable) -> dict[int, Path]:
    """Run to the end; for each round the folder as it was after it, as a crash would have left it."""
    copies = {}

    def copy(report):
        done = report.round + 1
        copies[done] = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{done}")))

    go(watch=copy)
    return copies


@pytest.fixture
def whole(tmp_path) -> Path:
    """A run that was never interrupted."""
    fc.run(tiny(), tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The same run as a crash after its third round would have left it."""
    return images(tmp_path / "stopped", partial(fc.run, tiny(), tmp_path / "stopped"))[3]


# ── killed ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.system
def test_a_run_killed_at_any_step_of_its_writing_goes_on_bit_for_bit(tmp_path):
    experiment = tiny(rounds=3, keep_rounds=(0, 2, 3), policy="random", drop_out=0.2, clients=100)
    fc.run(experiment, tmp_path / "whole")
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    script = [
        sys.executable,
        "-c",
        KILLED_AT_EVERY_STEP,
        tmp_path / "experiment.toml",
        tmp_path / "killed",
    ]
    subprocess.run(script, check=True, timeout=120)
    folders = sorted((tmp_path / "killed").iterdir())
    begun = [folder for folder in folders if (folder / "experiment.toml").exists()]
    assert len(begun) > 25
    assert len({lines(folder) for folder in begun}) == 4
    assert any(lines(folder) > len(list_checkpoints(folder / "checkpoints")) for folder in begun)
    for folder in folders:
        if folder in begun:
            fc.resume(folder)
        else:  # nothing to go on from: the same command simply works
            fc.run(experiment, folder)
        assert_same_end(folder, tmp_path / "whole")
        left = files(folder) - files(
            tmp_path / "whole"
        )  # one more old checkpoint, if that was not yet removed
        assert left <= {list_checkpoints(folder / "checkpoints")[-1].path.relative_to(folder)}
        assert files(folder) >= files(tmp_path / "whole")


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("every", [1, 3])
def test_a_killed_command_is_resumed_bit_for_bit(tmp_path, every):
    fields = {**TINY, "clients": 100, "rounds": 40, "checkpoint_every": every}
    folder = tmp_path / "runs" / "run"
    process = command("run", "--runs", tmp_path / "runs", *settings(fields))
    if every == 1:  # as soon as a line is there: most likely before its checkpoint is
        wait_until(lambda: lines(folder) >= 5, process)
    else:
        wait_until(
            lambda: any(file.round >= 6 for file in list_checkpoints(folder / "checkpoints")),
            process,
        )
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert lines(folder) < 40
    fc.run(fc.Experiment(**fields), tmp_path / "whole")
    fc.resume(folder)
    assert_same_end(folder, tmp_path / "whole")


def test_ctrl_c_while_the_packages_are_imported_leaves_quietly(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    process = command("list", "engines", cwd=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path):
    fields = {**TINY, "clients": 100, "rounds": 40, "checkpoint_every": 25}
    folder = tmp_path / "a [red]run" / "run"
    process = command("run", "--runs", folder.parent, *settings(fields))
    wait_until(lambda: lines(folder) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert (
        err.splitlines()[-1] == f"stopped; resume with: fedcover resume {shlex.quote(str(folder))}"
    )
    assert "Traceback" not in err
    assert 0 < list_checkpoints(folder / "checkpoints")[0].round <= lines(folder) < 25
    fc.run(fc.Experiment(**fields), tmp_path / "whole")
    fc.resume(folder)
    assert_same_end(folder, tmp_path / "whole")


CASES = {
    "greedy pruning": {"policy": "magnitude"},
    "random units": {"policy": "random"},
    "drop-outs": {"policy": "rolling", "drop_out": 0.5},
    "rare checkpoints": {"checkpoint_every": 3, "rounds": 5},
    "a small window": {"window": 1, "policy": "rolling(spread=true)"},
    "tracked norms": {"norm": "tracked", **RESNET},
    "norms per width": {"norm": "per-width", "policy": "magnitude", **RESNET},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_from_every_round_the_end_is_the_same(tmp_path, fields):
    for folder in images(
        tmp_path / "run", partial(fc.run, tiny(**fields), tmp_path / "run")
    ).values():
        fc.resume(folder)
        assert_same_end(folder, tmp_path / "run")


@pytest.mark.parametrize(
    "torn", [b'{"round": 3, "lr": 0.0', b"\x00\x00\x00", b"\xff\xfe{", b"{}", b"7", b""]
)
def test_a_torn_last_line_is_forgotten(stopped, whole, torn):
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert len(fc.load(stopped).metrics) == 3
    fc.resume(stopped)
    assert_same_end(stopped, whole)


def test_lost_lines_are_told(stopped, whole):
    kept = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text(kept[0] + kept[2])
    said = []
    fc.resume(stopped, complain=said.append)
    assert re.search(r"metrics\.jsonl lacks the rounds \[1\]", said[0])
    assert figures(stopped) == [line for line in figures(whole) if line["round"] != 1]


@pytest.mark.parametrize("damage", [b'{"round": 1}', b'{"round": 1, "gamma_round": "many"}'])
def test_a_line_that_lacks_figures_is_left_out(stopped, damage):
    """What can be told of the run is told without it, and the run goes on."""
    path = stopped / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    assert fc.load(stopped).summary["rounds"] == len(lines) - 1
    resumed = fc.resume(stopped)
    assert [line["round"] for line in resumed.metrics] == [0, *range(2, resumed.experiment.rounds)]


def test_a_finished_run_without_any_figures_says_what_is_left_of_it(stopped):
    fc.resume(stopped)
    (stopped / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(
        RunError, match=r"lost the metrics of all \d+ rounds.*the model is intact: fedcover export"
    ):
        fc.resume(stopped)


# ── damaged ─────────────────────────────────────────────────────────────────────────────────────────────


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


DAMAGES = {
    "flipped": flipped,
    "truncated": lambda content: content[:700],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_taken(stopped, whole, damage):
    newest = list_checkpoints(stopped / "checkpoints")[0].path
    newest.write_bytes(damage(newest.read_bytes()))
    assert fc.load(stopped).state.round == 2
    said = []
    fc.resume(stopped, complain=said.append)
    assert f"checkpoint {newest} is damaged" in said[0]
    assert "going on from the older checkpoint of round 2" in said[0]
    assert_same_end(stopped, whole)


def test_a_damaged_checkpoint_never_pushes_a_whole_one_out(tmp_path):
    def stop(report):
        if report.round == 3:
            raise KeyboardInterrupt

    experiment, folder = tiny(rounds=8, checkpoint_every=3), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment, folder, watch=stop)
    assert [file.round for file in list_checkpoints(folder / "checkpoints")] == [4, 3]
    list_checkpoints(folder / "checkpoints")[0].path.write_bytes(b"")
    said = []
    again = images(folder, partial(fc.resume, folder, complain=said.append))[6]
    list_checkpoints(again / "checkpoints")[0].path.write_bytes(b"")
    fc.resume(again, complain=said.append)
    assert ["round-000004" in said[0], "round-000006" in said[1]] == [True, True]
    assert said[1].endswith("going on from the older checkpoint of round 3")
    assert_same_end(again, folder)


def test_if_all_checkpoints_are_damaged_that_is_said_and_nothing_is_removed(stopped):
    for file in list_checkpoints(stopped / "checkpoints"):
        file.path.write_bytes(flipped(file.path.read_bytes()))
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    for act in (fc.resume, fc.load):
        with pytest.raises(
            RunError, match=r"round-000003.*is damaged.*; .*round-000002.*is damaged"
        ):
            act(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_experiment_is_refused(stopped, whole, tmp_path):
    changed = Path(shutil.copytree(stopped, tmp_path / "changed")) / "experiment.toml"
    changed.write_text(changed.read_text().replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(RunError, match="belongs to another experiment"):
        fc.resume(changed.parent)
    fc.run(tiny(lr=0.02, rounds=8), tmp_path / "other")
    foreign = list_checkpoints(tmp_path / "other" / "checkpoints")[0].path
    shutil.copy(foreign, stopped / "checkpoints")
    alone = shutil.copytree(stopped, tmp_path / "alone")
    for file in list_checkpoints(alone / "checkpoints")[1:]:
        file.path.unlink()
    with pytest.raises(RunError, match=r"round-000008.* belongs to another experiment"):
        fc.resume(alone)
    said = []
    fc.resume(stopped, complain=said.append)
    assert "belongs to another experiment" in said[0]
    assert_same_end(stopped, whole)


# ── no room, no right, no number ────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones_whole(whole, tmp_path):
    newest, older = (file.path.stat().st_size for file in list_checkpoints(whole / "checkpoints"))
    folder = tmp_path / "run"
    with files_of_at_most((newest + older) // 2), pytest.raises(RunError) as caught:
        fc.run(tiny(), folder)
    assert re.fullmatch(
        r"cannot write .*round-000004\.\w+\.safetensors: File too large; the checkpoint of round 3 is whole; "
        r"mend that, then 'fedcover resume .*run'",
        str(caught.value),
    )
    assert fc.load(folder).state.round == 3
    assert not list(folder.rglob(".*.safetensors.*"))
    fc.resume(folder)
    assert_same_end(folder, whole)


def test_metrics_that_cannot_be_written_are_written_later(whole, tmp_path):
    folder = tmp_path / "run"
    newest = max(file.path.stat().st_size for file in list_checkpoints(whole / "checkpoints"))
    longer, fields = tmp_path / "longer", {"rounds": 20, "window": 1}
    fc.run(tiny(**fields), longer)
    assert (longer / "metrics.jsonl").stat().st_size > newest
    with (
        files_of_at_most(newest),
        pytest.raises(RunError, match=r"metrics\.jsonl: File too large; the checkpoint of"),
    ):
        fc.run(tiny(**fields), folder)
    fc.resume(folder)
    assert_same_end(folder, longer)


def test_a_full_disk(whole, tmp_path):
    with small_disk(tmp_path / "disk", 40 * 1024) as disk:
        with pytest.raises(
            RunError,
            match=r"No space left on device; the checkpoint of round \d is whole; mend that",
        ):
            fc.run(tiny(), disk / "run")
        state = fc.load(disk / "run").state
        assert 1 <= state.round < 4
        with pytest.raises(RunError, match="No space left on device"):
            fc.resume(disk / "run")
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        fc.resume(disk / "run")
        assert_same_end(disk / "run", whole)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, to whom nothing is read-only."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_places_where_no_run_can_be_made(tmp_path, whole):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot create the run folder .*: Not a directory"):
        fc.run(tiny(), tmp_path / "file" / "run")
    with pytest.raises(RunError, match=r"cannot create the run folder .*: File name too long"):
        fc.run(tiny(), tmp_path / ("a" * 300))
    with pytest.raises(RunError, match=r"is no run folder"):
        fc.resume(tmp_path / ("a" * 300))
    with pytest.raises(
        RunError,
        match=r"holds a run already: go on with 'fedcover resume .*whole', or choose another name",
    ):
        fc.run(tiny(), whole)
    (whole / "experiment.toml").unlink()  # whose figures are these?
    with pytest.raises(RunError, match="holds a run already"):
        fc.run(tiny(), whole)
    place = Path(tempfile.mkdtemp())
    try:
        (place / "made").mkdir()
        for folder in (place / "made", place):
            folder.chmod(0o555)
        with nobody():
            for folder in (place / "run", place / "made"):
                with pytest.raises(RunError, match="Permission denied"):
                    fc.run(tiny(), folder)
        assert list(place.rglob("*")) == [place / "made"]
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def raising(view):
    """A policy that fails as people's own do."""
    raise ZeroDivisionError("mine")


def test_a_folder_without_a_finished_round_is_no_run(tmp_path, whole):
    with pytest.raises(ZeroDivisionError):
        fc.run(tiny(policy="tests.runs.test_faults:raising", keep_rounds=(0,)), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fc.run(tiny(), tmp_path / "run")
    assert_same_end(tmp_path / "run", whole)
    assert files(tmp_path / "run") - files(whole) == {Path("notes.txt")}


def test_a_run_is_overwritten_only_if_that_is_asked_for(tmp_path, whole):
    folder = tmp_path / "run"
    fc.run(tiny(rounds=9, keep_rounds=(0, 9)), folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds a run already"):
        fc.run(tiny(), folder)
    fc.run(tiny(), folder, overwrite=True)
    assert_same_end(folder, whole)
    assert files(folder) - files(whole) == {Path("notes.txt")}

    def disturb(report):
        with pytest.raises(RunError, match="is in use by another process"):
            fc.run(tiny(), folder, overwrite=True)

    fc.run(tiny(), folder, overwrite=True, watch=disturb)
    assert_same_end(folder, whole)


def test_a_folder_in_use_is_left_alone(tmp_path, whole):
    said = []

    def disturb(report):
        for act in (lambda: fc.resume(tmp_path / "run"), lambda: fc.run(tiny(), tmp_path / "run")):
            with pytest.raises(RunError) as caught:
                act()
            said.append(str(caught.value))

    fc.run(tiny(), tmp_path / "run", watch=disturb)
    assert len(said) == 8
    assert said[0].endswith("is in use by another process")
    assert "holds a run already" in said[1]
    assert_same_end(tmp_path / "run", whole)


def test_a_run_that_diverges_names_round_and_client_and_can_be_read(tmp_path):
    with pytest.raises(
        fc.FedcoverError,
        match=r"diverged in round 2 \(counted from 0\) at client \d+.*learning rate 1e\+06",
    ):
        fc.run(tiny(lr=1e6), tmp_path / "run")
    assert fc.load(tmp_path / "run").state.round == lines(tmp_path / "run") == 2
    before = last_checkpoint(tmp_path / "run")
    with pytest.raises(fc.FedcoverError, match="diverged in round 2"):
        fc.resume(tmp_path / "run")
    assert last_checkpoint(tmp_path / "run") == before
    assert (
        json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["round"] == 1
    )


def test_ctrl_c_just_before_files_are_written_loses_no_line_and_no_kept_state(
    tmp_path, whole, monkeypatch
):
    writer, left = session._writer, [2]

    def interrupted():
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return writer()

    monkeypatch.setattr(session, "_writer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(keep_rounds=(3,)), tmp_path / "run")
    monkeypatch.undo()
    complaints = []
    fc.resume(tmp_path / "run", complain=complaints.append)
    assert complaints == []
    assert figures(tmp_path / "run") == figures(whole)
    assert [file.round for file in list_checkpoints(tmp_path / "run" / "kept")] == [3]


IN_A_FORKED_PROCESS = """
import os
fc.run(experiment, target / "first", machine=machine)
child = os.fork()
if child == 0:
    fc.run(experiment, target / "run", machine=machine)
    os._exit(0)
os.waitpid(child, 0)
"""
IN_A_THREAD_THAT_OUTLIVES_THE_MAIN_ONE = """
import threading
def late():
    threading.main_thread().join()
    fc.run(experiment, target / "run", machine=machine)
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("script", [IN_A_FORKED_PROCESS, IN_A_THREAD_THAT_OUTLIVES_THE_MAIN_ONE])
def test_files_are_written_wherever_a_run_is_made(script, tmp_path, whole):
    (tmp_path / "experiment.toml").write_text(tiny().to_toml())
    begin = """
import sys
from pathlib import Path
import fedcover as fc
target = Path(sys.argv[1])
experiment = fc.Experiment.from_toml((target / "experiment.toml").read_text())
machine = fc.Machine("sequential", "cpu", threads=1)
"""
    alone = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # GNU's OpenMP does not survive a fork once it has threads
    line = [sys.executable, "-c", begin + script, str(tmp_path)]
    done = subprocess.run(line, timeout=60, capture_output=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path / "run") == figures(whole)
