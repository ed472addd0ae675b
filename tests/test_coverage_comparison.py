"""The comparison's machinery: designs have the coverage and the noise they claim, and the tests are Student's."""

import json

import pytest
from benchmarks.coverage import cells
from benchmarks.coverage.designs import TOLERANCE, designed
from benchmarks.coverage.student import holm, minus, quantile
from benchmarks.coverage_comparison import main, run_cell

from fedcover import coverage
from fedcover.errors import InvalidValue
from fedcover.experiment import Experiment
from fedcover.planning import fleet_view
from fedcover.preparation import Machine

MEDIUM = cells.FLEETS["medium"]


@pytest.fixture(scope="module")
def view():
    return fleet_view(Experiment(dataset="digits", model="mlp(hidden=[16])", fleet=MEDIUM))


@pytest.mark.parametrize(("gamma", "noise"), cells.DESIGNS)
def test_a_design_has_its_coverage_its_noise_and_its_capacity(view, gamma, noise):
    parts = designed(view, gamma=gamma, noise=noise)
    counts = coverage.count(view.params, parts)
    assert coverage.minimum(counts) == gamma
    weight = view.params["hidden1.weight"]
    masks = [part.mask(view.params)["hidden1.weight"] for part in parts]
    lacking = sum(float(weight[~mask].square().sum()) for mask in masks) / float(weight.square().sum())
    assert lacking == pytest.approx(noise, rel=TOLERANCE * 1.01)
    shares = [float(mask.double().mean()) for mask in masks]
    assert shares == pytest.approx([client.capacity for client in view.cohort])


def test_an_impossible_noise_is_refused(view):
    with pytest.raises(InvalidValue, match="no ranking has noise 9"):
        designed(view, gamma=8, noise=9.0)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706205), (2, 4.302653), (4, 2.776445), (10, 2.228139)])
def test_quantiles_are_those_of_the_tables(freedom, t):
    assert quantile(0.95, freedom) == pytest.approx(t, abs=1e-6)


def contrast(*differences):
    """What differences of seeds 0, 1, ... say."""
    (found,) = minus("a", dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    return found


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


def test_the_correction_counts_in_a_verdict():
    one = contrast(0.01, 0.001, 0.01, 0.009, 0.011)
    assert (one.p < 0.05, one.verdict(0.005)) == (True, "helps")
    assert [c.verdict(0.005) for c in holm([one] * 20)] == ["undecided"] * 20


def test_a_contrast_needs_two_shared_seeds():
    assert minus("a", {0: 1.0, 1: 2.0}, {1: 1.0, 2: 1.0}) == []


def test_the_plan_counts_its_runs_rightly():
    per_part = {
        name: sum(
            len(cell.seeds) + (0 if cell.rate_of or "lr" in cell.fields else len(cells.RATES))
            for wave in waves()
            for cell in wave
        )
        for name, waves in cells.PARTS.items()
    }
    assert per_part == {"grid": 1760, "factorial": 152, "width": 168, "longer": 40, "cifar": 40}
    ids = [(cell.id, cell.seeds) for waves in cells.PARTS.values() for wave in waves() for cell in wave]
    assert len(set(ids)) == len(ids)


def test_a_stopped_comparison_goes_on_and_changed_settings_are_refused(tmp_path):
    fields = {**cells.SHARED, **cells.DATA["digits"], "fleet": MEDIUM, "policy": "prefix", "rounds": 3, "epochs": 1}
    cell = cells.Cell("grid/x", fields, seeds=(0,))
    machine = Machine(device="cpu").resolved()
    run_cell(cell, tmp_path, machine, (0.03, 0.1))
    first = json.loads((tmp_path / "grid" / "x.json").read_text())
    run_cell(cells.Cell("grid/x", fields, seeds=(0, 1)), tmp_path, machine, (0.03, 0.1))
    second = json.loads((tmp_path / "grid" / "x.json").read_text())
    assert second["runs"][0] == first["runs"][0]
    assert [line["seed"] for line in second["runs"]] == [0, 1]
    assert second["lr"] == max(second["tuning"], key=lambda line: line["validation"])["lr"]
    with pytest.raises(SystemExit, match="other settings"):
        run_cell(cells.Cell("grid/x", {**fields, "epochs": 2}), tmp_path, machine, (0.03,))
    main(["--table", "--folder", str(tmp_path)])
    assert "1 cells, 4 runs" in (tmp_path / "README.md").read_text()
