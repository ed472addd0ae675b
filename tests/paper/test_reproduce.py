"""Repeating the paper's tables: cells as data, runs resumed cell by cell, results that lie beside each other."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.paper import comparisons, document, reproduce, results, store
from fedcover.paper.cells import AXES, RATES, cell_id, cells, select_cells, smoke_cell
from fedcover.paper.claims import COLUMNS, DATASETS, codename_rows
from fedcover.paper.designs import designs
from fedcover.paper.evidence import Evidence
from fedcover.paper.reproduce import ReproductionRequest
from fedcover.paper.results import Finished
from fedcover.paper.statistics import (
    SeedStatistics,
    against_claim,
    paired_difference,
    seed_statistics,
    two_sided_p_value,
)
from fedcover.paper.svg_chart import Series, chart
from fedcover.runs import sweep
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from tests.helpers.command_line import refused
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.usefixtures("only_the_cpu")

EVERY = cells(dict.fromkeys(DATASETS, 0.1))
BY_ID = {cell.id: cell for cell in EVERY}
ONE = ("--quick", "--only", "cell=mnist-iid-pruning-1111223344")


# ── cells ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_place_of_the_main_table_has_a_cell():
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            for design in designs(dataset):
                cell = BY_ID[cell_id(dataset, column, design.name)]
                assert "table1" in cell.sets
                assert (cell.experiment.dataset, cell.experiment.lr) == (dataset, 0.01)


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
def test_every_row_of_an_appendix_table_has_its_cells(kind):
    of = [cell for cell in EVERY if f"mnist-{kind}" in cell.sets and cell.row != "public-code"]
    assert len(of) == 2 * len(codename_rows(kind))
    assert {cell.column for cell in of} == {"iid", "L2"}
    assert {cell.id for cell in of if cell.design == "full"} == {"mnist-iid-full", "mnist-L2-full"}


def test_a_cell_is_the_paper_s_experiment():
    ran = BY_ID["mnist-L2-pruning-1111223344"].with_seed(2)
    assert (ran.clients, ran.active, ran.rounds, ran.epochs, ran.batch_size, ran.momentum) == (
        100,
        10,
        100,
        5,
        10,
        0.5,
    )
    assert (ran.partition, ran.assignment, ran.seed, ran.lr) == ("labels(limit=2)", "slot", 2, 0.01)
    assert BY_ID["cifar100-L50-full"].experiment.model == "wide_resnet(widen=8)"
    assert BY_ID["mnist-dirichlet-full"].experiment.partition == "dirichlet(alpha=0.1)"


def test_different_cells_are_different_experiments():
    digests = Counter(cell.experiment.digest for cell in EVERY)
    assert max(digests.values()) == 1


def test_the_rate_is_never_chosen_on_a_reported_seed_or_on_test_data():
    tried = [cell for cell in EVERY if cell.row == "rates"]
    assert len(tried) == len(DATASETS) * len(RATES)
    assert all(cell.experiment.validation == 0.1 for cell in tried)
    assert all(cell.experiment.validation == 0 for cell in EVERY if cell.row != "rates")
    assert not set(tried[0].seeds(3)) & set(EVERY[0].seeds(100))


def test_the_second_rate_is_for_the_full_and_medium_rows():
    second = [cell for cell in EVERY if cell.row == "second-rate"]
    assert {cell.level for cell in second} == {"full", "medium"}
    assert all(cell.experiment.lr == 0.1 for cell in second)
    assert not any(cell.row == "second-rate" for cell in cells({}))


def test_filters_hold_together_and_seeds_come_first():
    found = select_cells(
        EVERY, ["table1"], 2, {"dataset": ["mnist"], "column": ["iid", "L5"], "row": ["main"]}
    )
    assert len(found) == 2 * 2 * 20
    assert [seed for _, seed in found] == [0] * 40 + [1] * 40
    assert {cell.column for cell, _ in found} == {"iid", "L5"}
    assert len(select_cells(EVERY, ["table1"], 3, {"seed": ["1"], "cell": ["mnist-iid-full"]})) == 1


@pytest.mark.parametrize(
    ("sets", "only", "sentence"),
    [
        (["table2"], {}, "reproduce must be one of mnist-pruning, .*; got 'table2'"),
        (["table1"], {"colour": ["red"]}, f"only must be one of {', '.join(AXES)}; got 'colour'"),
        (
            ["table1"],
            {"dataset": ["emnist"]},
            "only dataset must be one of cifar10, cifar100, mnist; got 'emnist'",
        ),
    ],
)
def test_filters_that_make_no_sense(sets, only, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        select_cells(EVERY, sets, 1, only)


def test_every_cell_has_a_smoke_run_that_is_valid():
    for cell in EVERY:
        small = smoke_cell(cell)
        again = Experiment(**small.experiment.model_dump())
        assert (again.dataset, again.rounds, again.policy) == ("digits", 2, cell.experiment.policy)
        assert small.id != cell.id


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_there_is_not_run_again(fedcover, tmp_path, monkeypatch):
    code, out, err = fedcover("reproduce", "mnist-pruning", *ONE, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["cells"]
    assert (row["runs"], row["claimed"]) == (1, None)
    (kept,) = read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")
    assert kept["last"] * 100 == pytest.approx(row["last"])
    assert kept["gamma_min"] == 8
    assert kept["curve"]["round"] == [1, 2]
    assert kept["made"]["engine"] == "sequential"  # too short a run for crews
    assert "data" not in kept["made"]
    monkeypatch.setattr(reproduce, "sweep", lambda *_, **__: pytest.fail("it ran again"))
    code, out, err = fedcover("reproduce", "mnist-pruning", *ONE)
    assert code == 0
    assert err.startswith("0 of 1 runs are missing")
    assert "digits-as-mnist-iid-pruning-1111223344" in out


def test_the_curves_of_a_smoke_run_are_drawn_beside_its_results(fedcover, tmp_path):
    wanted = ("reproduce", "figures", "--quick", "--only", "cell=mnist-L2-full", "--json")
    code, out, err = fedcover(*wanted)
    assert code == 0, err
    names = ["medium-L2.svg", "pruning-L2.svg", "subnet-L2.svg"]
    assert [Path(path).name for path in json.loads(out)["written"]] == names
    assert all((tmp_path / path).is_file() for path in json.loads(out)["written"])
    assert not (tmp_path / "docs").exists()


def test_after_ctrl_c_the_finished_cells_stay(fedcover, tmp_path, monkeypatch):
    real = reproduce.sweep

    def second_is_stopped(experiments, **options):
        yield next(iter(real(experiments, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "sweep", second_is_stopped)
    wanted = ("reproduce", "mnist-subnet", "--quick", "--only", "cell=mnist-iid-full,mnist-L2-full")
    code, out, err = fedcover(*wanted)
    assert (code, out) == (130, "")
    assert f"resume with: fedcover {' '.join(wanted)}" in err
    assert len(read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")) == 1
    monkeypatch.setattr(reproduce, "sweep", real)
    assert fedcover(*wanted)[0] == 0
    assert len(read_lines(tmp_path / "runs" / "reproduction-quick" / "digits.jsonl")) == 2


def test_after_ctrl_c_runs_on_their_way_go_on_where_they_were(tmp_path):
    request = ReproductionRequest(
        ("mnist-subnet",), {"cell": ["mnist-iid-full", "mnist-L2-full"]}, smoke=True, out=tmp_path
    )
    seen = []

    @contextmanager
    def show_progress(title, rounds):
        def stop_after_the_first(report):
            seen.append(report.round)
            if len(seen) == 1:
                raise KeyboardInterrupt

        yield stop_after_the_first

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(request, machine=Machine(device="cpu"), show_progress=show_progress)
    assert not list(tmp_path.glob("*.jsonl"))
    assert reproduce.orphan_warnings(request) == []  # what lies there belongs to runs
    new_results = reproduce.reproduce(
        request, machine=Machine(device="cpu"), show_progress=show_progress
    )
    assert seen == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["digits.jsonl"]
    assert [result["curve"]["round"] for result in new_results] == [[1, 2], [1, 2]]
    assert sorted(new_results, key=lambda result: result["cell"]) == read_lines(
        tmp_path / "digits.jsonl"
    )


def test_files_that_no_cell_is_read_from_are_named(fedcover, tmp_path):
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
def test_every_sort_of_cell_goes_through(tmp_path, id):
    sets = tuple(BY_ID[id].sets)
    (kept,) = reproduce.reproduce(
        ReproductionRequest(sets[:1], {"cell": [id]}, smoke=True, out=tmp_path),
        machine=Machine(device="cpu"),
    )
    assert 0 <= kept["last"] <= kept["best"] <= 1
    assert kept["diverged"] is None
    assert kept["local"] is not None
    assert kept["score"] == ("accuracy_common" if "homogeneous" in id else "accuracy")
    assert ("validation" in kept["curve"]) == ("rate" in id)
    assert ("loss" in kept["curve"]) == ("homogeneous" not in id)


@pytest.mark.parametrize("id", ["mnist-iid-homogeneous-0.5", "cifar10-iid-homogeneous-0.25"])
def test_a_homogeneous_cell_counts_the_small_model_alone(id):
    small = smoke_cell(BY_ID[id])
    last = fc.run(small.experiment, machine=Machine(device="cpu")).metrics[-1]
    assert last[small.score] == last["accuracy_single"] != last["accuracy"]


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
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


def test_jobs_of_one_shape_are_handed_over_together():
    jobs = select_cells(EVERY, ["table1", "mnist-pruning"], 2, {"dataset": ["mnist", "cifar10"]})
    experiments = [cell.with_seed(seed) for cell, seed in jobs]
    grouped = reproduce.group_by_shape(experiments)
    assert sorted(e.name for group in grouped for e in group) == sorted(e.name for e in experiments)
    assert all(len({e.model for e in group}) == 1 for group in grouped)
    assert len(grouped) == 3  # the MLP, the MLP with dropout, the ResNet


def test_it_runs_without_the_command_line_packages(tmp_path):
    program = """
