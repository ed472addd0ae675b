"""Repeating the paper's tables: runs are done once, stopped, resumed and stored."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.paper import document, reproduce
from fedcover.paper.cells import select_cells
from fedcover.paper.evidence import Evidence
from fedcover.paper.reproduce import ReproductionRequest
from fedcover.paper.smoke import smoke_cell
from fedcover.runs import sweep
from fedcover.runs.machine import Machine
from tests.helpers.command_line import refused
from tests.helpers.paper_results import BY_ID, EVERY, read_lines, write_result

ONE = ("--quick", "--only", "cell=mnist-iid-pruning-1111223344")


def test_finished_cells_are_not_run_again(fedcover, tmp_path, monkeypatch):
    code, out, err = fedcover("reproduce", "mnist-pruning", *ONE, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["cells"]
    assert (row["runs"], row["claimed"]) == (1, None)
    (line,) = read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")
    assert line["last"] * 100 == pytest.approx(row["last"])
    assert line["gamma_min"] == 8
    assert line["curve"]["round"] == [1, 2]
    assert line["made"]["engine"] == "sequential"  # too short a run for crews
    assert "data" not in line["made"]
    monkeypatch.setattr(reproduce, "sweep", lambda *_, **__: pytest.fail("it ran again"))
    code, out, err = fedcover("reproduce", "mnist-pruning", *ONE)
    assert code == 0
    assert err.startswith("0 of 1 runs are missing")
    assert "digits-as-mnist-iid-pruning-1111223344" in out


def test_smoke_run_figures_lie_beside_its_results(fedcover, tmp_path):
    words = ("reproduce", "figures", "--quick", "--only", "cell=mnist-L2-full", "--json")
    code, out, err = fedcover(*words)
    assert code == 0, err
    names = ["medium-L2.svg", "pruning-L2.svg", "subnet-L2.svg"]
    assert [Path(path).name for path in json.loads(out)["written"]] == names
    assert all((tmp_path / path).is_file() for path in json.loads(out)["written"])
    assert not (tmp_path / "docs").exists()


def test_ctrl_c_keeps_the_finished_cells(fedcover, tmp_path, monkeypatch):
    real = reproduce.sweep

    def second_is_stopped(experiments, **options):
        yield next(iter(real(experiments, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "sweep", second_is_stopped)
    words = ("reproduce", "mnist-subnet", "--quick", "--only", "cell=mnist-iid-full,mnist-L2-full")
    code, out, err = fedcover(*words)
    assert (code, out) == (130, "")
    assert f"resume with: fedcover {' '.join(words)}" in err
    assert len(read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")) == 1
    monkeypatch.setattr(reproduce, "sweep", real)
    assert fedcover(*words)[0] == 0
    assert len(read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")) == 2


def test_ctrl_c_keeps_the_rounds_of_unfinished_cells(tmp_path):
    request = ReproductionRequest(
        ("mnist-subnet",), {"cell": ["mnist-iid-full", "mnist-L2-full"]}, smoke=True, out=tmp_path
    )
    calls = []

    @contextmanager
    def show_progress(title, rounds):
        def stop_after_the_first(report):
            calls.append(report.round)
            if len(calls) == 1:
                raise KeyboardInterrupt

        yield stop_after_the_first

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(request, machine=Machine(device="cpu"), show_progress=show_progress)
    assert not list(tmp_path.glob("*.jsonl"))
    assert reproduce.orphan_warnings(request) == []  # what lies there belongs to runs
    new_results = reproduce.reproduce(
        request, machine=Machine(device="cpu"), show_progress=show_progress
    )
    assert calls == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["digits.jsonl"]
    assert [result["curve"]["round"] for result in new_results] == [[1, 2], [1, 2]]
    assert sorted(new_results, key=lambda result: result["cell"]) == read_lines(
        tmp_path / "digits.jsonl"
    )


def test_unknown_result_files_are_named(fedcover, tmp_path):
    write_result(tmp_path / "found", "mnist-iid-full", 0, 0.9)
    (tmp_path / "found" / "more").mkdir()
    (tmp_path / "found" / "more" / "mnist-iid-full_1.json").write_text("{}")
    code, _, err = fedcover("reproduce", "docs", "--out", "found", "--docs", "docs")
    assert (code, err) == (
        0,
        "found/more/mnist-iid-full_1.json belongs to no cell and seed; it is left out\n",
    )
    (tmp_path / "file").touch()
    refused(
        fedcover("reproduce", "docs", "--out", "found", "--docs", "file"),
        2,
        "docs must be a folder; got 'file'",
    )


@pytest.mark.parametrize(
    "id",
    [
        "cifar10-L5-high-subnet-optimised",
        "cifar100-iid-homogeneous-0.125",
        "mnist-L2-pruning-1111444444-public",
        "mnist-dirichlet-pruning-1111223344",
        "mnist-iid-full-rate0.3",
        "cifar10-L2-medium-subnet-optimised-planned",
    ],
)
def test_every_kind_of_cell_runs(tmp_path, id):
    sets = tuple(BY_ID[id].sets)
    (result,) = reproduce.reproduce(
        ReproductionRequest(sets[:1], {"cell": [id]}, smoke=True, out=tmp_path),
        machine=Machine(device="cpu"),
    )
    assert 0 <= result["last"] <= result["best"] <= 1
    assert result["diverged"] is None
    assert result["local"] is not None
    assert result["score"] == ("accuracy_common" if "homogeneous" in id else "accuracy")
    assert ("validation" in result["curve"]) == ("rate" in id)
    assert ("loss" in result["curve"]) == ("homogeneous" not in id)


@pytest.mark.parametrize("id", ["mnist-iid-homogeneous-0.5", "cifar10-iid-homogeneous-0.25"])
def test_homogeneous_cell_scores_the_small_model_alone(id):
    small = smoke_cell(BY_ID[id])
    last = fc.run(small.experiment, machine=Machine(device="cpu")).metrics[-1]
    assert last[small.score] == last["accuracy_single"] != last["accuracy"]


def test_diverged_run_is_a_result(tmp_path, monkeypatch):
    def explode(experiments, **_):
        return [sweep.FinishedRun(e, [], "round 3, client 7: the loss is nan") for e in experiments]

    monkeypatch.setattr(reproduce, "sweep", explode)
    request = ReproductionRequest(("table1",), {"cell": ["mnist-iid-full"]}, seeds=1, out=tmp_path)
    reproduce.reproduce(request, machine=Machine(device="cpu"))
    assert reproduce.missing_jobs(tmp_path, request.jobs()) == []
    evidence = Evidence(tmp_path)
    assert evidence.diverged("mnist-iid-full") == 1
    assert evidence.seed_statistics("mnist-iid-full") is None
    assert "| 98.08 | diverged |  |  | 0 (1 diverged) |  |" in document.main_tables(evidence)
    assert "| MNIST | 0 | 0 | 0 | 0 | 1 | 59 |" in document.verdicts(evidence)


def test_jobs_are_grouped_by_shape():
    jobs = select_cells(EVERY, ["table1", "mnist-pruning"], 2, {"dataset": ["mnist", "cifar10"]})
    experiments = [cell.with_seed(seed) for cell, seed in jobs]
    grouped = reproduce.group_by_shape(experiments)
    assert sorted(e.name for group in grouped for e in group) == sorted(e.name for e in experiments)
    assert all(len({e.model for e in group}) == 1 for group in grouped)
    assert len(grouped) == 3  # the MLP, the MLP with dropout, the ResNet


def test_reproduce_runs_without_command_line_packages(tmp_path):
    program = """
