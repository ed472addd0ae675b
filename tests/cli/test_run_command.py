"""The commands `run`, `resume`, `export` and `demo`: what they print and their exit codes."""

import json
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest

import fedcover as fc
from fedcover import cli
from fedcover.cli import run
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.training.engines import compilation
from tests.helpers.command_line import changed, refused
from tests.helpers.runs import tiny


def test_run_reports_compiling(fedcover, monkeypatch):
    monkeypatch.setattr(compilation, "_compile", lambda step, leaves, options: step)
    messages = []
    for name in ("one", "two"):  # no more often by a command that comes later in the same process
        code, _, err = fedcover(
            "run", *changed(rounds=1, name=name), "--engine", "batched", "--processes", 1
        )
        assert code == 0, err
        messages.append(
            re.findall(
                r"^engine: compiling, once, the step of \d+ clients with [\d,]+ parameters each$",
                err,
                re.M,
            )
        )
    assert messages[0]
    assert messages[0] == messages[1]


def test_run_prints_a_table_and_plain_progress(fedcover, tmp_path):
    (tmp_path / "mine.toml").write_text(tiny(rounds=2).to_toml().replace('name = "run"\n', ""))
    code, out, err = fedcover("run", "mine.toml", "--set", "seed=3")
    assert code == 0
    assert re.search(r"accuracy +│ +0\.\d+", out)
    assert "runs/mine" in out
    progress = err.splitlines()
    assert len(progress) == 2
    assert re.fullmatch(
        r"mine  round 2/2  accuracy 0\.\d{3}  coverage \d+ \(window \d+\)  0:00:00 left",
        progress[1],
    )
    assert fc.load(tmp_path / "runs" / "mine").experiment == tiny(rounds=2, seed=3, name="mine")


def test_run_resume_and_export_as_json(fedcover, tmp_path):
    code, out, err = fedcover("run", "--json", "--runs", "a[/b] :smile:", *changed())
    assert code == 0
    summary = json.loads(out)
    folder = Path(summary["folder"])
    assert folder == Path("a[/b] :smile:/run")
    assert {k: v for k, v in summary.items() if k != "folder"} == json.loads(
        (folder / "summary.json").read_text()
    )
    code, out, err = fedcover("resume", folder, "--json")
    assert (code, json.loads(out), err) == (0, summary, "")
    code, out, err = fedcover("resume", folder)
    assert (code, err) == (0, "")
    assert "a[/b] :smile:/run" in out
    code, out, err = fedcover("export", folder, "--capacity", "0.5", "--json")
    output = json.loads(out)
    assert (code, err) == (0, "")
    assert (output["parameters"], output["shape"]) == (64 * 8 + 8 + 80 + 10, [1, 8, 8])
    assert fc.load_part(output["path"]).head.in_features == 8
    code, out, err = fedcover("export", folder, "-o", "whole.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("whole.safetensors: 1,210 parameters; load it with fedcover.load_part(")


def test_progress_is_a_bar_on_a_terminal(monkeypatch, tmp_path, capsys):
    master, slave = pty.openpty()
    chunks = []

    def listen():
        try:
            while piece := os.read(master, 4096):
                chunks.append(piece)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=listen)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(
        sys, "argv", ["fedcover", "run", "--json", "--runs", str(tmp_path), *changed()]
    )
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        monkeypatch.undo()
    reader.join()
    os.close(master)
    assert leaving.value.code == 0
    output = b"".join(chunks).decode()
    assert "\x1b[" in output
    assert "━" in output
    assert "2/2" in output
    assert "coverage" in output
    assert " left" not in output
    assert json.loads(capsys.readouterr().out)["rounds"] == 2


def test_demo_runs_every_policy_into_a_folder(fedcover, tmp_path):
    code, out, err = fedcover("demo", "--rounds", 2, "--folder", "shown")
    assert code == 0
    names = ["prefix", "rolling", "magnitude", "homogeneous", "full"]
    assert all(re.search(rf"│ {name} ", out) for name in names)
    assert "Run folders: shown" in out
    assert len(err.splitlines()) == 10
    assert out.splitlines()[-1].endswith(" shown/report.html")
    assert {path.name for path in (tmp_path / "shown").iterdir()} == {*names, "report.html"}
    refused(
        fedcover("demo", "--rounds", 2, "--folder", "shown"), 1, "shown/prefix holds a run already"
    )
    code, out, _ = fedcover("demo", "--rounds", 1, "--json")
    output = json.loads(out)
    assert (code, list(output)) == (0, names)
    assert output["full"]["gamma_min"] == 10
    assert output["full"]["folder"] == "runs/demo-1/full"


def test_run_errors_exit_with_code_1(fedcover, tmp_path):
    code, out, err = fedcover("run", *changed(lr=1e6, rounds=4))
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"fedcover: training diverged in round 2 \(counted from 0\) at client \d+: .*",
        err.splitlines()[-1],
    )
    refused(fedcover("run", *changed()), 1, "runs/run holds a run already.*--overwrite")
    refused(
        fedcover("run", "--runs", "runs/run/metrics.jsonl", *changed()),
        1,
        "metrics.jsonl/run: Not a directory",
    )
    refused(
        fedcover("resume", "nowhere"), 1, "nowhere is not a run folder: it has no experiment.toml"
    )
    refused(fedcover("resume", "n" * 300), 1, "is not a run folder")
    refused(fedcover("export", "nowhere"), 1, "nowhere is not a run folder")
    fedcover("run", *changed(name="whole"))
    for file in list_checkpoints(tmp_path / "runs" / "whole" / "checkpoints"):
        file.path.write_bytes(b"")
    refused(fedcover("resume", "runs/whole"), 1, "is damaged")
    refused(fedcover("export", "runs/whole"), 1, "is damaged")