import sys
for name in ("rich", "cyclopts", "pooch", "matplotlib"):
    sys.modules[name] = None
from fedcover.paper.reproduce import main
main(["table1", "quick=true", "cell=mnist-iid-full", "device=cpu", f"out={sys.argv[1]}"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
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
def test_words_that_make_no_sense(words, sentence):
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
def test_commands_that_make_no_sense(fedcover, words, sentence):
    refused(fedcover("reproduce", *words), 2, sentence)


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────


def write_result(folder, id, seed, accuracy, *, validation=None, local=None):
    """A result such as a run of two rounds would leave; the figures are made up."""
    cell = BY_ID[id]
    line = {
        "gamma_round": 6, "gamma_window": 6, "delta2_mean": 0.1, "parameters": 10.0, "multiply_adds": 10.0,
        "bytes_down": 1, "bytes_up": 1, "seconds": {"training": 1.0}, "loss": 1 - accuracy,
    }  # fmt: skip
    scores = {
        "accuracy": accuracy,
        "accuracy_common": accuracy,
        "accuracy_local": local or accuracy,
    }
    held_out = {} if validation is None else {"validation_accuracy": validation}
    metrics = [
        {"round": 0, **line, **{name: value / 2 for name, value in scores.items()}, **held_out},
        {"round": 1, **line, **scores, **held_out},
    ]
    done = Finished(cell.with_seed(seed), metrics, Machine(device="cpu").resolved())
    return store.write(folder, cell, results.to_result(cell, done))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_result(folder, cell, seed, **fields):
    """Write a stored result anew with other fields, as an editor could."""
    result = store.load(folder)[cell.id, seed].result
    store.write(folder, cell, {**result, **fields})


def test_a_result_of_another_experiment_is_named_and_not_replaced(tmp_path):
    cell = BY_ID["mnist-iid-full"]
    write_result(tmp_path, cell.id, 0, 0.9)
    records = store.load(tmp_path)
    assert results.find_result(records, cell, 0)["last"] == 0.9
    assert results.find_result(records, cell, 1) is None
    experiment = dict(records[cell.id, 0].result["experiment"])
    del experiment["clip"]  # as if a newer version had added the field
    change_result(tmp_path, cell, 0, experiment=experiment)
    assert results.find_result(store.load(tmp_path), cell, 0) is not None
    change_result(tmp_path, cell, 0, experiment={**experiment, "epochs": 1})
    sentence = r"line 1 \(mnist-iid-full, seed 0\), is of another experiment \(epochs is 1, not 5\); move it away"
    with pytest.raises(RunError, match=sentence):
        results.find_result(store.load(tmp_path), cell, 0)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("last", 9.9),
        ("last", "x"),
        ("best", float("nan")),
        ("local", -1),
        ("curve", {"round": [1]}),
    ],
)
def test_figures_that_cannot_be_are_named(tmp_path, figure, value):
    cell = BY_ID["mnist-iid-full"]
    write_result(tmp_path, cell.id, 0, 0.9)
    change_result(tmp_path, cell, 0, **{figure: value})
    with pytest.raises(
        RunError,
        match=r"mnist\.jsonl, line 1 \(mnist-iid-full, seed 0\), is no result of a cell: .*",
    ):
        results.find_result(store.load(tmp_path), cell, 0)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"experiment": 3}', '{"cell": "x", "seed": "0"}', "\xff"]
)
def test_a_damaged_line_is_named(tmp_path, content):
    path = write_result(tmp_path, "mnist-iid-full", 0, 0.9)
    path.write_bytes(path.read_bytes() + content.encode("latin-1") + b"\n")
    sentence = r"mnist\.jsonl(, line 2, is no result of a cell: .*; remove it to run the cell again| cannot be read: .*)"
    with pytest.raises(RunError, match=sentence):
        store.load(tmp_path)


