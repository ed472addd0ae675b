"""Long runs are thinned without hiding the lowest coverage or the last round."""

import base64
import json
import re
import zlib

import fedcover as fc
from fedcover.analysis.report.downsample import MAX_ENDS, MAX_POINTS, points_for
from fedcover.runs.metrics_log import read_lines
from tests.helpers.made_up import made_up_run
from tests.helpers.report_pages import data_of, report


def test_page_of_fifty_long_runs_is_under_three_megabytes(tmp_path):
    runs = []
    for number in range(50):
        folder = tmp_path / f"run{number}"
        if number < 2:
            by_round = {str(n): {"trained": n / 7, "whole": n / 3, "F": n / 9} for n in range(200)}
            runs.append(
                made_up_run(folder, rounds=200, lr=0.001 + number, layers=4, noisy=number == 0)
            )
            (folder / "certificate.json").write_text(
                json.dumps({"kind": "estimate", "by_round": by_round})
            )
        else:
            runs.append(clone(runs[number % 2], folder, number))
    path = fc.report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    data = data_of(path)
    assert len(data["groups"]) == 50
    for run in data["runs"]:
        assert 20 <= len(run["every"]["round"]) <= points_for(50) + 2
        assert run["every"]["round"][-1] == run["scores"]["round"][-1] == 200
        frames = json.loads(zlib.decompress(base64.b64decode(run["pictures"])))["frames"]
        assert len(frames) >= 5
        assert (frames[0]["round"], frames[-1]["round"]) == (1, 200)


def clone(source, folder, number):
    """The same run under another learning rate."""
    folder.mkdir()
    for name in ("metrics.jsonl", "manifest.json", "certificate.json"):
        (folder / name).hardlink_to(source / name)
    toml = (source / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(
        re.sub(r"^lr = .*$", f"lr = {number / 100}", toml, flags=re.MULTILINE)
    )
    return folder


def test_thinning_never_hides_the_lowest_coverage_and_keeps_seeds_in_step(tmp_path):
    whole = made_up_run(tmp_path / "whole", rounds=2000, layers=1)
    stopped = made_up_run(tmp_path / "stopped", rounds=2000, done=777, layers=1, seed=1)
    lines = read_lines(whole / "metrics.jsonl")
    for line in lines:
        line["gamma_round"] = 0 if line["round"] == 1001 else 5
    (whole / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b = report(tmp_path, whole, stopped)["runs"]
    assert a["thinned"]
    assert len(a["every"]["round"]) <= MAX_POINTS + 2
    assert min(a["every"]["gamma_round"]) == 0
    assert set(b["every"]["round"]) <= set(a["every"]["round"])


def test_thinning_shows_the_last_round_of_a_run_that_stopped(tmp_path):
    fields = {"rounds": 10_000, "layers": 1, "evaluate_every": 2}
    early = made_up_run(tmp_path / "early", done=24, **fields)
    later = made_up_run(tmp_path / "later", done=57, seed=1, **fields)
    lines = read_lines(early / "metrics.jsonl")
    for line in lines:
        line["gamma_round"] = 0 if line["round"] == 19 else 5
    (early / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b = report(tmp_path, early, later)["runs"]
    assert a["every"]["round"] == [1, 24]
    assert a["every"]["gamma_round"] == [5, 0]
    assert b["every"]["round"] == [
        1,
        24,
        25,
        50,
        57,
    ]  # so that no mean is one of a single seed without need
    assert (a["scores"]["round"][-1], b["scores"]["round"][-1]) == (24, 56)
    assert 24 in b["scores"]["round"]


def test_stopped_seeds_add_few_points_to_the_page(tmp_path):
    for seed in range(40):
        made_up_run(
            tmp_path / "runs" / str(seed), rounds=10_000, done=30 + seed, layers=1, seed=seed
        )
    for run in report(tmp_path, tmp_path / "runs")["runs"]:
        assert run["every"]["round"][-1] == run["done"]
        assert len(run["every"]["round"]) <= MAX_ENDS + 3
