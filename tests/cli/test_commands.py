"""The commands `list`, `data`, `certify` and `sweep`, and what all commands have in common."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

import fedcover as fc
from fedcover import cli
from fedcover.cli import list_names
from tests.helpers.command_line import changed, refused
from tests.helpers.made_up import made_up_run


@pytest.mark.parametrize("kind", list_names.TABLES)
def test_list_shows_every_table(fedcover, kind):
    code, out, err = fedcover("list", kind, "--json")
    entries = json.loads(out)
    assert (code, err) == (0, "")
    assert [entry["name"] for entry in entries] == list(list_names.TABLES[kind])
    assert all(entry["about"] for entry in entries)
    code, out, err = fedcover("list", kind)
    assert (code, err) == (0, "")
    assert all(f"│ {entry['name']} " in out for entry in entries)


def test_data_check_names_what_is_missing(fedcover, tmp_path):
    code, out, err = fedcover("data", "check", "mnist", "--data", tmp_path, "--json")
    output = json.loads(out)
    assert (code, err, len(output)) == (1, "", 4)
    assert all(not file["ok"] and file["got"] is None for file in output)
    code, out, err = fedcover("data", "check", "mnist", "--data", tmp_path)
    assert (code, err) == (1, "")
    table, _, conclusion = out.strip().rpartition("\n")
    assert (table.count("missing"), conclusion) == (4, "4 of 4 files are missing or wrong")
    assert fedcover("data", "check", "digits", "--json")[:2] == (0, "[]\n")


def test_closed_output_pipe_shows_no_traceback(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["fedcover", "list", "policies", "--json"])
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        monkeypatch.undo()
    assert leaving.value.code == 1
    assert capsys.readouterr().err == ""


def test_help_and_version(fedcover):
    assert fedcover("--version") == (0, f"{fc.__version__}\n", "")
    for words in ([], ["--help"], ["run", "--help"], ["data", "--help"]):
        code, out, err = fedcover(*words)
        assert (code, err) == (0, "")
        assert "Usage: fedcover" in out


@pytest.mark.parametrize(
    "words", [["run"], ["sweep", "--seeds", 1], ["capacity"]], ids=lambda words: words[0]
)
def test_files_beside_an_experiment_are_found(fedcover, tmp_path, monkeypatch, words):
    """Data and functions are found from wherever the command is given, and by every
    command alike.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "lying_beside", raising=False)
    beside = tmp_path / "beside"
    beside.mkdir()
    rows = {"train_x": np.random.default_rng(0).random((80, 4)), "train_y": np.arange(80) % 2}
    np.savez(beside / "mine.npz", **rows, test_x=rows["train_x"], test_y=rows["train_y"])
    (beside / "lying_beside.py").write_text(
        "from fedcover.policies import POLICIES\npick = POLICIES['prefix']\n"
    )
    (beside / "experiment.toml").write_text(
        'dataset = "mine.npz"\nmodel = "mlp(hidden=[4])"\npolicy = '
        '"lying_beside:pick"\nclients = 4\nactive = 2\n'
        "rounds = 1\nepochs = 1\n"
    )
    code, _, err = fedcover(*words, "beside/experiment.toml")
    assert code == 0, err


def test_certify_prints_bounds_and_what_does_not_apply(fedcover):
    words = changed(rounds=2, keep_rounds=[0], name="kept")
    assert fedcover("run", *words)[0] == 0
    code, out, err = fedcover("certify", "runs/kept", "--steps", 2)
    assert code == 0, err
    assert "estimate, no proof (vacuous); 1 of 2 rounds replayed" in out
    for text in (
        "Theorem 1 as printed",
        "Theorem R",
        "exceeded by a factor of",
        "Lemma 3",
        "epochs are shuffled",
    ):
        assert text in out
    assert "replaying round 0 (1 of 1)" in err
    code, out, _ = fedcover("certify", "runs/kept", "--steps", 2, "--json")
    output = json.loads(out)
    assert output == json.loads(Path("runs/kept/certificate.json").read_text())
    assert output["bounds"]["sharper"]["terms"].keys() == {"start", "variance", "drift", "noise"}