def test_a_result_that_is_there_twice_is_named(tmp_path):
    path = write_result(tmp_path, "mnist-iid-full", 0, 0.9)
    path.write_text(2 * path.read_text())
    with pytest.raises(
        RunError,
        match=r"line 2 \(mnist-iid-full, seed 0\), repeats line 1 of .*; remove one of them",
    ):
        store.load(tmp_path)


def test_results_are_sorted_whatever_the_order_of_writing(tmp_path):
    keys = [("mnist-iid-full", 1), ("mnist-L2-full", 0), ("mnist-iid-full", 0)]
    for id, seed in keys:
        write_result(tmp_path, id, seed, 0.9)
    lines = read_lines(tmp_path / "mnist.jsonl")
    assert [(line["cell"], line["seed"]) for line in lines] == sorted(keys)
    write_result(tmp_path, "mnist-iid-full", 0, 0.5)  # in place of the first
    assert [line["last"] for line in read_lines(tmp_path / "mnist.jsonl")] == [0.9, 0.5, 0.9]


@pytest.mark.parametrize(
    ("scores", "best"), [((0.8, 0.9, 0.95, 0.5), 0.1), ((0.9, 0.8, 0.7, 0.1), None)]
)
def test_the_second_rate_is_the_best_on_held_out_rows(tmp_path, scores, best):
    for rate, score in list(zip(RATES, scores, strict=True))[:-1]:
        write_result(tmp_path, f"mnist-iid-full-rate{rate:g}", 1000, 0.1, validation=score)
    assert results.second_rates(store.load(tmp_path), EVERY) == {}  # one is still missing
    write_result(tmp_path, f"mnist-iid-full-rate{RATES[-1]:g}", 1000, 0.99, validation=scores[-1])
    assert results.second_rates(store.load(tmp_path), EVERY) == ({"mnist": best} if best else {})


