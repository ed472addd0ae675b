"""What shows results beside the page: plots, histories, TensorBoard, and the commands for all of
them.
"""

import csv
import io
import json
import shutil
import struct
import sys
from xml.etree import ElementTree

import pytest

import fedcover as fc
from fedcover.analysis.history import as_csv, as_json, metric_rows
from fedcover.analysis.report.load import read_run
from fedcover.analysis.tensorboard import tensorboard_writer
from fedcover.cli.report import draw_runs
from fedcover.errors import FedcoverError, InvalidValue
from fedcover.runs import plotting
from fedcover.runs.metrics_log import read_lines
from fedcover.server.round import RoundReport
from tests.helpers.command_line import changed, refused
from tests.helpers.made_up import made_up_run
from tests.helpers.runs import tiny

# ── histories ─────────────────────────────────────────────────────────────────────────────────────


def test_csv_and_json_hold_the_same_rows(fedcover, tmp_path):
    for seed in (0, 1):
        made_up_run(tmp_path / "runs" / f"r{seed}", seed=seed, evaluate_every=3)
    code, out, _ = fedcover("history", "runs", "--csv")
    assert code == 0
    table = list(csv.DictReader(io.StringIO(out)))
    listed = json.loads(fedcover("history", "runs", "--json")[1])
    assert len(table) == len(listed) == 12
    for left, right in zip(table, listed, strict=True):
        assert {key: value for key, value in left.items() if value != ""} == {
            k: str(v) for k, v in right.items()
        }
    assert [row["round"] for row in listed[:6]] == [0, 1, 2, 3, 4, 5]
    assert [round for round, row in enumerate(listed[:6]) if "accuracy" in row] == [2, 5]
    assert (listed[6]["run"], listed[6]["seed"], listed[6]["clients"]) == ("r1", 1, 10)


def test_history_is_a_table_or_a_file(fedcover, tmp_path):
    made_up_run(tmp_path / "run")
    assert "gamma_round" in fedcover("history", "run")[1]
    code, out, _ = fedcover("history", "run", "--csv", "-o", "run.csv")
    assert (code, out) == (0, "")
    assert (tmp_path / "run.csv").read_text() == fedcover("history", "run", "--csv")[1]
    refused(fedcover("history", "run", "--csv", "--json"), 2, "choose one of --csv and --json")
    refused(fedcover("history", "run", "-o", "x"), 2, "output needs --csv or --json")
    refused(fedcover("history", "nothing"), 1, "nothing is not a run folder")


def test_history_names_what_is_damaged(fedcover, tmp_path):
    torn, nameless = (
        made_up_run(tmp_path / "runs" / "torn"),
        made_up_run(tmp_path / "runs" / "nameless"),
    )
    assert fedcover("history", "runs", "--csv")[2] == ""
    (nameless / "experiment.toml").unlink()
    lines = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
    (torn / "metrics.jsonl").write_text("".join([*lines[:-1], "#garbage\n"]))
    code, out, err = fedcover("history", "runs", "--csv")
    assert (code, len(out.splitlines())) == (0, 6)
    assert "runs/torn/metrics.jsonl is damaged: 1 line left out, 5 rounds can be read" in err
    assert "runs/nameless is left out: it has no experiment.toml" in err
    (made_up_run(tmp_path / "runs" / "half", lr=0.2) / "experiment.toml").write_text('name = "ful')
    code, out, err = fedcover("history", "runs", "--csv")
    assert (code, len(out.splitlines())) == (0, 6)
    assert "a run is left out: runs/half/experiment.toml cannot be read" in err


