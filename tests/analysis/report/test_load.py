"""Run folders are found and read; damaged ones are named and left out."""

import json

import pytest

import fedcover as fc
from fedcover.analysis.report.load import find_runs
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.metrics_log import read_lines
from tests.helpers.made_up import made_up_run
from tests.helpers.report_pages import report


def test_unfinished_runs_are_on_the_page(tmp_path):
    nothing = made_up_run(tmp_path / "nothing", done=0)
    blind = made_up_run(tmp_path / "blind", done=3, evaluate_every=5, rounds=10)
    (blind / "metrics.jsonl").write_text(
        (blind / "metrics.jsonl").read_text() + '{"round": 3, "accur'
    )  # torn
    data = report(tmp_path, nothing, blind)
    assert [(run["done"], run["rounds"]) for run in data["runs"]] == [(0, 6), (3, 10)]
    assert data["runs"][0]["totals"] == {}
    assert data["runs"][1]["totals"]["accuracy"] is None
    assert data["runs"][1]["every"]["round"] == [1, 2, 3]
    assert "accuracy" not in data["runs"][1]["scores"]
    assert data["runs"][1]["commands"][1] == f"fedcover resume {blind}"


def test_values_that_are_not_finite_are_counted_and_never_written(tmp_path):
    folder = made_up_run(tmp_path / "lost")
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines[3:]:
        line |= {"loss": float("nan"), "train_loss": float("inf"), "delta2_mean": float("nan")}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "certificate.json").write_text(
        '{"kind": "estimate", "bound": Infinity, "terms": [{"value": NaN}]}'
    )
    (run,) = report(tmp_path, folder)["runs"]
    assert run["notFinite"] == 4
    assert run["scores"]["loss"][3:] == [None] * 3
    assert run["certificate"] == {"kind": "estimate", "bound": "inf", "terms": [{"value": "nan"}]}


def test_run_of_older_version_has_no_pictures(tmp_path):
    folder = made_up_run(tmp_path / "old")
    lines = read_lines(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**x, "pictures": None}) + "\n" for x in lines)
    )
    (folder / "manifest.json").unlink()
    assert report(tmp_path, folder)["runs"][0]["pictures"] is None


def test_find_runs_lists_each_folder_once(tmp_path):
    a, b = made_up_run(tmp_path / "runs" / "a"), made_up_run(tmp_path / "runs" / "b")
    assert find_runs([tmp_path / "runs", a, b]) == [a, b]
    with pytest.raises(RunError, match="none below it"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="at least one"):
        fc.report([], tmp_path / "report.html")


def test_report_files_that_are_wrong_are_named(tmp_path):
    folder = made_up_run(tmp_path / "run")
    with pytest.raises(InvalidValue, match=r"must be an \.html file; got 'page.pdf'"):
        fc.report(folder, "page.pdf")
    with pytest.raises(RunError, match="cannot write"):
        fc.report(folder, tmp_path / "not" / "there.html")
    (folder / "certificate.json").write_text("[]")
    with pytest.raises(RunError, match=r"certificate\.json cannot be read"):
        fc.report(folder, tmp_path / "report.html")
    (folder / "experiment.toml").write_text("= 1")
    with pytest.raises(RunError, match=r"experiment\.toml cannot be read"):
        fc.report(folder, tmp_path / "report.html")


def test_damaged_run_is_named(tmp_path, caplog):
    runs = tmp_path / "runs"
    whole = made_up_run(runs / "whole")
    assert report(tmp_path, runs)["notes"] == []
    nameless, torn = made_up_run(runs / "nameless", lr=0.2), made_up_run(runs / "torn", lr=0.3)
    (nameless / "experiment.toml").unlink()
    lines = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
    (torn / "metrics.jsonl").write_text("".join([*lines[:-1], "#garbage\n"]))
    (whole / "metrics.jsonl").write_text(
        (whole / "metrics.jsonl").read_text() + '{"round": 6, "accur'
    )  # being written
    data = report(tmp_path, runs)
    assert data["notes"] == [
        f"{nameless} is left out: it has no experiment.toml",
        f"{torn / 'metrics.jsonl'} is damaged: 1 line left out, 5 rounds can be read",
    ]
    assert caplog.messages == data["notes"]


def test_unreadable_run_does_not_hide_other_runs(tmp_path, caplog):
    runs = tmp_path / "runs"
    made_up_run(runs / "whole")
    paths = [made_up_run(runs / name, lr=0.2) / "experiment.toml" for name in ("torn", "wordy")]
    paths[0].write_text('name = "ful')
    paths[1].write_text('rounds = "many"')
    data = report(tmp_path, runs)
    assert [run["folder"] for run in data["runs"]] == [str(runs / "whole")]
    assert [note.split(": ")[:2] for note in data["notes"]] == [
        ["a run is left out", f"{path} cannot be read"] for path in paths
    ]
    assert caplog.messages == data["notes"]
    with pytest.raises(
        RunError,
        match=r"cannot be read: rounds must be a whole number in 1\.\.1000000000; got 'many'",
    ):
        fc.report(runs / "wordy", tmp_path / "report.html")


CLIENT = {"capacity": 1.0, "delta2": 0.1, "loss": 1.0}


@pytest.mark.parametrize(
    "damage",
    [
        None,
        {"seconds": 3},
        {"gamma_round": "1"},
        {"bytes_up": None},
        {"multiply_adds": None},
        {"loss": None},
        {"accuracy": "high"},
        {"validation_accuracy": []},
        {"lost": "2"},
        {"clients": [1]},
        {"clients": {"1": {}}},
        {"clients": {"1": {**CLIENT, "loss": None}}},
        {"pictures": {"clients": {"99": 0}, "layers": {}}},
        {"pictures": "none"},
        {"train_loss": "low"},
        {"round": 99999},
        {"round": -3},
        {"accuracy": 7.5},
        {"validation_accuracy": -0.1},
    ],
    ids=str,
)
def test_incomplete_line_is_left_out_and_named(tmp_path, damage):
    folder = made_up_run(tmp_path / "run", done=3)
    path = folder / "metrics.jsonl"
    line = {"round": 3} if damage is None else {**read_lines(path)[-1], "round": 3, **damage}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    data = report(tmp_path, folder)
    assert data["notes"] == [f"{path} is damaged: 1 line left out, 3 rounds can be read"]
    assert (data["runs"][0]["done"], data["runs"][0]["totals"]["rounds"]) == (3, 3)


def test_run_without_complete_lines_is_named(tmp_path):
    folder = made_up_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1}\n')
    data = report(tmp_path, folder)
    assert data["notes"] == [
        f"{folder / 'metrics.jsonl'} is damaged: 2 lines left out, 0 rounds can be read"
    ]
    assert data["runs"][0]["totals"] == {}


def test_best_round_is_chosen_among_rounds_with_validation(tmp_path):
    folder = made_up_run(tmp_path / "run")
    first, second, *others = read_lines(folder / "metrics.jsonl")
    lines = [first, {**second, "validation_accuracy": 0.5}, *others]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report(tmp_path, folder)["runs"][0]["totals"]["best_round"] == 1