def test_the_source_has_a_name_that_lasts():
    afresh = results.source_digest.__wrapped__  # what is kept would be equal to itself
    assert afresh() == afresh()
    assert len(afresh()) == 12


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────

QUANTILES = {
    1: 12.706205,
    2: 4.302653,
    3: 3.182446,
    4: 2.776445,
    5: 2.570582,
    10: 2.228139,
    29: 2.045230,
}


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_students_t_has_the_tabulated_quantiles(freedom, quantile):
    assert two_sided_p_value(quantile, freedom) == pytest.approx(0.05, abs=1e-6)


@given(st.floats(-50, 50), st.integers(1, 40))
def test_the_chance_is_symmetric_and_falls_with_distance(t, freedom):
    assert two_sided_p_value(t, freedom) == two_sided_p_value(-t, freedom)
    assert (
        0
        <= two_sided_p_value(abs(t) + 1, freedom)
        <= two_sided_p_value(t, freedom) + 1e-12
        <= 1 + 1e-12
    )
    assert (
        two_sided_p_value(abs(t) + 1, freedom) < two_sided_p_value(t, freedom)
        or two_sided_p_value(t, freedom) < 1e-12
    )


def test_a_claim_within_and_beyond_noise():
    found = seed_statistics([97.8, 98.0, 98.2])
    assert (found.mean, found.seeds) == (pytest.approx(98.0), 3)
    edge = 4.302653 * found.spread * (2 / 3) ** 0.5
    assert against_claim(98.0 + 0.999 * edge, found) == "="
    assert against_claim(98.0 + 1.001 * edge, found) == "lower"
    assert against_claim(98.0 - 1.001 * edge, found) == "higher"
    assert against_claim(10.0, SeedStatistics(90.0, None, 1)) == "one seed"
    assert against_claim(90.0, SeedStatistics(90.0, 0.0, 3)) == "="
    assert seed_statistics([]) is None


