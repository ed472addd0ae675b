"""The report page: what is in it, what it leaves out, and that nothing that a run says can become markup."""

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

import fedcover as fc
from fedcover.analysis.report.collect import group_runs
from fedcover.analysis.report.downsample import MAX_ENDS, MAX_POINTS, points_for
from fedcover.analysis.report.load import find_runs, read_run
from fedcover.analysis.report.page import asset
from fedcover.errors import InvalidValue, RunError
from fedcover.runs import plotting
from fedcover.runs.metrics_log import read_lines
from tests.helpers.made_up import made_up_run, on_flower
from tests.helpers.report_pages import ATTACK, attacked, data_of, report


def labels(*folders):
    return {
        made.label: len(made.runs) for made in group_runs([read_run(folder) for folder in folders])
    }


# ── what belongs together ───────────────────────────────────────────────────────────────────────────────


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path):
    made = [
        made_up_run(tmp_path / f"{p}-{s}", policy=p, seed=s)
        for p in ("prefix", "rolling")
        for s in (0, 1, 2)
    ]
    data = report(tmp_path, *made)
    assert [(g["label"], g["runs"], g["settings"]) for g in data["groups"]] == [
        ("prefix", [0, 1, 2], {"policy": "prefix"}),
        ("rolling", [3, 4, 5], {"policy": "rolling"}),
    ]


def test_groups_are_called_after_what_differs_or_after_their_runs_where_that_is_too_long(tmp_path):
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


def test_runs_and_values_stand_in_natural_order(tmp_path):
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
        "prefix, lr 1e-05", "prefix, lr 0.1", "prefix, lr 2.0", "rolling, lr 0.011", "rolling, lr 0.02",
        "rolling, lr 10.0",
    ]  # fmt: skip


def test_parts_made_in_python_are_no_repetition_unless_named_so_with_other_seeds(tmp_path):
    def custom(folder, **fields):
        made = made_up_run(tmp_path / folder, **fields)
        (made / "manifest.json").write_text(json.dumps({"custom": ["policy"]}))
        return made

    assert labels(custom("a", name="mine"), custom("b", name="mine", seed=1)) == {"mine": 2}
    assert labels(custom("c", name="mine"), custom("d", name="mine")).keys() == {
        f"mine ({tmp_path / 'c'})",
        f"mine ({tmp_path / 'd'})",
    }
    data = report(tmp_path, tmp_path / "c")
    assert data["runs"][0]["custom"] == ["policy"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_spread_on_the_page_is_that_of_a_sweep():
    values = [0.91, 0.935, 0.99, 0.75]
    script = f"{asset('elements.js')}; console.log(deviation({values}))"
    told = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    assert float(told) == pytest.approx(stdev(values), rel=1e-12)


# ── runs in every state ─────────────────────────────────────────────────────────────────────────────────


def test_a_real_run_with_its_pictures_fleet_and_commands(tmp_path):
    fields = {
        "clients": 20,
        "active": 4,
        "rounds": 2,
        "epochs": 1,
        "fleet": "1x1.0 + 3x0.5",
        "policy": "rolling",
    }
    machine = fc.Machine("sequential", "cpu", threads=1, precision="bf16")
    fc.run(fc.Experiment(name="real", **fields), tmp_path / "real", machine=machine)
    (run,) = report(tmp_path, tmp_path / "real")["runs"]
    assert run["scores"]["round"] == [1, 2]
    assert len(run["every"]["gamma_round"]) == 2
    frames = json.loads(zlib.decompress(base64.b64decode(run["pictures"])))
    assert [frame["round"] for frame in frames["frames"]] == [1, 2]
    assert [row["devices"] for row in run["fleet"]] == [1, 3]
    assert sum(row["updates"] for row in run["fleet"]) == 8
    how = "--engine sequential --device cpu --threads 1 --precision bf16 --processes 1"
    assert run["commands"] == [f"fedcover run experiment.toml {how}"]
    assert fc.Experiment.from_toml(run["toml"]).policy == "rolling"


def test_a_run_on_real_devices_tells_who_did_not_answer_and_is_repeated_on_flower(tmp_path):
    (entry,) = report(tmp_path, on_flower(made_up_run(tmp_path / "run", done=3)))["runs"]
    assert entry["answers"]["counts"] == {"answered": 3, "rejected": 3, "late": 1}
    refused, late = entry["answers"]["causes"]
    assert (refused["who"], refused["times"], refused["rounds"]) == ("client 4", 3, "1 to 3")
    assert (late["who"], late["why"], late["rounds"]) == ("node 7", "no answer in 5 s", "2")
    again, go_on = entry["commands"]
    assert again == "fedcover flower up --nodes N experiment.toml"
    assert go_on == f"fedcover flower up --nodes N {tmp_path / 'run'}"


def test_of_a_round_that_was_run_again_the_last_answers_count(tmp_path):
    folder = on_flower(made_up_run(tmp_path / "run", done=3))
    path = folder / "events.jsonl"
    again = [
        {"round": 2, "event": "answered", "node": 1, "client": client, "why": ""}
        for client in (2, 4)
    ]
    path.write_text(path.read_text() + "".join(json.dumps(event) + "\n" for event in again))
    (entry,) = report(tmp_path, folder)["runs"]
    assert entry["answers"]["counts"] == {"answered": 4, "rejected": 2, "late": 1}
    assert [(cause["times"], cause["rounds"]) for cause in entry["answers"]["causes"]] == [
        (2, "1 to 2"),
        (1, "2"),
    ]


def test_values_of_the_manifest_stay_values_in_the_commands(tmp_path):
    folder = made_up_run(tmp_path / "run")
    (folder / "manifest.json").write_text(
        json.dumps({"engine": "$(id)", "device": "cpu; rm -rf ~", "threads": 2})
    )
    (command,) = report(tmp_path, folder)["runs"][0]["commands"]
    assert shlex.split(command)[3:] == [
        "--engine",
        "$(id)",
        "--device",
        "cpu; rm -rf ~",
        "--threads",
        "2",
    ]
    assert "'cpu; rm -rf ~'" in command
    assert "'$(id)'" in command


def test_thousands_of_causes_do_not_fill_the_page(tmp_path):
    folder = made_up_run(tmp_path / "run")
    events = [
        {"round": 0, "event": "lost", "node": 1, "client": n, "why": f"{n} " * 500}
        for n in range(2_000)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (entry,) = report(tmp_path, folder)["runs"]
    assert entry["answers"]["counts"] == {"lost": 2_000}
    assert len(entry["answers"]["causes"]) + entry["answers"]["more"] == 2_000
    assert len(json.dumps(entry["answers"])) < 20_000


def test_a_run_with_missing_answers_is_no_copy_of_one_without(tmp_path):
    for seed in (0, 1):
        made_up_run(tmp_path / f"alone-{seed}", seed=seed)
    hurt = made_up_run(tmp_path / "devices", seed=0)
    lines = [{**line, "lost": 2} for line in read_lines(hurt / "metrics.jsonl")]
    (hurt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = report(tmp_path, tmp_path)
    assert len(data["runs"]) == 3
    assert len(data["groups"]) == 3  # as one of them shares its seed
    assert data["notes"] == []


def test_a_run_in_one_process_has_no_answers_to_tell_of(tmp_path):
    assert report(tmp_path, made_up_run(tmp_path / "run"))["runs"][0]["answers"] is None


def test_runs_that_have_not_begun_or_not_been_evaluated_or_not_ended(tmp_path):
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


def test_what_is_not_finite_is_said_and_never_written_as_a_number(tmp_path):
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


def test_runs_of_an_older_version_have_no_pictures(tmp_path):
    folder = made_up_run(tmp_path / "old")
    lines = read_lines(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**x, "pictures": None}) + "\n" for x in lines)
    )
    (folder / "manifest.json").unlink()
    assert report(tmp_path, folder)["runs"][0]["pictures"] is None


