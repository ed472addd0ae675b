"""The report of a plan: the frontier, the choice and the comparison, as JSON and as a picture."""

import json
import sys

import numpy as np
import pytest

from fedcover.analysis.plan_plot import plot
from fedcover.analysis.plan_report import codename_of_capacities, fleet_view, plan_report
from fedcover.errors import FedcoverError, InvalidValue
from fedcover.runs.experiment import Experiment


def report(fleet="4x1.0 + 6x0.75", model="mlp(hidden=[16])", **options):
    experiment = Experiment(dataset="digits", model=model, fleet=fleet, window=3)
    return plan_report(experiment, **options)


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize(
    ("fleet", "largest", "by_hand"),
    [("6x1 + 4x0.75", 9, 8), ("4x1 + 6x0.75", 8, 8), ("1x1 + 3x0.75 + 6x0.5", 6, 5)],
)
def test_plan_report_of_the_papers_fleets(fleet, largest, by_hand, kind):
    plan = report(fleet, kind=kind)
    assert plan["gamma_max"] == largest == plan["frontier"][-1]["gamma"]
    assert [point["gamma"] for point in plan["frontier"]] == list(range(largest + 1))
    noises = [point["noise"] for point in plan["frontier"]]
    assert (np.diff(noises, 2) >= -1e-9).all()
    (design,) = [
        figures for name, figures in plan["policies"].items() if name.startswith("codename")
    ]
    assert design["gamma"] == by_hand
    assert noises[by_hand] <= design["noise"] + 1e-9
    assert plan["policies"]["greedy"]["noise"] == pytest.approx(noises[0])
    assert all(
        figures["noise"] >= noises[figures["gamma"]] - 1e-9 for figures in plan["policies"].values()
    )


@pytest.mark.parametrize("wish", [{}, {"gamma": 7}, {"tolerate": 5}, {"gamma": 3, "tolerate": 6}])
def test_chosen_plan_lies_on_the_frontier(wish):
    plan = report(**wish)
    chosen = plan["chosen"]
    assert chosen["noise"] == pytest.approx(plan["frontier"][chosen["gamma"]]["noise"])
    assert chosen["gamma"] >= max(wish.get("gamma", 1), wish.get("tolerate", 0) + 1)
    assert plan["policies"]["planned"]["noise"] == chosen["noise"]
    assert sum(line["noise"] for line in plan["assignment"]) == pytest.approx(chosen["noise"])


def test_plan_report_is_json_with_documented_keys():
    output = json.loads(json.dumps(report()))
    assert {"gamma_max", "frontier", "chosen", "policies"} <= output.keys()
    assert {"prefix", "rolling", "random", "greedy", "planned"} <= output["policies"].keys()
    for point in [*output["frontier"], output["chosen"], *output["policies"].values()]:
        assert {"gamma", "noise"} <= point.keys()


def test_plan_report_of_meeting_groups_names_round_and_window():
    plan = report("4x0.5 + 6x0.25", model="mlp(hidden=[16, 16])", kind="subnet")
    assert not plan["exact"]
    assert (
        plan["upper_bound"] == plan["gamma_max"] == 1
    )  # 4/4 + 6/16 of the weights between the layers
    assert plan["limited_by"] == "hidden2.weight"
    assert plan["distance"] == 1 - plan["chosen"]["gamma"]
    windows = [point["gamma_window"] for point in plan["frontier"]]
    assert windows == sorted(windows)
    assert [point["units"] for point in plan["frontier"]] == [0, 1, 2, 3]
    assert plan["chosen"]["units"] == 1
    assert "codename" not in " ".join(plan["policies"])


def test_plan_report_takes_weights_of_a_run():
    experiment = Experiment(
        dataset="digits", model="mlp(hidden=[16])", fleet="2x1 + 2x0.5", window=1
    )
    fresh = plan_report(experiment)
    weights = {name: tensor.clone() for name, tensor in fleet_view(experiment).params.items()}
    weights["hidden1.weight"][0] *= 100
    assert plan_report(experiment, params=weights)["chosen"]["noise"] < fresh["chosen"]["noise"]
    with pytest.raises(InvalidValue, match="the weights do not belong to model"):
        plan_report(experiment, params={"hidden1.weight": weights["hidden1.weight"]})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"gamma": 9},
            "^gamma must be at most 8 .*room for 136 units of 'hidden1', which has 16.*; got 9",
        ),
        ({"tolerate": 8}, "tolerate must be at most 7: 8 drop-outs need coverage 9"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"kind": "units"}, "kind must be one of subnet, pruning; got 'units'"),
        ({"fleet": "2000x1"}, "at most 1,000 devices; got 2,000"),
    ],
)
def test_impossible_plans_are_refused(wrong, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        report(**wrong)


def test_unknown_data_set_is_refused():
    with pytest.raises(InvalidValue, match=r"dataset must be one of .*did you mean 'synthetic'"):
        plan_report(Experiment(dataset="synthetics"))


def test_plan_report_for_synthetic_and_own_data(tmp_path):
    pixels = np.zeros((40, 1, 6, 6), np.float32)
    labels = np.arange(40) % 3
    np.savez(tmp_path / "own.npz", train_x=pixels, train_y=labels, test_x=pixels, test_y=labels)
    for dataset in ("synthetic(shape=[1, 6, 6], classes=3)", str(tmp_path / "own.npz")):
        plan = plan_report(Experiment(dataset=dataset, fleet="1x1 + 2x0.5"))
        assert plan["assignment"][0]["parameters"] == 36 * 200 + 200 + 200 * 3 + 3


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0] * 6 + [0.75] * 4, "1111112344"),
        ([1.0] * 4 + [0.75] * 6, "1111223344"),
        ([1.0] + [0.75] * 3 + [0.5] * 6, "1234556677"),
        ([1.0, 0.25], None),
    ],
)
def test_codename_of_capacities_by_hand(shares, expected):
    assert codename_of_capacities(shares) == expected


def test_plan_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FedcoverError, match=r"pip install '\.\[plot\]'"):
        plot({}, tmp_path / "plan.png")


@pytest.mark.parametrize("model", ["mlp(hidden=[16])", "mlp(hidden=[16, 16])"])
def test_plan_plot_is_drawn(tmp_path, model):
    pytest.importorskip("matplotlib")
    plot(report(model=model), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_plan_report_lists_units_of_each_client():
    plan = plan_report(
        Experiment(dataset="digits", model="mlp(hidden=[16])", fleet="2x1.0 + 2x0.5"),
        gamma=3,
        window=1,
    )
    units_by_client = [
        {u for first, last in line["holds"]["hidden1"] for u in range(first, last + 1)}
        for line in plan["assignment"]
    ]
    assert [len(units) for units in units_by_client] == [16, 16, 8, 8]
    assert all(sum(unit in units for units in units_by_client) >= 3 for unit in range(16))
    weights = plan_report(
        Experiment(dataset="digits", fleet="1x1.0 + 1x0.5"), kind="pruning", window=1
    )["assignment"]
    assert [line["holds"]["hidden1.weight"] for line in weights] == [12_800, 6_400]