def test_pairs_use_only_shared_seeds():
    found = paired_difference({0: 1.0, 1: 2.0, 5: 9.0}, {0: 0.5, 1: 1.0, 7: 3.0})
    assert (found.mean, found.seeds) == (0.75, 2)
    assert found.verdict == "not decided"
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_difference({0: 1.0}, {0: 2.0}).verdict == "one seed"
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}).verdict == "lower"


# ── the document ────────────────────────────────────────────────────────────────────────────────────────


def test_the_committed_document_is_what_would_be_generated():
    evidence = Evidence(ROOT / "results" / "reproduction")
    assert (ROOT / "docs" / "reproduction.md").read_text() == document.render(evidence)
    kept = {path.stem: path.read_text() for path in (ROOT / "docs" / "reproduction").glob("*.svg")}
    assert kept == document.draw_figures(evidence)


def test_every_committed_result_belongs_to_a_cell_as_it_now_is():
    evidence = Evidence(ROOT / "results" / "reproduction")
    results_of_cells = {
        (run["cell"], run["seed"]) for runs in evidence.results.values() for run in runs
    }
    assert results_of_cells == set(evidence.records)
    assert evidence.orphan_results() == []


def test_the_document_tells_claims_results_and_what_was_not_run(tmp_path):
    for seed in range(3):
        write_result(tmp_path, "mnist-iid-pruning-1111444444", seed, 0.97 + 0.001 * seed)
        write_result(tmp_path, "mnist-iid-pruning-1111223344", seed, 0.98 + 0.001 * seed)
        write_result(tmp_path, "mnist-L2-full", seed, 0.936, local=0.9)
    write_result(tmp_path, "mnist-iid-full", 0, 0.98)
    text = document.render(Evidence(tmp_path))
    assert "{{" not in text
    greedy = "97.51 | 97.10 ± 0.10 | 72.82 ± 0.07 | 97.10 ± 0.10 | 3 | lower"  # 48.55 after the first of two rounds
    assert f"| medium | pruning-greedy | pruning-1111444444 | 4 | 6 | {greedy} |" in text
    assert "| full | full | full | 10 | 6 | 98.08 | 98.00 | 73.50 | 98.00 | 1 | one seed |" in text
    assert "| MNIST IID | 98.08 | 98.00 | 73.50 | 34.65 | -24.58 |" in text
    assert "More than 5 points away: MNIST IID, MNIST L=2." in text
    assert "- MNIST: 4 of 60 cells of the main table have runs." in text
    assert "- CIFAR-10: 0 of 48 cells of the main table have runs.\n" in text
    assert (
        "| 1111111111 | 98.045 | 98.00 | one seed | 93.59 | 93.60 ± 0.00 | higher | 93.82 | 90.00 ± 0.00 |"
        in text
    )
    assert (
        "1 of 60 comparisons have runs. The optimised design is: 1 higher, 0 lower, 0 not decided."
        in text
    )
    both = "6 / 6 | 0.100 / 0.100 | +0.88 | +1.00 ± 0.00 | 3 | 0.000 | higher | +0.75 ± 0.00 | 2.0 / 2.0"
    assert f"| {both} |" in text
    assert "not run" in text
    assert "MNIST, L=2, medium level: loss and accuracy" in text
    assert "MNIST, L=2, fixed sub-networks: loss" in text  # FedAvg is in it


