"""Stored results: sorted, checked when they are read, and tied to their experiment."""

import pytest

from fedcover.errors import RunError
from fedcover.paper import results, store
from fedcover.paper.cells import RATES
from tests.helpers.paper_results import BY_ID, EVERY, change_result, read_lines, write_result


def test_result_of_another_experiment_is_refused(tmp_path):
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
    sentence = (
        r"line 1 \(mnist-iid-full, seed 0\), is of another experiment "
        r"\(epochs is 1, not 5\); move it away"
    )
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
def test_impossible_figures_in_results_are_refused(tmp_path, figure, value):
    cell = BY_ID["mnist-iid-full"]
    write_result(tmp_path, cell.id, 0, 0.9)
    change_result(tmp_path, cell, 0, **{figure: value})
    with pytest.raises(
        RunError,
        match=r"mnist\.jsonl, line 1 \(mnist-iid-full, seed 0\), is not a result of a cell: .*",
    ):
        results.find_result(store.load(tmp_path), cell, 0)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"experiment": 3}', '{"cell": "x", "seed": "0"}', "\xff"]
)
def test_damaged_result_line_is_named(tmp_path, content):
    path = write_result(tmp_path, "mnist-iid-full", 0, 0.9)
    path.write_bytes(path.read_bytes() + content.encode("latin-1") + b"\n")
    sentence = (
        r"mnist\.jsonl(, line 2, is not a result of a cell: .*; remove it to run "
        r"the cell again| cannot be read: .*)"
    )
    with pytest.raises(RunError, match=sentence):
        store.load(tmp_path)


def test_duplicate_result_is_refused(tmp_path):
    path = write_result(tmp_path, "mnist-iid-full", 0, 0.9)
    path.write_text(2 * path.read_text())
    with pytest.raises(
        RunError,
        match=r"line 2 \(mnist-iid-full, seed 0\), repeats line 1 of .*; remove one of them",
    ):
        store.load(tmp_path)


def test_results_are_stored_sorted(tmp_path):
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
def test_second_rate_is_the_best_on_held_out_rows(tmp_path, scores, best):
    for rate, score in list(zip(RATES, scores, strict=True))[:-1]:
        write_result(tmp_path, f"mnist-iid-full-rate{rate:g}", 1000, 0.1, validation=score)
    assert results.second_rates(store.load(tmp_path), EVERY) == {}  # one is still missing
    write_result(tmp_path, f"mnist-iid-full-rate{RATES[-1]:g}", 1000, 0.99, validation=scores[-1])
    assert results.second_rates(store.load(tmp_path), EVERY) == ({"mnist": best} if best else {})


def test_source_digest_is_stable():
    afresh = results.source_digest.__wrapped__  # what is kept would be equal to itself
    assert afresh() == afresh()
    assert len(afresh()) == 12