def test_overwrite_flag_replaces_runs(fedcover, tmp_path):
    fedcover("run", *changed(rounds=3))
    assert fedcover("run", *changed(), "--overwrite")[0] == 0
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["rounds"] == 2
    fedcover("sweep", *changed(name="s"), "--vary", "lr=0.1|0.05")
    refused(
        fedcover("sweep", *changed(name="s", rounds=1), "--vary", "lr=0.1"),
        2,
        "holds another experiment",
    )
    assert (
        fedcover("sweep", *changed(name="s", rounds=1), "--vary", "lr=0.1", "--overwrite")[0] == 0
    )
    rounds = [
        json.loads(path.read_text())["rounds"]
        for path in sorted(tmp_path.glob("runs/s-*/summary.json"))
    ]
    assert rounds == [2, 1]


def test_resume_reports_a_damaged_checkpoint_and_names_force(fedcover, tmp_path):
    fedcover("run", *changed())
    newest = list_checkpoints(tmp_path / "runs" / "run" / "checkpoints")[0].path
    newest.write_bytes(b"")
    code, out, err = fedcover("resume", "runs/run", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2
    assert f"checkpoints/{newest.name} is damaged" in err.splitlines()[0]
    assert err.splitlines()[0].endswith("continuing from the older checkpoint of round 1")
    refused(
        fedcover("resume", "runs/run", "--threads", 2), 1, "would change threads 1 to 2, .*--force"
    )
    assert fedcover("resume", "runs/run", "--threads", 2, "--force", "--json")[0] == 0
    refused(
        fedcover("export", "runs/run", "--capacity", 0), 2, r"capacity must be in \(0, 1\]; got 0"
    )
    refused(
        fedcover("export", "runs/run", "-o", "no/x"),
        1,
        "cannot write no/x: No such file or directory",
    )


def test_ctrl_c_in_a_demo_shows_no_traceback(fedcover, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", stop)
    code, out, err = fedcover("demo", "--folder", "shown")
    assert (code, out) == (130, "")
    assert err == "stopped; finished runs are in shown; 'fedcover demo' starts again\n"


def test_ctrl_c_before_the_run_begins_says_so(fedcover, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_experiment", stop)
    assert fedcover("run", *changed()) == (130, "", "stopped before the run began\n")
