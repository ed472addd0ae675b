"""The two tables of the paper's appendix, worked out anew, and audits of fleets."""

import numpy as np
import pytest

from fedcover.analysis.audit import audit, audit_codename, codename
from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from tests.helpers.paper_tables import PRUNING, SUBNET


@pytest.mark.parametrize("digits", PRUNING)
def test_audit_reproduces_the_pruning_table(digits):
    parameters, multiply_adds, gamma, gamma_printed = PRUNING[digits]
    audit_result = audit_codename(digits, "pruning")
    assert (
        audit_result["parameters"],
        audit_result["multiply_adds"],
        audit_result["gamma_min"],
    ) == (
        parameters,
        multiply_adds,
        gamma,
    )
    assert min(audit_result["coverage"].values()) == gamma
    printed = audit_codename(digits, "pruning", "printed")
    assert (printed["parameters"], printed["multiply_adds"]) == (parameters, multiply_adds)
    assert printed["gamma_min"] == min(printed["coverage"].values()) == gamma_printed


@pytest.mark.parametrize("digits", SUBNET)
def test_audit_reproduces_the_sub_network_table(digits):
    parameters, multiply_adds, gamma = SUBNET[digits]
    audit_result = audit_codename(digits, "subnet")
    assert (
        audit_result["parameters"],
        audit_result["multiply_adds"],
        audit_result["gamma_min"],
    ) == (
        parameters,
        multiply_adds,
        gamma,
    )
    assert min(audit_result["coverage"].values()) == gamma


def test_region_coverage_is_that_of_its_weights():
    audit_result = audit_codename("1444777777", "pruning")
    assert audit_result["coverage"] == {"S1": 10, "S2": 10, "S3": 4, "S4": 1}
    assert audit_result["histogram"] == {"1": 39_200, "4": 39_200, "10": 159_010 - 78_400}
    assert (audit_result["codename"], audit_result["kind"], audit_result["model"]) == (
        "1444777777",
        "pruning",
        "mlp",
    )


def test_codename_gives_an_experiment():
    audit_result = codename("1477", "subnet")
    assert (audit_result.fleet, audit_result.assignment, audit_result.active) == (
        "1x1 + 1x0.75 + 2x0.5",
        "slot",
        4,
    )
    assert codename("1" * 200, "pruning").clients == 200


@pytest.mark.parametrize("wrong", ["", "1118", "0111", "11a1", "11 11", "\u0661\u0661"])
def test_invalid_codenames_are_refused(wrong):
    with pytest.raises(InvalidValue, match=r"^codename must consist of digits 1 to 7"):
        audit_codename(wrong, "pruning")


def test_unknown_kinds_and_variants_are_refused():
    with pytest.raises(InvalidValue, match=r"^kind must be one of pruning, subnet; got 'x'$"):
        audit_codename("1111", "x")
    with pytest.raises(InvalidValue, match=r"^p5 must be one of code, printed; got 'x'$"):
        audit_codename("1111", "pruning", "x")


CASES = {
    "mlp": ("mlp", "mnist"),
    "cnn": ("cnn", "mnist"),
    "wide_resnet": ("wide_resnet(depth=10, widen=1)", "cifar10"),
    "preact_resnet18": ("preact_resnet18(width=8)", "cifar100"),
}


@pytest.mark.parametrize("policy", ["prefix", "rolling", "magnitude"])
@pytest.mark.parametrize("model", CASES)
def test_audit_of_fleets_with_each_policy(model, policy):
    spec, dataset = CASES[model]
    audit_result = audit(
        Experiment(model=spec, dataset=dataset, fleet="1x1.0 + 2x0.5 + 3x0.25", policy=policy)
    )
    rows = audit_result["capacities"]
    assert [(row["capacity"], row["devices"]) for row in rows] == [(1.0, 1), (0.5, 2), (0.25, 3)]
    for key in ("parameters", "multiply_adds", "bytes_up"):
        assert [row[key] for row in rows] == sorted((row[key] for row in rows), reverse=True)
        assert rows[0][key] > rows[2][key]
    assert audit_result["gamma_min"] == 1
    assert sum(audit_result["histogram"].values()) == rows[0]["parameters"]
    mean = sum(row["devices"] * row["parameters"] for row in rows) / 6
    assert audit_result["parameters"] == pytest.approx(mean)
    assert rows[0]["delta2"] == 0.0
    assert 0 < rows[1]["delta2"] < rows[2]["delta2"] < 1
    memory = [row["memory"] for row in rows]
    assert len(set(memory)) == (1 if policy == "magnitude" else 3)
    assert all(row["bytes_down"] > row["bytes_up"] == 4 * row["parameters"] for row in rows)


def test_capacity_in_parameters_is_never_exceeded():
    for policy in ("prefix", "magnitude"):
        fleet = "1x0.75 + 1x0.5 + 1x0.4"
        audit_result = audit(
            Experiment(
                model="mlp", dataset="mnist", fleet=fleet, policy=policy, capacity="parameters"
            )
        )
        for row in audit_result["capacities"]:
            budget = row["capacity"] * 159_010
            assert budget - 795 < row["parameters"] <= budget  # one more unit would be too much


def test_fleet_without_large_device_leaves_parameters_uncovered():
    audit_result = audit(Experiment(model="mlp", dataset="mnist", fleet="6x0.5", policy="prefix"))
    assert audit_result["gamma_min"] == 0
    assert audit_result["histogram"] == {"0": 100 * 795, "6": 100 * 795 + 10}
    spread = audit(
        Experiment(model="mlp", dataset="mnist", fleet="6x0.5", policy="rolling(spread=true)")
    )
    assert spread["gamma_min"] == 3


def test_audit_uses_the_experiments_batch_size():
    small, large = (
        audit(Experiment(model="mlp", dataset="mnist", batch_size=size))["capacities"][0]["memory"]
        for size in (10, 20)
    )
    assert large > small


def test_data_of_unknown_shape_cannot_be_audited():
    with pytest.raises(InvalidValue, match=r"^dataset must be one of digits, .*; got 'emnist'"):
        audit(Experiment(dataset="emnist"))


def test_own_data_file_can_be_audited(tmp_path):
    rows = {
        "train_x": np.zeros((8, 3, 5, 5), np.float32),
        "test_x": np.zeros((2, 3, 5, 5), np.float32),
    }
    np.savez(tmp_path / "mine.npz", **rows, train_y=np.arange(8) % 4, test_y=np.array([0, 1]))
    audit_result = audit(
        Experiment(dataset=str(tmp_path / "mine.npz"), fleet="1x1", policy="prefix")
    )
    assert audit_result["parameters"] == 75 * 200 + 200 + 200 * 4 + 4


def test_audit_of_planned_describes_its_first_round():
    fields = {"dataset": "digits", "model": "mlp(hidden=[8, 8])", "fleet": "2x0.5"}
    first = {
        policy: audit(Experiment(**fields, policy=policy))["histogram"]
        for policy in ("planned", "prefix")
    }
    assert first["planned"] == first["prefix"]
    assert (
        audit(Experiment(**fields, policy="planned(copies=false)"))["histogram"] != first["prefix"]
    )
