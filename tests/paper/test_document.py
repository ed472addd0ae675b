"""The document on the reproduction, its tables and its figures."""

import sys
from xml.etree import ElementTree

import pytest

from fedcover.paper import comparisons, document, figures, store
from fedcover.paper.cells import RATES
from fedcover.paper.evidence import Evidence
from tests.helpers.command_line import refused
from tests.helpers.paper_results import BY_ID, change_result, write_result
from tests.helpers.repository import ROOT


def test_committed_document_equals_the_generated_one():
    evidence = Evidence(ROOT / "results" / "reproduction")
    assert (ROOT / "docs" / "reproduction.md").read_text() == document.render(evidence)


def test_committed_figures_show_what_would_be_drawn():
    """Their bytes depend on the version of matplotlib, what they show does not."""
    committed = {path.stem: path for path in (ROOT / "docs" / "reproduction").glob("*.svg")}
    runs_by_figure = figures.runs_by_figure(Evidence(ROOT / "results" / "reproduction"))
    assert set(committed) == set(runs_by_figure)
    for name, runs in runs_by_figure.items():
        svg = ElementTree.parse(committed[name])
        digest = figures.data_digest(figures.FIGURES[name].title, runs)
        assert texts(svg, "description") == [f"data {digest}"]
        assert {design for design, metrics in runs.items() if metrics} <= {*texts(svg, "text")}


def texts(svg, tag):
    return [element.text for element in svg.iter() if element.tag.endswith(f"}}{tag}")]


def test_other_results_have_another_digest(tmp_path):
    write_result(tmp_path, "mnist-iid-full", 0, 0.98)
    before = digest_of(tmp_path, "pruning-iid")
    write_result(tmp_path, "mnist-iid-full", 1, 0.97)
    assert digest_of(tmp_path, "pruning-iid") != before
    assert digest_of(tmp_path, "subnet-iid") != digest_of(tmp_path, "pruning-iid")


def digest_of(results, name):
    runs = figures.runs_by_figure(Evidence(results))[name]
    return figures.data_digest(figures.FIGURES[name].title, runs)


def test_committed_results_belong_to_current_cells():
    evidence = Evidence(ROOT / "results" / "reproduction")
    results_of_cells = {
        (run["cell"], run["seed"]) for runs in evidence.results.values() for run in runs
    }
    assert results_of_cells == set(evidence.records)
    assert evidence.orphan_results() == []


def test_document_shows_claims_results_and_missing_runs(tmp_path):
    for seed in range(3):
        write_result(tmp_path, "mnist-iid-pruning-1111444444", seed, 0.97 + 0.001 * seed)
        write_result(tmp_path, "mnist-iid-pruning-1111223344", seed, 0.98 + 0.001 * seed)
        write_result(tmp_path, "mnist-L2-full", seed, 0.936, local=0.9)
    write_result(tmp_path, "mnist-iid-full", 0, 0.98)
    text = document.render(Evidence(tmp_path))
    assert "{{" not in text
    greedy = (
        "97.51 | 97.10 ± 0.10 | 72.82 ± 0.07 | "
        "97.10 ± 0.10 | 3 | lower"
    )  # 48.55 after the first of two rounds
    assert f"| medium | pruning-greedy | pruning-1111444444 | 4 | 6 | {greedy} |" in text
    assert "| full | full | full | 10 | 6 | 98.08 | 98.00 | 73.50 | 98.00 | 1 | one seed |" in text
    assert "| MNIST IID | 98.08 | 98.00 | 73.50 | 34.65 | -24.58 |" in text
    assert "More than 5 points away: MNIST IID, MNIST L=2." in text
    assert "- MNIST: 4 of 60 cells of the main table have runs." in text
    assert "- CIFAR-10: 0 of 48 cells of the main table have runs.\n" in text
    assert (
        "| 1111111111 | 98.045 | 98.00 | one seed | 93.59 | 93.60 ± 0.00 "
        "| higher | 93.82 | 90.00 ± 0.00 |"
    ) in text
    assert (
        "1 of 60 comparisons have runs. The optimised design is: 1 higher, 0 lower, 0 undecided."
        in text
    )
    both = (
        "6 / 6 | 0.100 / 0.100 | +0.88 | +1.00 ± 0.00 | 3 | 0.000 | "
        "higher | +0.75 ± 0.00 | 2.0 / 2.0"
    )
    assert f"| {both} |" in text
    assert "not run" in text
    assert "MNIST, L=2, medium level: loss and accuracy" in text
    assert "MNIST, L=2, fixed sub-networks: loss" in text  # FedAvg is in it