def test_rounds_to_a_target(tmp_path):
    for seed in range(2):
        write_result(
            tmp_path, "mnist-iid-full", seed, 0.8 + 0.1 * seed
        )  # half of it after the first round
    evidence = Evidence(tmp_path)
    assert (
        evidence.rounds_to("mnist-iid-full", 40) == 2
    )  # of fewer rounds than a mean is of there is one mean
    assert evidence.rounds_to("mnist-iid-full", 60) == 2  # the means of both seeds are 60 and 67.5
    assert evidence.rounds_to("mnist-iid-full", 65) is None
    write_result(tmp_path, "mnist-L2-full", 0, 0.9)
    curve = {"round": list(range(1, 9)), "accuracy": [0.9, 0.1, 0.1, 0.1, 0.2, 0.5, 0.6, 0.9]}
    change_result(tmp_path, BY_ID["mnist-L2-full"], 0, curve=curve)
    evidence = Evidence(tmp_path)
    assert [evidence.rounds_to("mnist-L2-full", target) for target in (20, 29, 40, 90)] == [
        5,
        7,
        8,
        None,
    ]


def test_many_lines_have_no_bands():
    def drawn(number):
        lines = [Series(f"line {n}", [1, 2], [[0.1, 0.2], [0.2, 0.3]]) for n in range(number)]
        return chart("title", [("accuracy", lines)]).count("<polygon")

    assert (drawn(8), drawn(9)) == (8, 0)


def test_the_document_counts_from_what_source_runs_were_made(tmp_path):
    for seed, commit in enumerate((None, "abc-dirty", "abc")):
        write_result(tmp_path, "mnist-iid-full", seed, 0.9)
        origin = store.load(tmp_path)["mnist-iid-full", seed].result["made"]
        change_result(tmp_path, BY_ID["mnist-iid-full"], seed, made={**origin, "commit": commit})
    source = "1 runs were made from a commit, 1 from one with changes beside it, 1 from a copy without git"
    assert source in document.provenance_table(Evidence(tmp_path))


def test_the_ranking_at_the_second_rate(tmp_path):
    for rate, score in zip(RATES, (0.8, 0.9, 0.95, 0.5), strict=True):
        write_result(tmp_path, f"mnist-iid-full-rate{rate:g}", 1000, 0.1, validation=score)
    assert (
        comparisons.second_rate_block(Evidence(tmp_path))
        == "No comparison at a second learning rate has runs."
    )
    for design, accuracy in (("1111444444", 0.97), ("1111223344", 0.96)):
        write_result(tmp_path, f"mnist-iid-pruning-{design}-lr0.1", 0, accuracy)
    found = comparisons.second_rate_block(Evidence(tmp_path))
    assert (
        "0 higher, 0 lower, 0 not decided, 1 with one seed, no verdict (0 above, 1 below)." in found
    )
    assert "| -1.00 | 1 |  | one seed | -0.75 |" in found


def test_the_commands_write_document_and_figures(fedcover, tmp_path):
    for seed in range(2):
        write_result(tmp_path / "mine", "mnist-iid-full", seed, 0.98)
        write_result(tmp_path / "mine", "mnist-iid-homogeneous-0.5", seed, 0.9)
    code, out, err = fedcover("reproduce", "docs", "--out", "mine", "--docs", "pages")
    assert (code, err) == (0, "")
    assert out.split() == [
        "pages/reproduction.md",
        *(f"pages/reproduction/{name}-iid.svg" for name in ("medium", "pruning", "subnet")),
    ]
    drawn = (tmp_path / "pages" / "reproduction" / "medium-iid.svg").read_text()
    assert (
        drawn.count("<polyline") == 3
    )  # the loss of a model that is trained in part only is not shown
    assert drawn.count("homogeneous-0.5") == 1


def test_a_picture_repeats_itself_and_is_well_formed(tmp_path):
    from xml.etree import ElementTree

    write_result(tmp_path, "mnist-iid-full", 0, 0.98)
    first, second = (document.draw_figures(Evidence(tmp_path)) for _ in range(2))
    assert first == second
    assert set(first) == {"medium-iid", "pruning-iid", "subnet-iid"}
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in first.values())
