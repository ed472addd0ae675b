"""Runs that are killed, interrupted or diverge are resumed to the same end."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

import fedcover as fc
from fedcover.runs import session
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.processes import command, lines, settings
from tests.helpers.runs import RESNET, TINY, assert_same_end, figures, last_checkpoint, tiny
from tests.helpers.stopped_runs import files, images

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
"""Runs an experiment again and again; each time it is killed one step later, until it comes
through.
"""


def wait_until(true: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.system
def test_run_killed_at_any_write_resumes_bit_for_bit(tmp_path):
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
    subprocess.run(script, check=True, timeout=600)
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


@pytest.mark.parametrize("every", [1, 3])
def test_killed_command_resumes_bit_for_bit(tmp_path, every):
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


def test_ctrl_c_during_imports_exits_quietly(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    process = command("list", "engines", cwd=tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130


def test_ctrl_c_leaves_a_checkpoint_and_names_resume(tmp_path):
    fields = {**TINY, "clients": 100, "rounds": 40, "checkpoint_every": 25}
    folder = tmp_path / "a [red]run" / "run"
    process = command("run", "--runs", folder.parent, *settings(fields))
    wait_until(lambda: lines(folder) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
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
def test_resume_from_every_round_ends_the_same(tmp_path, fields):
    for folder in images(
        tmp_path / "run", partial(fc.run, tiny(**fields), tmp_path / "run")
    ).values():
        fc.resume(folder)
        assert_same_end(folder, tmp_path / "run")


def test_diverged_run_names_round_and_client_and_can_be_loaded(tmp_path):
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


def test_ctrl_c_before_writing_loses_no_line_and_no_kept_state(tmp_path, whole, monkeypatch):
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
def test_run_writes_files_in_forks_and_threads(script, tmp_path, whole):
    (tmp_path / "experiment.toml").write_text(tiny().to_toml())
    begin = """
import sys
from pathlib import Path
import fedcover as fc
target = Path(sys.argv[1])
experiment = fc.Experiment.from_toml((target / "experiment.toml").read_text())
machine = fc.Machine("sequential", "cpu", threads=1)
"""
    line = [sys.executable, "-c", begin + script, str(tmp_path)]
    process = subprocess.run(line, timeout=180, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert figures(tmp_path / "run") == figures(whole)