def test_rounds_to_a_target_accuracy(tmp_path):
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


def test_chart_of_many_lines_has_no_bands():
    def bands(number):
        runs = [[{"round": 0, "loss": 1.0, "accuracy": share}] for share in (0.1, 0.2)]
        figure = figures.draw("title", {f"line {n}": runs for n in range(number)})
        return [len(axes.collections) for axes in figure.axes]

    assert (bands(8), bands(9)) == ([8, 8], [0, 0])


def test_few_far_points_do_not_flatten_the_curves():
    losses = [50.0, *[1.0] * 10, 0.5]
    lines = [
        {"round": n, "loss": loss, "accuracy": 1 / (1 + loss)} for n, loss in enumerate(losses)
    ]
    loss, accuracy = figures.draw("title", {"full": [lines]}).axes
    assert loss.get_ylim() == pytest.approx((0.475, 1.025))
    assert accuracy.get_ylim() == pytest.approx((0.5 - 1 / 120, 2 / 3 + 1 / 120))


def test_document_counts_the_sources_of_runs(tmp_path):
    for seed, commit in enumerate((None, "abc-dirty", "abc")):
        write_result(tmp_path, "mnist-iid-full", seed, 0.9)
        origin = store.load(tmp_path)["mnist-iid-full", seed].result["made"]
        change_result(tmp_path, BY_ID["mnist-iid-full"], seed, made={**origin, "commit": commit})
    source = (
        "1 runs were made from a commit, 1 from one with changes "
        "beside it, 1 from a copy without git"
    )
    assert source in document.provenance_table(Evidence(tmp_path))


def test_document_ranks_designs_at_the_second_rate(tmp_path):
    for rate, score in zip(RATES, (0.8, 0.9, 0.95, 0.5), strict=True):
        write_result(tmp_path, f"mnist-iid-full-rate{rate:g}", 1000, 0.1, validation=score)
    assert (
        comparisons.second_rate_block(Evidence(tmp_path))
        == "No comparison at a second learning rate has runs."
    )
    for design, accuracy in (("1111444444", 0.97), ("1111223344", 0.96)):
        write_result(tmp_path, f"mnist-iid-pruning-{design}-lr0.1", 0, accuracy)
    block = comparisons.second_rate_block(Evidence(tmp_path))
    assert (
        "0 higher, 0 lower, 0 undecided, 1 with one seed, no verdict (0 above, 1 below)." in block
    )
    assert "| -1.00 | 1 |  | one seed | -0.75 |" in block


def test_docs_command_writes_document_and_figures(fedcover, tmp_path):
    for seed in range(2):
        write_result(tmp_path / "mine", "mnist-iid-full", seed, 0.98)
        write_result(tmp_path / "mine", "mnist-iid-homogeneous-0.5", seed, 0.9)
    code, out, err = fedcover("reproduce", "docs", "--out", "mine", "--docs", "pages")
    assert (code, err) == (0, "")
    assert out.split() == [
        "pages/reproduction.md",
        *(f"pages/reproduction/{name}-iid.svg" for name in ("medium", "pruning", "subnet")),
    ]
    drawn = ElementTree.parse(tmp_path / "pages" / "reproduction" / "medium-iid.svg")
    assert texts(drawn, "text").count("homogeneous-0.5") == 1


def test_loss_of_a_model_that_is_trained_in_part_only_is_not_shown(tmp_path):
    for design in ("full", "homogeneous-0.5"):
        write_result(tmp_path, f"mnist-iid-{design}", 0, 0.9)
    runs = figures.runs_by_figure(Evidence(tmp_path))["medium-iid"]
    lines_by_panel = [
        [line.get_label() for line in axes.lines] for axes in figures.draw("title", runs).axes
    ]
    assert lines_by_panel == [["full"], ["full", "homogeneous-0.5"]]


@pytest.mark.parametrize("what", ["docs", "figures"])
def test_figures_need_matplotlib(fedcover, tmp_path, monkeypatch, what):
    write_result(tmp_path / "mine", "mnist-iid-full", 0, 0.98)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    refused(fedcover("reproduce", what, "--out", "mine"), 1, "a plot needs matplotlib")
    assert not (tmp_path / "docs").exists()


def test_figures_are_deterministic_and_well_formed(tmp_path):
    write_result(tmp_path, "mnist-iid-full", 0, 0.98)
    first, second = (figures.draw_figures(Evidence(tmp_path)) for _ in range(2))
    assert first == second
    assert set(first) == {"medium-iid", "pruning-iid", "subnet-iid"}
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in first.values())
