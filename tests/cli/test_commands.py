"""The commands: what they print where, with which exit code, and one sentence for whatever is wrong."""

import json
import os
import pty
import re
import sys
import threading
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedcover as fc
from fedcover import cli
from fedcover.cli import console, list_names, run
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.toml_fields import parse_change
from fedcover.training.engines import compilation
from tests.helpers.command_line import changed, refused
from tests.helpers.runs import TINY, tiny

pytestmark = pytest.mark.usefixtures("only_the_cpu")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--threads", "1.5"),
        ("run", "--processes", "1.5"),
        ("sweep", "e.toml", "--seeds", "0.9"),
    ],
)
def test_a_number_that_must_be_whole_is_not_rounded(words, fedcover):
    refused(fedcover(*words), 2, f"{words[-2]}: must be a whole number; got '{words[-1]}'")


# ── run, resume, export, demo ───────────────────────────────────────────────────────────────────────────


def test_compiling_is_told(fedcover, monkeypatch):
    monkeypatch.setattr(compilation, "_compile", lambda step, leaves, options: step)
    told = []
    for name in ("one", "two"):  # no more often by a command that comes later in the same process
        code, _, err = fedcover(
            "run", *changed(rounds=1, name=name), "--engine", "batched", "--processes", 1
        )
        assert code == 0, err
        told.append(
            re.findall(
                r"^engine: compiling, once, the step of \d+ clients with [\d,]+ parameters each$",
                err,
                re.M,
            )
        )
    assert told[0]
    assert told[0] == told[1]


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
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert (told["parameters"], told["shape"]) == (64 * 8 + 8 + 80 + 10, [1, 8, 8])
    assert fc.load_part(told["path"]).head.in_features == 8
    code, out, err = fedcover("export", folder, "-o", "whole.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("whole.safetensors: 1,210 parameters; load it with fedcover.load_part(")


def test_progress_is_a_bar_on_a_terminal(monkeypatch, tmp_path, capsys):
    master, slave = pty.openpty()
    seen = []

    def listen():
        try:
            while piece := os.read(master, 4096):
                seen.append(piece)
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
    shown = b"".join(seen).decode()
    assert "\x1b[" in shown
    assert "━" in shown
    assert "2/2" in shown
    assert "coverage" in shown
    assert " left" not in shown
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
    told = json.loads(out)
    assert (code, list(told)) == (0, names)
    assert told["full"]["gamma_min"] == 10
    assert told["full"]["folder"] == "runs/demo-1/full"


def test_run_errors_leave_with_one(fedcover, tmp_path):
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
    refused(fedcover("resume", "nowhere"), 1, "nowhere is no run folder: it has no experiment.toml")
    refused(fedcover("resume", "n" * 300), 1, "is no run folder")
    refused(fedcover("export", "nowhere"), 1, "nowhere is no run folder")
    fedcover("run", *changed(name="whole"))
    for file in list_checkpoints(tmp_path / "runs" / "whole" / "checkpoints"):
        file.path.write_bytes(b"")
    refused(fedcover("resume", "runs/whole"), 1, "is damaged")
    refused(fedcover("export", "runs/whole"), 1, "is damaged")


def test_runs_are_overwritten_by_a_flag(fedcover, tmp_path):
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


def test_resume_tells_of_a_damaged_checkpoint_and_of_force(fedcover, tmp_path):
    fedcover("run", *changed())
    newest = list_checkpoints(tmp_path / "runs" / "run" / "checkpoints")[0].path
    newest.write_bytes(b"")
    code, out, err = fedcover("resume", "runs/run", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2
    assert f"checkpoints/{newest.name} is damaged" in err.splitlines()[0]
    assert err.splitlines()[0].endswith("going on from the older checkpoint of round 1")
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


def test_ctrl_c_in_a_demo_is_no_traceback(fedcover, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", stop)
    code, out, err = fedcover("demo", "--folder", "shown")
    assert (code, out) == (130, "")
    assert err == "stopped; finished runs are in shown; 'fedcover demo' starts again\n"


def test_ctrl_c_before_the_run_begins(fedcover, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_experiment", stop)
    assert fedcover("run", *changed()) == (130, "", "stopped before the run began\n")


# ── list, audit, data ───────────────────────────────────────────────────────────────────────────────────


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


def closed_form(codename: str, kind: str) -> dict:
    """The paper's MLP, 784-200-10: quarters of the first layer's weights, or of the hidden units."""
    kept = {"1": "1234", "2": "134", "3": "124", "4": "123", "5": "14", "6": "13", "7": "12"}
    quarters = [4 - len(kept[digit]) for digit in codename]
    if kind == "pruning":
        sizes = [(159_010 - 39_200 * k, 158_800 - 39_200 * k) for k in quarters]
    else:
        sizes = [(795 * (200 - 50 * k) + 10, 794 * (200 - 50 * k)) for k in quarters]
    covered = {f"S{r}": sum(r in kept[digit] for digit in codename) for r in "1234"}
    return {
        "parameters": sum(p for p, _ in sizes) / len(codename),
        "multiply_adds": sum(m for _, m in sizes) / len(codename),
        "gamma_min": min(covered.values()),
        "coverage": covered,
    }


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize(
    "codename",
    [
        "1111111111",
        "1111223344",
        "1111234567",
        "1234556677",
        "1444777777",
        "2233445677",
        "7",
        "5674",
    ],
)
def test_audit_of_a_codename_equals_the_closed_form(fedcover, codename, kind):
    code, out, err = fedcover("audit", codename, "--kind", kind, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert {key: told[key] for key in closed_form(codename, kind)} == closed_form(codename, kind)
    assert (told["codename"], told["kind"], told["model"]) == (codename, kind, "mlp")
    assert sum(told["histogram"].values()) == 159_010
    assert sum(row["devices"] for row in told["capacities"]) == len(codename)
    for row in told["capacities"]:
        assert row["bytes_up"] == 4 * row["parameters"] <= row["bytes_down"]
        assert row["memory"] > (8 * row["parameters"] if kind == "subnet" else 8 * 159_010)
        assert (row["delta2"] == 0) == (row["capacity"] == 1)


def test_the_paper_s_own_figures(fedcover):
    """Parameters, multiply-adds and coverage as the paper prints them (its wrong rows left out)."""
    printed = {
        "1111114444": (143_330, 143_120, 6), "1111144447": (135_490, 135_280, 5), "1111556677": (111_970, 111_760, 6),
        "1455666777": (92_370, 92_160, 3),
    }  # fmt: skip
    for codename, (parameters, multiply_adds, gamma) in printed.items():
        told = json.loads(fedcover("audit", codename, "--json")[1])
        assert (told["parameters"], told["multiply_adds"], told["gamma_min"]) == (
            parameters,
            multiply_adds,
            gamma,
        )
    assert (
        json.loads(fedcover("audit", "1234556677", "--p5", "printed", "--json")[1])["gamma_min"]
        == 3
    )


def test_audit_of_a_fleet(fedcover):
    code, out, err = fedcover("audit", "--fleet", "3x1.0 + 2x0.5", "--model", "mlp(hidden=[8])", "--dataset", "digits",
                              "--json")  # fmt: skip
    told = json.loads(out)
    assert (code, err, told["gamma_min"]) == (0, "", 3)
    assert [row["parameters"] for row in told["capacities"]] == [
        64 * 8 + 8 + 80 + 10,
        64 * 4 + 4 + 40 + 10,
    ]
    code, out, err = fedcover("audit", "--fleet", "3x1.0 + 2x0.5")
    assert (code, err) == (0, "")
    assert "every parameter is trained by at least 3 clients" in out
    code, out, err = fedcover("audit", "1144")
    assert "at least 2 clients (S1 4, S2 4, S3 4, S4 2)" in out


def test_numbers_are_never_cut_in_a_terminal_of_eighty_columns(fedcover, monkeypatch):
    monkeypatch.setattr(console, "output", lambda: Console(width=80, highlight=False))
    for words, numbers in {
        ("audit", "paper"): ["159,010", "100,210", "91,310", "multiply_add_share"],
        ("audit", "1144"): ["2,584,004", "498,841", "0.01497"],
    }.items():
        code, out, err = fedcover(*words)
        assert (code, err, "…" in out) == (0, "", False)
        assert [number for number in numbers if number not in out] == []
        assert max(len(line) for line in out.splitlines() if line.startswith(("┃", "│"))) <= 80


def test_data_check_names_what_is_missing(fedcover, tmp_path):
    code, out, err = fedcover("data", "check", "mnist", "--data", tmp_path, "--json")
    told = json.loads(out)
    assert (code, err, len(told)) == (1, "", 4)
    assert all(not file["ok"] and file["got"] is None for file in told)
    code, out, err = fedcover("data", "check", "mnist", "--data", tmp_path)
    assert (code, err) == (1, "")
    table, _, conclusion = out.strip().rpartition("\n")
    assert (table.count("missing"), conclusion) == (4, "4 of 4 files are missing or wrong")
    assert fedcover("data", "check", "digits", "--json")[:2] == (0, "[]\n")


def test_a_reader_that_has_gone_is_no_traceback(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["fedcover", "list", "policies", "--json"])
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
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


# ── wrong input ─────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    ("run", "--set", "rounds"): "--set must look like key=value; got 'rounds'",
    ("run", "--set", "=3"): "--set must look like key=value; got '=3'",
    ("run", "--set"): "--set requires an argument",
    ("run", "--set", "nofield=1"): "an experiment's field must be one of .*; got 'nofield'",
    ("run", "--set", "rounds=many"): "rounds: .*; got 'many'",
    ("run", "--set", "rounds=0"): "rounds: .* greater than or equal to 1; got 0",
    ("run", "--set", "policy=rollin"): "policy must be one of .*, full, .*; got 'rollin'",
    (
        "run",
        "--set",
        "policy=rolling(spred=true)",
    ): "policy rolling has no option 'spred'; its options are: spread",
    ("run", "--set", "name=../up"): "name: .*; got '../up'",
    ("run", "--set", "dataset=digit"): "dataset must be one of digits, .*; got 'digit'",
    ("run", "missing.toml"): "experiment missing.toml cannot be read: No such file or directory",
    ("run", "."): "experiment . cannot be read: Is a directory",
    ("run", "invalid.toml"): "not valid TOML",
    ("run", "twice.toml"): "not valid TOML",
    ("run", "bytes.toml"): "experiment bytes.toml cannot be read: .*utf-8",
    ("run", "field.toml"): "an experiment's field must be one of .*; got 'round'",
    ("run", "type.toml"): "rounds: .*; got 'ten'",
    ("run", "a", "b"): "Unused Tokens",
    ("run", "--sett", "a=1"): "Unknown option: --sett",
    ("run", "--threads", "0"): "threads must be in 1..1024; got 0",
    ("run", "--threads", "x"): "threads: must be a whole number; got 'x'",
    ("run", "--device", "tpu"): "device must be one of auto, cpu, cuda, cuda:1; got 'tpu'",
    ("run", "--device", "cuda"): "no CUDA device",
    ("run", "--engine", "steam"): "engine must be one of auto, .*; got 'steam'",
    ("resume",): "requires an argument",
    ("export", "x", "--capacity", "much"): "unable to convert",
    ("demo", "--rounds", "0"): "rounds must be at least 1; got 0",
    ("demo", "--seed", "-1"): "seed: .*; got -1",
    ("list", "animals"): "list must be one of policies, .*; got 'animals'",
    ("audit", "1238"): "codename must consist of digits 1 to 7, one per slot; got '1238'",
    (
        "audit",
        "1",
        "--fleet",
        "2x1",
    ): "a codename has its own fleet and policy: leave --fleet out",
    ("audit", "1", "--capacity", "width"): "a codename has its own .*: leave --capacity out",
    ("audit", "--kind", "pruning", "--p5", "code"): "need a codename: leave --kind and --p5 out",
    ("audit", "paper", "--kind", "pruning"): "the paper's own tables: leave --kind out",
    ("audit", "paper", "--p5", "printed"): "the paper's own tables: leave --p5 out",
    ("audit", "paper", "--fleet", "2x1"): "the paper's own tables: leave --fleet out",
    ("audit", "paper", "--model", "cnn", "--batch-size", "5"): "leave --model and --batch-size out",
    ("audit", "1", "--kind", "x"): "kind must be one of pruning, subnet; got 'x'",
    ("audit", "1", "--p5", "x"): "p5 must be one of code, printed; got 'x'",
    ("audit", "--fleet", "2x2"): r"fleet must look like .*; got '2x2'",
    ("audit", "--capacity", "x"): "capacity: .*; got 'x'",
    ("audit", "--dataset", "x"): "dataset must be one of .*; got 'x'",
    ("data", "check", "x"): "dataset must be one of .*; got 'x'",
    ("data", "get", "x"): "dataset must be one of .*; got 'x'",
    ("dance",): 'Unknown command "dance"',
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_input_gets_one_sentence_and_two(fedcover, words, tmp_path):
    for name, content in {
        "invalid": b"= 3", "twice": b"seed = 1\nseed = 2\n", "bytes": b"name = '\xff'", "field": b"round = 3",
        "type": b"rounds = 'ten'",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.toml").write_bytes(content)
    refused(fedcover(*words), 2, WRONG[words])
    assert not (tmp_path / "runs").exists()


NASTY = [
    "", "''", "nan", "inf", "-inf", "-1", "0", "1.5", "1e400", "true", "[]", "[1]", "[[1]]", "{}", "{a=1}", "x", "a:b",
    ":", "a:", ".a:b", "os:path", "(", "a(", "f()", "f(x)", "prefix(1)", "prefix(**{})", "mlp(hidden=5)", "1979-05-27",
    "null", "😀", "\x7f", "a\nb", "a" * 300, "a(b={[1]: 2})", "(" * 500 + ")", "[/red]",
]  # fmt: skip


@pytest.mark.parametrize("field", [*fc.Experiment.model_fields, "nofield", "a.b"])
def test_nasty_values_never_show_a_traceback(fedcover, field):
    outcomes = set()
    for value in NASTY:
        code, out, err = fedcover(
            "run",
            "--json",
            "--runs",
            f"runs{len(outcomes)}",
            *changed(**{"rounds": 1, field: value}),
        )
        assert code in (0, 1, 2)
        if code:
            assert err.splitlines()[-1].startswith("fedcover: ")
            assert (out, code == 2 or "holds a run" in err) == ("", True), err
        else:
            json.loads(out)
        outcomes.add(code)
    assert 2 in outcomes


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    field=st.sampled_from(sorted(set(fc.Experiment.model_fields) - {"rounds", "epochs"})),
    value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
)
def test_any_text_is_a_value_or_a_sentence(field, value):
    try:
        key, read = parse_change(f"{field}={value}")
        experiment = fc.Experiment(**{**TINY, key: read})
    except fc.FedcoverError:
        return
    assert fc.Experiment.from_toml(experiment.to_toml()) == experiment


@pytest.mark.parametrize(
    "words", [["run"], ["sweep", "--seeds", 1], ["capacity"]], ids=lambda words: words[0]
)
def test_what_an_experiment_names_may_lie_beside_it(fedcover, tmp_path, monkeypatch, words):
    """Data and functions are found from wherever the command is given, and by every command alike."""
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
        'dataset = "mine.npz"\nmodel = "mlp(hidden=[4])"\npolicy = "lying_beside:pick"\nclients = 4\nactive = 2\n'
        "rounds = 1\nepochs = 1\n"
    )
    code, _, err = fedcover(*words, "beside/experiment.toml")
    assert code == 0, err


# ── certify ─────────────────────────────────────────────────────────────────────────────────────────────


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
    found = json.loads(out)
    assert found == json.loads(Path("runs/kept/certificate.json").read_text())
    assert found["bounds"]["sharper"]["terms"].keys() == {"start", "variance", "drift", "noise"}


def test_certify_says_how_to_keep_rounds(fedcover):
    assert fedcover("run", *changed(name="bare"))[0] == 0
    refused(
        fedcover("certify", "runs/bare"),
        1,
        "keeps no round that could be replayed; run it again with keep_rounds",
    )


def test_a_sweep_runs_every_combination_into_its_own_folder(fedcover, tmp_path, monkeypatch):
    short = ("--set", "rounds=1", "--set", "epochs=1", "--set", "clients=20", "--set", "active=2")
    wanted = (
        "sweep",
        *short,
        "--vary",
        "policy=prefix|rolling(spread=true)",
        "--seeds",
        "2",
        "--runs",
        str(tmp_path / "all"),
    )
    code, out, err = fedcover(*wanted, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert len(rows) == 4
    assert all(
        f"  {Path(row['folder']).name}  accuracy " in err for row in rows
    )  # the progress names the runs
    assert all(
        (tmp_path / "all" / Path(row["folder"]).name / "summary.json").is_file() for row in rows
    )
    code, out, _ = fedcover(*wanted)  # all there: nothing is run again
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
        (["run", *changed()], r"test accuracy after 2 rounds: \d+\.\d %; at least \d+ clients? trained each parameter in every"),
        (["sweep", *changed(name="s"), "--vary", "lr=0.1|0.05"], r"highest accuracy: s-lr-0\.\d+ with 0\.\d+, one"),
        (["plan", "--fleet", "2x0.5"], r"conclusion: with this plan (every parameter|some parameters)"),
        (["audit", "--fleet", "2x0.5", "--policy", "prefix"], "mean per client: .* some parameters are trained by no client"),
        (["explain", "--rounds", "1", "--clients", "20", "--seeds", "1", "--switch", "zero"], r"\w+ changes the acc"),
        (["history", "runs"], "rounds: 2, runs: 1"),
        (["certify", "runs/run"], "conclusion: no (theorem|proof)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_every_command_ends_with_what_it_has_found(fedcover, words, sentence):
    if words[0] in ("history", "certify"):
        assert fedcover("run", *changed(keep_rounds=[0, 1]))[0] == 0
    code, out, err = fedcover(*words)
    assert code == 0, err
    assert re.match(sentence, out.splitlines()[-1])


def test_a_smoke_run_names_the_data_that_it_runs(fedcover):
    code, out, _ = fedcover(
        "reproduce", "mnist-pruning", "--quick", "--only", "cell=mnist-iid-pruning-1111223344"
    )
    assert code == 0
    assert "digits-as-mnist-iid-pruning-1111223344" in out
    assert "claimed" not in out
    assert out.splitlines()[-1].startswith("a smoke run: 1 of 1 cell ran through with digits")