def test_certify_says_how_to_keep_rounds(fedcover):
    assert fedcover("run", *changed(name="bare"))[0] == 0
    refused(
        fedcover("certify", "runs/bare"),
        1,
        "keeps no round that could be replayed; run it again with keep_rounds",
    )


def test_sweep_runs_every_combination_into_its_own_folder(fedcover, tmp_path, monkeypatch):
    short = ("--set", "rounds=1", "--set", "epochs=1", "--set", "clients=20", "--set", "active=2")
    words = (
        "sweep",
        *short,
        "--vary",
        "policy=prefix|rolling(spread=true)",
        "--seeds",
        "2",
        "--runs",
        str(tmp_path / "all"),
    )
    code, out, err = fedcover(*words, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert len(rows) == 4
    assert all(
        f"  {Path(row['folder']).name}  accuracy " in err for row in rows
    )  # the progress names the runs
    assert all(
        (tmp_path / "all" / Path(row["folder"]).name / "summary.json").is_file() for row in rows
    )
    code, out, _ = fedcover(*words)  # all there: nothing is run again
    assert code == 0
    prefix = [row["accuracy"] for row in rows if "policy-prefix" in row["folder"]]
    assert f"{fmean(prefix):.4g}" in out
    assert f"{stdev(prefix):.4g}" in out
    assert fedcover("sweep", "--vary", "lr")[0] == 2
    twice = fedcover("sweep", "--vary", "lr=0.1", "--vary", "lr=0.2")
    assert twice[0] == 2
    assert "vary must name each field once" in twice[2]
    assert fedcover("bench", "--out", str(tmp_path / "nowhere" / "b.md"))[0] == 2
    refused(fedcover("bench", "--out", str(tmp_path)), 2, "out must be a file")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    refused(fedcover("sweep", "--vary", "lr=0.1|0.2"), 2, "use --processes, not torchrun")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["run", *changed()],
            (
                r"test accuracy after 2 rounds: \d+\.\d %; at least \d+ clients? "
                r"trained each parameter in every"
            ),
        ),
        (
            ["sweep", *changed(name="s"), "--vary", "lr=0.1|0.05"],
            r"highest accuracy: s-lr-0\.\d+ with 0\.\d+, one",
        ),
        (
            ["plan", "--fleet", "2x0.5"],
            r"conclusion: with this plan (every parameter|some parameters)",
        ),
        (
            ["audit", "--fleet", "2x0.5", "--policy", "prefix"],
            "mean per client: .* some parameters are trained by no client",
        ),
        (
            ["explain", "--rounds", "1", "--clients", "20", "--seeds", "1", "--switch", "zero"],
            r"\w+ changes the acc",
        ),
        (["history", "runs"], "rounds: 2, runs: 1"),
        (["certify", "runs/run"], "conclusion: no (theorem|proof)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_end_with_a_conclusion(fedcover, words, sentence):
    if words[0] in ("history", "certify"):
        assert fedcover("run", *changed(keep_rounds=[0, 1]))[0] == 0
    code, out, err = fedcover(*words)
    assert code == 0, err
    assert re.match(sentence, out.splitlines()[-1])


def test_smoke_run_names_the_data_that_it_runs(fedcover):
    code, out, _ = fedcover(
        "reproduce", "mnist-pruning", "--quick", "--only", "cell=mnist-iid-pruning-1111223344"
    )
    assert code == 0
    assert "digits-as-mnist-iid-pruning-1111223344" in out
    assert "claimed" not in out
    assert out.splitlines()[-1].startswith("a smoke run: 1 of 1 cell ran through with digits")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        ("list", "policies"),
        ("list", "policies", "--json"),
        ("history", "run"),
        ("history", "--csv", "run"),
    ],
)
def test_full_output_device_is_one_sentence(words, tmp_path):
    made_up_run(tmp_path / "run")
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "fedcover", *words],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (process.returncode, process.stderr) == (
        1,
        "fedcover: cannot write the output: No space left on device\n",
    )