def test_history_of_values_that_are_not_finite(tmp_path):
    folder = made_up_run(tmp_path / "run")
    lines = [{**line, "loss": float("nan")} for line in read_lines(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = metric_rows([read_run(folder)])
    assert json.loads(as_json(rows))[0]["loss"] is None
    assert next(csv.DictReader(io.StringIO(as_csv(rows))))["loss"] == "nan"


# ── plots ─────────────────────────────────────────────────────────────────────────────────────────


def test_run_plot_is_a_figure_or_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    run = fc.run(tiny(rounds=2))
    figure = run.plot(tmp_path / "run.png")
    assert [len(axes.lines) for axes in figure.axes] == [1, 1, 1, 1]
    assert list(figure.axes[0].lines[0].get_ydata()) == [line["accuracy"] for line in run.metrics]
    assert struct.unpack(">II", (tmp_path / "run.png").read_bytes()[16:24]) == (1500, 960)
    run.plot(tmp_path / "run.svg")
    assert ElementTree.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")
    with pytest.raises(
        InvalidValue, match=r"must be a file that ends in one of .*svg.*; got '.*run\.xyz'"
    ):
        run.plot(tmp_path / "run.xyz")
    with pytest.raises(FedcoverError, match="cannot write"):
        run.plot(tmp_path / "not" / "there.png")


def test_plot_draws_a_band_over_seeds_and_names_missing_values(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [read_run(made_up_run(tmp_path / str(seed), seed=seed)).lines for seed in (0, 1)]
    lines[0][2]["loss"] = float("nan")
    figure = plotting.draw({"both": lines, "none": [[]]})
    assert len(figure.axes[0].collections) == 1
    assert len(figure.axes[1].lines[0].get_xdata()) == 6
    empty = plotting.draw({"none": [[]]})
    assert empty.axes[0].texts[0].get_text() == "not measured yet"


def test_plot_that_cannot_be_written_is_refused_before_training(fedcover, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        for part in ("figure", "backend_bases"):
            patched.setitem(sys.modules, f"matplotlib.{part}", None)
        refused(fedcover("run", *changed(), "--plot", "a.png"), 1, r"pip install '\.\[plot\]'")
    pytest.importorskip("matplotlib")
    refused(
        fedcover("run", *changed(), "--plot", "a.xyz"), 2, "plot must be a file that ends in one of"
    )
    assert not (tmp_path / "runs").exists()


def test_plot_option_of_run_and_report(fedcover, tmp_path):
    pytest.importorskip("matplotlib")
    assert fedcover("run", *changed(rounds=1), "--plot", "a.svg")[0] == 0
    assert (
        fedcover("report", "runs", "--out", "page.html", "--plot", "b.png", "--title", "Mine")[0]
        == 0
    )
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.svg", "b.png", "page.html"))
    assert "<title>Mine</title>" in (tmp_path / "page.html").read_text()


# ── the page and TensorBoard on the command line ──────────────────────────────────────────────────


def test_report_writes_one_page_and_says_where(fedcover, tmp_path):
    made_up_run(tmp_path / "runs" / "a")
    code, out, err = fedcover("report", "runs")
    assert (code, err) == (0, "")
    assert out.startswith("report.html: 0.")
    assert (tmp_path / "report.html").exists()
    made_up_run(tmp_path / "other", policy="prefix")
    assert fedcover("report", "runs/a", "other", "-o", "two.html")[0] == 0
    assert '"label":"prefix"' in (tmp_path / "two.html").read_text()
    refused(fedcover("report", "nowhere"), 1, "nowhere is not a run folder")
    refused(fedcover("report", "runs", "-o", "page.txt"), 2, "out must be an .html file")


def test_report_names_omitted_runs_and_plots_each_run_once(fedcover, tmp_path, monkeypatch):
    made_up_run(tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    made_up_run(tmp_path / "runs" / "c", lr=0.5)
    (tmp_path / "runs" / "c" / "experiment.toml").unlink()
    code, out, err = fedcover("report", "runs")
    assert (code, out.count("\n")) == (0, 1)
    assert err.splitlines() == [
        "runs/c is left out: it has no experiment.toml",
        "runs/b is left out: the same experiment and seed as runs/a",
    ]
    drawn = []
    monkeypatch.setattr(plotting, "draw", drawn.append)
    monkeypatch.setattr(plotting, "save_figure", lambda figure, path: None)
    draw_runs([tmp_path / "runs"], tmp_path / "a.png")
    assert [len(seeds) for seeds in drawn[0].values()] == [1]


def test_tensorboard_reads_what_is_logged(fedcover, tmp_path):
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert fedcover("run", *changed(name="logged"), "--tensorboard")[0] == 0
    events = accumulator.EventAccumulator(
        str(tmp_path / "runs" / "logged" / "tensorboard")
    ).Reload()
    lines = read_lines(tmp_path / "runs" / "logged" / "metrics.jsonl")
    scalars = events.Scalars("score/accuracy")
    assert [event.step for event in scalars] == [1, 2]
    assert [event.value for event in scalars] == pytest.approx([line["accuracy"] for line in lines])
    assert {"coverage/gamma_round", "cost/bytes_up", "seconds/training"} <= set(
        events.Tags()["scalars"]
    )


def test_tensorboard_option_without_package_says_what_to_install(fedcover, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused(fedcover("run", *changed(), "--tensorboard"), 1, r"pip install '\.\[tensorboard\]'")
    assert not (tmp_path / "runs").exists()


def test_tensorboard_writer_without_rounds_leaves_no_log(tmp_path):
    pytest.importorskip("tensorboard")
    with tensorboard_writer(tmp_path / "log") as write:
        pass
    assert not (tmp_path / "log").exists()
    with tensorboard_writer(tmp_path / "log") as write:
        write(RoundReport(0, {"accuracy": 0.5, "seconds": {}}))
    assert (tmp_path / "log").exists()