def test_folders_are_searched_and_named_once(tmp_path):
    a, b = made_up_run(tmp_path / "runs" / "a"), made_up_run(tmp_path / "runs" / "b")
    assert find_runs([tmp_path / "runs", a, b]) == [a, b]
    with pytest.raises(RunError, match="none below it"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="at least one"):
        fc.report([], tmp_path / "report.html")


def test_wrong_files_are_named(tmp_path):
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


# ── what is left out is said ────────────────────────────────────────────────────────────────────────────


def test_a_copy_of_a_run_is_no_further_seed(tmp_path, caplog):
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


def test_a_damaged_run_is_named(tmp_path, caplog):
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


def test_a_run_that_cannot_be_read_costs_no_other(tmp_path, caplog):
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
    [None, {"seconds": 3}, {"gamma_round": "1"}, {"bytes_up": None}, {"multiply_adds": None}, {"loss": None},
     {"accuracy": "high"}, {"validation_accuracy": []}, {"lost": "2"}, {"clients": [1]}, {"clients": {"1": {}}},
     {"clients": {"1": {**CLIENT, "loss": None}}}, {"pictures": {"clients": {"99": 0}, "layers": {}}},
     {"pictures": "none"}, {"train_loss": "low"}, {"round": 99999}, {"round": -3}, {"accuracy": 7.5},
     {"validation_accuracy": -0.1}],
    ids=str,
)  # fmt: skip
def test_an_incomplete_line_is_left_out_and_named(tmp_path, damage):
    folder = made_up_run(tmp_path / "run", done=3)
    path = folder / "metrics.jsonl"
    line = {"round": 3} if damage is None else {**read_lines(path)[-1], "round": 3, **damage}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    data = report(tmp_path, folder)
    assert data["notes"] == [f"{path} is damaged: 1 line left out, 3 rounds can be read"]
    assert (data["runs"][0]["done"], data["runs"][0]["totals"]["rounds"]) == (3, 3)