import sys
for name in ("rich", "cyclopts", "pooch", "matplotlib"):
    sys.modules[name] = None
from fedcover.paper.reproduce import main
main(["table1", "quick=true", "cell=mnist-iid-full", "device=cpu", f"out={sys.argv[1]}"])
"""
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["digits.jsonl"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "reproduce must be one of mnist-pruning, .*, docs"),
        (["table1", "colour=red"], "only must look like axis=value,value"),
        (["table1", "seeds=x"], "seeds a number; got false, x"),
        (["table1", "quick=maybe"], "quick must be true or false"),
        (["table1", "seeds=0"], "seeds must be at least 1; got 0"),
    ],
)
def test_reproduce_module_refuses_wrong_words(words, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        reproduce.main(words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("table2",), "reproduce must be one of mnist-pruning, .*, docs; got 'table2'"),
        (("table1", "--only", "dataset"), "only must look like axis=value,value .*; got 'dataset'"),
        (("table1", "--seeds", "0"), "seeds must be at least 1; got 0"),
        (
            ("docs", "--quick"),
            "docs is written from all results: leave --only, --quick and --seeds out",
        ),
        (
            ("figures", "--quick", "--docs", "d"),
            "a smoke run writes nothing into docs: leave --docs or --quick out",
        ),
        (
            ("docs", "--seeds", "1"),
            "docs is written from all results: leave --only, --quick and --seeds out",
        ),
        (
            ("docs", "--out", "nowhere"),
            "out must be a folder with results of cells .*; got 'nowhere'",
        ),
    ],
)
def test_reproduce_command_refuses_wrong_options(fedcover, words, sentence):
    refused(fedcover("reproduce", *words), 2, sentence)
