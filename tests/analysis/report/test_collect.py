"""Runs are grouped by their settings; a group is named after what differs."""

import json
import shutil
from pathlib import Path

from fedcover.analysis.report.collect import group_runs
from fedcover.analysis.report.load import read_run
from fedcover.runs.metrics_log import read_lines
from tests.helpers.made_up import made_up_run
from tests.helpers.report_pages import report


def labels(*folders):
    return {
        group.label: len(group.runs)
        for group in group_runs([read_run(folder) for folder in folders])
    }


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path):
    runs = [
        made_up_run(tmp_path / f"{p}-{s}", policy=p, seed=s)
        for p in ("prefix", "rolling")
        for s in (0, 1, 2)
    ]
    data = report(tmp_path, *runs)
    assert [(g["label"], g["runs"], g["settings"]) for g in data["groups"]] == [
        ("prefix", [0, 1, 2], {"policy": "prefix"}),
        ("rolling", [3, 4, 5], {"policy": "rolling"}),
    ]


def test_group_label_is_what_differs_or_the_run_name(tmp_path):
    a = made_up_run(tmp_path / "a", lr=0.1)
    assert labels(a) == {"a": 1}
    assert labels(a, made_up_run(tmp_path / "b", lr=0.2)) == {"lr 0.1": 1, "lr 0.2": 1}
    assert labels(a, made_up_run(tmp_path / "c", lr=0.2, policy="prefix")) == {
        "full, lr 0.1": 1,
        "prefix, lr 0.2": 1,
    }
    long = "synthetic(shape=(1, 8, 8), classes=10, samples=5, test_size=200)"
    both = [made_up_run(tmp_path / f"far-{seed}", dataset=long, seed=seed) for seed in (0, 1)]
    assert labels(a, *both) == {"a": 1, "far": 2}
    swept = [made_up_run(tmp_path / f"abc-seed-{seed}", seed=seed) for seed in (7, 8)]
    assert labels(*swept) == {"abc": 2}
    assert labels(swept[0]) == {"abc": 1}
    again = made_up_run(tmp_path / "deeper" / "far-0", dataset=long, clients=30)
    assert set(labels(both[0], again)) == {"clients 20", "clients 30"}


def test_runs_and_values_are_sorted_naturally(tmp_path):
    rates = (0.011, 0.1, 0.02, 1e-05, 10.0, 2.0)
    for place, rate in enumerate(rates):
        made_up_run(
            tmp_path / "runs" / f"r{place + 8}",
            lr=rate,
            policy="prefix" if place % 2 else "rolling",
        )
    data = report(tmp_path, tmp_path / "runs")
    assert [Path(run["folder"]).name for run in data["runs"]] == [
        "r8",
        "r9",
        "r10",
        "r11",
        "r12",
        "r13",
    ]
    assert data["values"] == {
        "policy": ["prefix", "rolling"],
        "lr": ["1e-05", "0.011", "0.02", "0.1", "2.0", "10.0"],
    }
    assert [each["label"] for each in data["groups"]] == [
        "prefix, lr 1e-05",
        "prefix, lr 0.1",
        "prefix, lr 2.0",
        "rolling, lr 0.011",
        "rolling, lr 0.02",
        "rolling, lr 10.0",
    ]


def test_runs_with_python_parts_are_grouped_by_name_and_seed(tmp_path):
    def custom(folder, **fields):
        run = made_up_run(tmp_path / folder, **fields)
        (run / "manifest.json").write_text(json.dumps({"custom": ["policy"]}))
        return run

    assert labels(custom("a", name="mine"), custom("b", name="mine", seed=1)) == {"mine": 2}
    assert labels(custom("c", name="mine"), custom("d", name="mine")).keys() == {
        f"mine ({tmp_path / 'c'})",
        f"mine ({tmp_path / 'd'})",
    }
    data = report(tmp_path, tmp_path / "c")
    assert data["runs"][0]["custom"] == ["policy"]


def test_run_with_missing_answers_is_not_grouped_with_complete_runs(tmp_path):
    for seed in (0, 1):
        made_up_run(tmp_path / f"alone-{seed}", seed=seed)
    hurt = made_up_run(tmp_path / "devices", seed=0)
    lines = [{**line, "lost": 2} for line in read_lines(hurt / "metrics.jsonl")]
    (hurt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = report(tmp_path, tmp_path)
    assert len(data["runs"]) == 3
    assert len(data["groups"]) == 3  # as one of them shares its seed
    assert data["notes"] == []


def test_copy_of_a_run_is_left_out(tmp_path, caplog):
    short = made_up_run(tmp_path / "runs" / "a", done=4)
    whole = Path(shutil.copytree(short, tmp_path / "runs" / "b"))
    made_up_run(tmp_path / "again")
    (whole / "metrics.jsonl").write_text((tmp_path / "again" / "metrics.jsonl").read_text())
    other = made_up_run(tmp_path / "runs" / "c", seed=1)
    data = report(tmp_path, tmp_path / "runs")
    assert [run["folder"] for run in data["runs"]] == [
        str(whole),
        str(other),
    ]  # the one with most rounds
    assert [g["runs"] for g in data["groups"]] == [[0, 1]]
    assert data["notes"] == [f"{short} is left out: the same experiment and seed as {whole}"]
    assert caplog.messages == data["notes"]
