"""The comparison's machinery: designs have the coverage and the noise they claim, and the tests are
Student's.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from benchmarks.coverage import cells
from benchmarks.coverage.designs import TOLERANCE, designed
from benchmarks.coverage.student import holm, paired_contrast, quantile

from benchmarks import coverage_comparison as comparison
from fedcover.analysis.plan_report import fleet_view
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.evaluation import evaluate
from fedcover.server.round import initial_state, run_round
from fedcover.submodels import coverage

MEDIUM = cells.FLEETS["medium"]


@pytest.fixture(scope="module")
def view():
    return fleet_view(Experiment(dataset="digits", model="mlp(hidden=[16])", fleet=MEDIUM))


@pytest.mark.parametrize(("gamma", "noise"), cells.DESIGNS)
def test_design_has_the_wanted_coverage_noise_and_capacity(view, gamma, noise):
    parts = designed(view, gamma=gamma, noise=noise)
    counts = coverage.count(view.params, parts)
    assert coverage.minimum(counts) == gamma
    weight = view.params["hidden1.weight"]
    masks = [part.mask(view.params)["hidden1.weight"] for part in parts]
    lacking = sum(float(weight[~mask].square().sum()) for mask in masks) / float(
        weight.square().sum()
    )
    assert lacking == pytest.approx(noise, rel=TOLERANCE * 1.01)
    shares = [float(mask.double().mean()) for mask in masks]
    assert shares == pytest.approx([client.capacity for client in view.cohort])


def test_impossible_noise_is_refused(view):
    with pytest.raises(InvalidValue, match="no ranking has noise 9"):
        designed(view, gamma=8, noise=9.0)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706205), (2, 4.302653), (4, 2.776445), (10, 2.228139)]
)
def test_quantiles_equal_tabulated_values(freedom, t):
    assert quantile(0.95, freedom) == pytest.approx(t, abs=1e-6)


def contrast(*differences):
    """What differences of seeds 0, 1, ... say."""
    (result,) = paired_contrast(
        "a", dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)
    )
    return result


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.01, 0.011, 0.012, 0.011, 0.01), "helps"),
        ((-0.01, -0.011, -0.012, -0.011, -0.01), "hurts"),
        ((0.0, 0.001, -0.001, 0.0, 0.0), "no difference"),
        ((0.03, -0.02, 0.01, 0.0, 0.0), "undecided"),
    ],
)
def test_verdicts_follow_the_plan(differences, verdict):
    assert contrast(*differences).verdict(0.005) == verdict


def test_correction_for_many_tests_changes_the_verdict():
    one = contrast(0.01, 0.001, 0.01, 0.009, 0.011)
    assert (one.p < 0.05, one.verdict(0.005)) == (True, "helps")
    assert [c.verdict(0.005) for c in holm([one] * 20)] == ["undecided"] * 20


def test_contrast_needs_two_shared_seeds():
    assert paired_contrast("a", {0: 1.0, 1: 2.0}, {1: 1.0, 2: 1.0}) == []


def test_comparison_plan_counts_its_runs():
    per_part = {
        name: sum(
            len(cell.seeds) + (0 if cell.rate_of or "lr" in cell.fields else len(cells.RATES))
            for wave in waves()
            for cell in wave
        )
        for name, waves in cells.PARTS.items()
    }
    assert per_part == {"grid": 1760, "factorial": 152, "width": 168, "longer": 40, "cifar": 45}
    ids = [
        (cell.id, cell.seeds) for waves in cells.PARTS.values() for wave in waves() for cell in wave
    ]
    assert len(set(ids)) == len(ids)


FIELDS = {
    **cells.SHARED,
    **cells.DATA["digits"],
    "fleet": MEDIUM,
    "policy": "prefix",
    "rounds": 3,
    "epochs": 1,
}
MACHINE = Machine(device="cpu", threads=1).resolved()


def cell(id="grid/x", seeds=(0,), **changes):
    return cells.Cell(id, {**FIELDS, **changes}, seeds=seeds)


def sheet(folder, id="grid/x"):
    return json.loads((folder / f"{id}.json").read_text())


def test_comparison_skips_finished_runs_and_refuses_changed_settings(tmp_path):
    comparison.run_wave([cell()], tmp_path, MACHINE, (0.03, 0.1))
    first = sheet(tmp_path)
    comparison.run_wave([cell(seeds=(0, 1))], tmp_path, MACHINE, (0.03, 0.1))
    second = sheet(tmp_path)
    assert (second["runs"][0], second["tuning"]) == (first["runs"][0], first["tuning"])
    assert [line["seed"] for line in second["runs"]] == [0, 1]
    assert second["lr"] == max(second["tuning"], key=lambda line: line["validation"])["lr"]
    assert {"engine", "hardware", "torch", "commit", "source", "precision"} <= second["made"][
        0
    ].keys()
    assert [line["made"] for line in second["runs"]] == [0, 0]
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(RunError, match="other settings"):
        comparison.run_wave([cell(epochs=2)], tmp_path, MACHINE, (0.03,))
    comparison.main(["--table", "--folder", str(tmp_path)])
    assert "1 cells, 4 runs" in (tmp_path / "README.md").read_text()


def test_comparison_figures_equal_a_single_run(tmp_path):
    """The slow twin: a plain run, round by round, with the model assembled by hand."""
    small_cell = cell(lr=0.1, fleet="1x0.5")  # half of the model is never trained
    comparison.run_wave([small_cell], tmp_path, MACHINE, ())
    (line,) = sheet(tmp_path)["runs"]
    setup = prepare(small_cell.experiment(0, 0.1), MACHINE)
    state, scores = initial_state(setup), []
    for _ in range(3):
        state, report = run_round(setup, state)
        common = replace(
            state, params={n: p * state.coverage.ever[n] for n, p in state.params.items()}
        )
        source = setup.task.source
        scores.append(
            [
                evaluate(setup.task, common, rows).accuracy
                for rows in (source.test, source.validation)
            ]
        )
    test, validation = (sum(column) / 3 for column in zip(*scores, strict=True))
    assert (line["test"], line["validation"]) == (
        pytest.approx(test, abs=2e-3),
        pytest.approx(validation, abs=6e-3),
    )
    assert line["gamma_min"] == 0
    assert line["parameters"] == report.metrics["parameters"]
    assert line["test"] != line["whole"]


def test_cells_in_lockstep_equal_cells_alone(tmp_path):
    wave = [cell("grid/a", policy="planned"), cell("longer/c", lr=0.1, rounds=4)]
    comparison.run_wave(wave, tmp_path / "together", MACHINE, (0.03, 0.1))
    for one in wave:
        comparison.run_wave([one], tmp_path / "alone", MACHINE, (0.03, 0.1))
        together, alone = sheet(tmp_path / "together", one.id), sheet(tmp_path / "alone", one.id)
        assert together["lr"] == alone["lr"]
        for line, other in zip(together["runs"], alone["runs"], strict=True):
            assert line["curve"] == pytest.approx(other["curve"], abs=0.01)
            assert line["test"] == pytest.approx(other["test"], abs=0.01)


def test_comparison_resumes_a_stopped_run(tmp_path, monkeypatch):
    comparison.run_wave([cell(lr=0.1)], tmp_path / "whole", MACHINE, ())

    @contextmanager
    def impatient(title, rounds):
        def stop(report):
            if report.round == 1:
                raise KeyboardInterrupt

        yield stop

    monkeypatch.setattr(comparison, "print_progress", impatient)
    with pytest.raises(KeyboardInterrupt):
        comparison.run_wave([cell(lr=0.1)], tmp_path / "stopped", MACHINE, ())
    monkeypatch.undo()
    (begun,) = (tmp_path / "stopped" / "runs").iterdir()
    assert (begun / "metrics.jsonl").read_text().count("\n") == 2
    comparison.run_wave([cell(lr=0.1)], tmp_path / "stopped", MACHINE, ())
    assert not begun.exists()
    whole, again = (sheet(tmp_path / name)["runs"][0] for name in ("whole", "stopped"))
    assert {**whole, "seconds": 0} == {**again, "seconds": 0}


def test_diverged_run_counts_as_guessing(tmp_path):
    comparison.run_wave([cell()], tmp_path, MACHINE, (100_000, 0.1))
    wild, calm = sheet(tmp_path)["tuning"]
    assert (wild["diverged"], wild["test"], wild["validation"]) == (True, 0.1, 0.1)
    assert "diverged" not in calm
    assert sheet(tmp_path)["lr"] == 0.1


def test_learning_rate_of_another_cell_must_exist(tmp_path):
    follower = replace(cell("factorial/y"), rate_of="grid/x")
    with pytest.raises(
        RunError, match=r"factorial/y has the learning rate of grid/x, .*: run that first"
    ):
        comparison.run_wave([follower], tmp_path, MACHINE, (0.1,))
    comparison.run_wave([cell(lr=0.07)], tmp_path, MACHINE, ())
    comparison.run_wave([follower], tmp_path, MACHINE, ())
    assert [line["lr"] for line in sheet(tmp_path, "factorial/y")["runs"]] == [0.07]
