"""The command that plans a fleet: plan."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.analysis.plan_plot import plot as draw_plan
from fedcover.analysis.plan_report import plan_report
from fedcover.cli import conclusions, console
from fedcover.cli.options import Data, Json, MaybeWhole, Whole, add_working_folder_to_path, app
from fedcover.cli.trust import Trust, is_trusted
from fedcover.runs.api import load
from fedcover.runs.experiment import Experiment


@app.command
def plan(
    *,
    fleet: Annotated[
        str, Parameter(help='Devices and their capacities, such as "4x1.0 + 6x0.75".')
    ],
    model: str = "mlp",
    dataset: Annotated[
        str, Parameter(help="Data set that sets input shape and number of classes.")
    ] = "mnist",
    kind: Annotated[
        str, Parameter(help="What is planned: subnet (units) or pruning (single weights).")
    ] = "subnet",
    gamma: Annotated[MaybeWhole, Parameter(help="Coverage that every unit must have.")] = None,
    tolerate: Annotated[
        Whole,
        Parameter(help="Number of clients that may drop out: coverage is planned one higher."),
    ] = 0,
    window: Annotated[
        Whole, Parameter(help="Number of rounds over which coverage is also counted.")
    ] = 10,
    capacity: Annotated[
        str, Parameter(help="What a capacity is a share of: width or parameters.")
    ] = "width",
    weights: Annotated[
        Path | None, Parameter(help="A run folder: plan for its current weights.")
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="Plot the frontier to this file (needs fedcover[plot]).")
    ] = None,
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Plan what each device of a fleet holds, and compare the plan with other policies."""
    add_working_folder_to_path()
    params = None
    if weights is not None:
        run = load(weights, data=data, trust=is_trusted(weights, trust))
        params = run.state.params
    experiment = Experiment(dataset=dataset, model=model, fleet=fleet, capacity=capacity)
    report = plan_report(
        experiment, gamma=gamma, tolerate=tolerate, window=window, kind=kind, params=params
    )
    if plot is not None:
        draw_plan(report, plot)
    if json:
        return console.show_json(report)
    print(f"{model} on {dataset}, {kind}, fleet {report['fleet']}")
    _show_frontier(report)
    _show_policies(report, window)
    _show_assignment(report)
    _show_chosen_plan(report, window, tolerate)
    return print(f"conclusion: {conclusions.of_plan(report)}")


def _show_frontier(report: dict[str, Any]) -> None:
    if report["exact"]:
        title, columns = "frontier (exact)", ["gamma", "noise"]
    else:
        title = "frontier: times that every unit is held"
        columns = ["units", "gamma", "gamma_window", "noise"]
    rows = [[point[column] for column in columns] for point in report["frontier"]]
    console.table(title, columns, rows)


def _show_policies(report: dict[str, Any], window: int) -> None:
    columns = ["policy", "coverage", f"over {window} rounds", "noise (sum over devices)"]
    rows = [
        [name, coverage["gamma"], coverage["gamma_window"], coverage["noise"]]
        for name, coverage in report["policies"].items()
    ]
    console.table("comparison of policies", columns, rows)


def _show_assignment(report: dict[str, Any]) -> None:
    """Print the devices of the plan; those with equal numbers share a row."""
    device_counts = Counter(
        (device["capacity"], device["parameters"], float(f"{device['noise']:.4g}"))
        for device in report["assignment"]
    )
    rows = [[count, *numbers] for numbers, count in device_counts.items()]
    console.table("the plan", ["devices", "capacity", "parameters", "noise"], rows)
    print("to see which units each device holds: --json, assignment, holds")


def _show_chosen_plan(report: dict[str, Any], window: int, tolerate: int) -> None:
    plan_line = report["chosen"]
    print(
        f"chosen: coverage {plan_line['gamma']} in a round (at most {report['upper_bound']}"
        f" is possible: {report['limited_by']}), noise {plan_line['noise']:.4g}"
    )
    if not report["exact"]:
        rounds = report["rounds_to_cover"]
        when = f"after {rounds} rounds" if rounds else f"not within {window} rounds"
        print(
            f"units are held {plan_line['units']} times per round;"
            f" {tolerate + 1} clients have had every parameter {when}"
        )
    if report["copies"] > 1:
        print(
            "no device holds the whole model: a run with policy planned trains the largest"
            f" device's model and makes {report['copies']} copies of it;"
            " the plan above is planned(copies=false)"
        )