def test_a_run_without_a_whole_line_is_named(tmp_path):
    folder = made_up_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1}\n')
    data = report(tmp_path, folder)
    assert data["notes"] == [
        f"{folder / 'metrics.jsonl'} is damaged: 2 lines left out, 0 rounds can be read"
    ]
    assert data["runs"][0]["totals"] == {}


def test_validation_that_was_not_always_measured(tmp_path):
    folder = made_up_run(tmp_path / "run")
    first, second, *others = read_lines(folder / "metrics.jsonl")
    lines = [first, {**second, "validation_accuracy": 0.5}, *others]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report(tmp_path, folder)["runs"][0]["totals"]["best_round"] == 1


# ── small and safe ──────────────────────────────────────────────────────────────────────────────────────


def test_fifty_long_runs_stay_under_three_megabytes(tmp_path):
    made = []
    for number in range(50):
        folder = tmp_path / f"run{number}"
        if number < 2:
            by_round = {str(n): {"trained": n / 7, "whole": n / 3, "F": n / 9} for n in range(200)}
            made.append(
                made_up_run(folder, rounds=200, lr=0.001 + number, layers=4, noisy=number == 0)
            )
            (folder / "certificate.json").write_text(
                json.dumps({"kind": "estimate", "by_round": by_round})
            )
        else:
            made.append(clone(made[number % 2], folder, number))
    path = fc.report(made, tmp_path / "report.html")
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


def test_many_seeds_that_stopped_anywhere_do_not_fill_the_page(tmp_path):
    for seed in range(40):
        made_up_run(
            tmp_path / "runs" / str(seed), rounds=10_000, done=30 + seed, layers=1, seed=seed
        )
    for run in report(tmp_path, tmp_path / "runs")["runs"]:
        assert run["every"]["round"][-1] == run["done"]
        assert len(run["every"]["round"]) <= MAX_ENDS + 3


class Tags(HTMLParser):
    """Every element and attribute that a browser would see."""

    def __init__(self):
        super().__init__()
        self.found, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += attrs


def test_nothing_that_a_run_says_becomes_markup(tmp_path):
    folder = attacked(tmp_path / "evil")
    path = fc.report(folder, tmp_path / "report.html", title=ATTACK)
    seen = Tags()
    seen.feed(path.read_text())
    assert seen.found.count("script") == 2
    assert "img" not in seen.found
    assert not any(name.startswith("on") or name == "src" for name, _ in seen.attributes)
    assert data_of(path)["title"] == ATTACK
    assert data_of(path)["runs"][0]["name"] == ATTACK


def test_the_page_asks_no_network_for_anything(tmp_path):
    text = fc.report(made_up_run(tmp_path / "run"), tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert "default-src 'none'" in text
    for script in re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|import\(", text
    ):
        pytest.fail(f"the page uses {script}")


def test_a_report_needs_no_torch(tmp_path):
    folder = made_up_run(tmp_path / "run")
    program = f"""
import sys
for name in ("torch", "numpy", "pydantic", "rich", "cyclopts", "matplotlib"):
    sys.modules[name] = None
import fedcover
print(fedcover.report({str(folder)!r}, {str(tmp_path / "report.html")!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("report.html")


# ── colours ─────────────────────────────────────────────────────────────────────────────────────────────

BLIND = {
    "nobody": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
"""What linear red, green and blue become for colour-blind eyes (Machado, Oliveira, Fernandes 2009, severity 1)."""


def linear(colour):
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.072175],
            [0.0193339, 0.119192, 0.9503041],
        ]
    )
    ratio = (to_xyz @ rgb) / to_xyz.sum(1)
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a, b):
    bright, dark = sorted(
        (float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True
    )
    return (bright + 0.05) / (dark + 0.05)


def colours(name):
    """The light and the dark value of a colour of the style sheet."""
    return re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", asset("page.css")).groups()


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", BLIND)
def test_lines_can_be_told_apart_by_all_eyes(theme, eyes):
    seen = [lab(np.clip(BLIND[eyes] @ linear(colours(f"c{n}")[theme]), 0, 1)) for n in range(8)]
    assert (
        min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 20
    )  # two or three is just noticeable


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_and_words_stand_out_from_the_page(theme):
    for background in ("card", "page"):
        for name in ("text", "soft", "warn", "link"):
            assert contrast(colours(name)[theme], colours(background)[theme]) >= 4.5, name
    for name in [*(f"c{n}" for n in range(8)), "held"]:
        assert contrast(colours(name)[theme], colours("card")[theme]) >= 3, name


def test_plots_on_paper_have_the_colours_of_the_page():
    assert tuple(colours(f"c{n}")[0] for n in range(8)) == plotting.COLOURS
