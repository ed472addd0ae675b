"""Commands that look and compute: list, audit, plan, explain."""

import sys
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.analysis.audit import audit as audit_fleet
from fedcover.analysis.audit import audit_codename
from fedcover.analysis.plan_report import plan_report
from fedcover.analysis.plan_report import plot as draw_plan
from fedcover.cli import conclusions, console
from fedcover.cli.options import Data, Json, MaybeWhole, Whole, add_working_folder_to_path, app
from fedcover.cli.trust import Trust, is_trusted
from fedcover.data import datasets
from fedcover.data.client_data import RemoteData, SyntheticData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue, unknown
from fedcover.models import MODELS
from fedcover.paper.explain import explain as explain_code
from fedcover.paper.tables import audit_tables
from fedcover.policies import POLICIES
from fedcover.registry import options_of
from fedcover.runs.api import load
from fedcover.runs.experiment import Experiment
from fedcover.runs.presets import PRESETS
from fedcover.server.aggregation import RULES
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY
from fedcover.training.engines import ENGINES
from fedcover.training.recipes import RECIPES
from fedcover.training.schedules import SCHEDULES

TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "policies": dict(POLICIES),
    "models": dict(MODELS),
    "datasets": {**datasets.DATASETS, "synthetic": SyntheticData},
    "partitions": {**PARTITIONS, "nodes": RemoteData},
    "engines": dict(ENGINES),
    "recipes": dict(RECIPES),
    "rules": dict(RULES),
    "servers": dict(SERVERS),
    "schedules": dict(SCHEDULES),
    "privacy": dict(PRIVACY),
}

FILLED_IN_OPTIONS = ("seed", "device", "precision", "make")
"""Options that the program fills in, or that have a name of their own on the command line."""


@app.command(name="list")
def list_(
    kind: Annotated[str, Parameter(help=f"{', '.join([*TABLES, 'presets'])}.")],
    *,
    json: Json = False,
) -> None:
    """What there is of one kind, with options and a line about each."""
    if kind == "presets":
        return _list_presets(json)
    if kind not in TABLES:
        raise unknown("list", kind, [*TABLES, "presets"])
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "options": {
                option: "required" if p.default is p.empty else p.default
                for option, p in options_of(function).items()
                if option not in FILLED_IN_OPTIONS
            },
            "about": (getdoc(function) or "").partition("\n\n")[0].replace("\n", " "),
        }
        for name, function in TABLES[kind].items()
    ]
    if json:
        return console.show_json(entries)
    rows = [
        [e["name"], ", ".join(f"{k}={v!r}" for k, v in e["options"].items()), e["about"]]
        for e in entries
    ]
    console.table(kind, ["name", "options", "about"], rows)
    return None


def _list_presets(json: bool) -> None:
    """The named systems, and in which fields each differs from the defaults."""
    entries = [
        {"name": name, "sets": dict(preset.changed), "about": preset.about}
        for name, preset in PRESETS.items()
    ]
    if json:
        return console.show_json(entries)
    rows = [
        [
            name,
            preset.about,
            ", ".join(f"{field} = {value}" for field, value in preset.changed.items()),
        ]
        for name, preset in PRESETS.items()
    ]
    console.table("presets", ["name", "about", "sets"], rows)
    return None


AUDIT_DEFAULTS = {
    "kind": "pruning", "p5": "code", "fleet": "1x1.0 + 1x0.5 + 1x0.25", "policy": "prefix", "capacity": "width",
    "model": "mlp", "dataset": "mnist", "batch_size": 10,
}  # fmt: skip
"""What an audit takes where nothing is said."""


@app.command
def audit(
    codename: Annotated[
        str | None,
        Parameter(
            help="Digits 1 to 7, one per slot, as in the paper; or 'paper': both of its tables."
        ),
    ] = None,
    *,
    kind: Annotated[
        str | None, Parameter(help="With a codename: pruning (by default) or subnet.")
    ] = None,
    p5: Annotated[
        str | None,
        Parameter(help="With a codename: P5 as in the paper's code (by default), or as printed."),
    ] = None,
    fleet: Annotated[
        str | None, Parameter(help='Without a codename, such as "4x1.0 + 6x0.5".')
    ] = None,
    policy: Annotated[str | None, Parameter(help="Without a codename; prefix by default.")] = None,
    capacity: Annotated[
        str | None,
        Parameter(
            help="Without a codename: what a capacity is a share of, width (by default) or parameters."
        ),
    ] = None,
    model: Annotated[str | None, Parameter(help="mlp by default.")] = None,
    dataset: Annotated[
        str | None, Parameter(help="Whose input shape and classes to take; mnist by default.")
    ] = None,
    batch_size: Annotated[MaybeWhole, Parameter(help="10 by default.")] = None,
    json: Json = False,
) -> None:
    """Does this fit my device: parameters, multiply-adds, memory and traffic per capacity; and what is covered."""
    add_working_folder_to_path()
    options = {
        "kind": kind, "p5": p5, "fleet": fleet, "policy": policy, "capacity": capacity, "model": model,
        "dataset": dataset, "batch_size": batch_size,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    _check_ignored_options(codename, given)
    if codename == "paper":
        return _audit_paper(json)
    found = _run_audit(codename, {**AUDIT_DEFAULTS, **given})
    return (
        console.show_json(found)
        if json
        else _show_audit(found, codename, {**AUDIT_DEFAULTS, **given})
    )


def _check_ignored_options(codename: str | None, given: dict[str, Any]) -> None:
    if codename == "paper":
        ignored, why = list(given), "'paper' is an audit of the paper's own tables"
    elif codename is not None:
        ignored, why = ["fleet", "policy", "capacity"], "a codename brings its own fleet and policy"
    else:
        ignored, why = ["kind", "p5"], "kind and p5 are about a codename"
    if wrong := [f"--{name.replace('_', '-')}" for name in ignored if name in given]:
        raise InvalidValue(f"{why}: leave {' and '.join(wrong)} out")


def _run_audit(codename: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    fields = {name: chosen[name] for name in ("model", "dataset", "batch_size")}
    if codename is not None:
        return audit_codename(codename, chosen["kind"], chosen["p5"], **fields)
    return audit_fleet(
        Experiment(**fields, **{name: chosen[name] for name in ("fleet", "policy", "capacity")})
    )


def _show_audit(found: dict[str, Any], codename: str | None, chosen: dict[str, Any]) -> None:
    columns = [
        "capacity",
        "devices",
        "parameters",
        "multiply_adds",
        "memory",
        "bytes_down",
        "bytes_up",
        "delta2",
    ]
    title = f"{found['model']} on {chosen['dataset']}, {codename or found['policy']}, batches of {chosen['batch_size']}"
    heads = [
        "memory (bytes)" if column == "memory" else column.replace("_", " ") for column in columns
    ]
    console.table(
        title, heads, [[row[column] for column in columns] for row in found["capacities"]]
    )
    covered = ", ".join(f"{region} {n}" for region, n in found.get("coverage", {}).items())
    least = found["gamma_min"]
    trained = (
        f"every parameter is trained by at least {least} clients"
        if least
        else "some are trained by nobody"
    )
    print(
        f"mean per client: {found['parameters']:,.0f} parameters, {found['multiply_adds']:,.0f} multiply-adds; "
        + (f"{trained} ({covered})" if covered else trained)
    )


def _audit_paper(json: bool) -> None:
    """Both appendix tables worked out anew; the exit code tells whether our figures are those of the closed form."""
    found = audit_tables()
    if json:
        console.show_json(found)
    else:
        _show_tables(found["rows"])
        for sentence in found["contradictions"]:
            print(f"- {sentence}")
        equal = "equal" if found["equal_to_closed_form"] else "DIFFER FROM"
        print(f"our figures {equal} the closed form in all rows")
    if not found["equal_to_closed_form"]:
        sys.exit(1)


def _show_tables(rows: list[dict[str, Any]]) -> None:
    """The paper's figures beside ours, table by table, and which of them are wrong in print."""
    figures = ("parameters", "multiply_adds", "gamma")
    heads = [
        "codename",
        *(f"{name.replace('_', ' ')} {of}" for name in figures for of in ("paper", "ours")),
    ]
    for kind in dict.fromkeys(row["table"] for row in rows):
        cells = [
            [
                row["codename"],
                *(row[of][name] for name in figures for of in ("printed", "measured")),
            ]
            for row in rows
            if row["table"] == kind
        ]
        console.table(f"the paper's appendix table of {kind}, worked out anew", heads, cells)
    wrong = [
        [row["codename"], row["table"], ", ".join(row["wrong"])] for row in rows if row["wrong"]
    ]
    console.table("wrong in print", ["codename", "table", "figures"], wrong)


@app.command
def plan(
    *,
    fleet: Annotated[str, Parameter(help='Devices and what they hold, such as "4x1.0 + 6x0.75".')],
    model: str = "mlp",
    dataset: Annotated[str, Parameter(help="Whose input shape and classes to take.")] = "mnist",
    kind: Annotated[
        str, Parameter(help="What is planned: subnet (units) or pruning (single weights).")
    ] = "subnet",
    gamma: Annotated[MaybeWhole, Parameter(help="Coverage that every unit must have.")] = None,
    tolerate: Annotated[
        Whole, Parameter(help="Clients that may vanish: coverage of one more.")
    ] = 0,
    window: Annotated[Whole, Parameter(help="Rounds over which coverage is counted, too.")] = 10,
    capacity: Annotated[
        str, Parameter(help="What a capacity is a share of: width or parameters.")
    ] = "width",
    weights: Annotated[
        Path | None, Parameter(help="A run folder: plan for its current weights.")
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="Draw the frontier into this file (needs fedcover[plot]).")
    ] = None,
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """What can this fleet cover, at what noise; the plan that is chosen, and what other policies would give."""
    add_working_folder_to_path()
    current = (
        None
        if weights is None
        else load(weights, data=data, trust=is_trusted(weights, trust)).state.params
    )
    experiment = Experiment(dataset=dataset, model=model, fleet=fleet, capacity=capacity)
    found = plan_report(
        experiment, gamma=gamma, tolerate=tolerate, window=window, kind=kind, params=current
    )
    if plot is not None:
        draw_plan(found, plot)
    if json:
        return console.show_json(found)
    print(f"{model} on {dataset}, {kind}, fleet {found['fleet']}")
    _show_plan(found, window, tolerate)
    return print(f"conclusion: {conclusions.of_plan(found)}")


def _show_plan(found: dict[str, Any], window: int, tolerate: int) -> None:
    clocks = ["gamma", "noise"] if found["exact"] else ["units", "gamma", "gamma_window", "noise"]
    name = "frontier (exact)" if found["exact"] else "every unit held so often"
    console.table(name, clocks, [[point[c] for c in clocks] for point in found["frontier"]])
    columns = ["policy", "coverage", f"over {window} rounds", "noise (sum over devices)"]
    rows = [
        [name, seen["gamma"], seen["gamma_window"], seen["noise"]]
        for name, seen in found["policies"].items()
    ]
    console.table("side by side", columns, rows)
    alike: dict[tuple[object, ...], int] = {}
    for line in found["assignment"]:
        key = line["capacity"], line["parameters"], float(f"{line['noise']:.4g}")
        alike[key] = alike.get(key, 0) + 1
    rows = [[number, *key] for key, number in alike.items()]
    console.table("the plan", ["devices", "capacity", "parameters", "noise"], rows)
    print("which units each device holds: --json, assignment, holds")
    chosen, limit = found["chosen"], f"at most {found['upper_bound']} ({found['limited_by']})"
    print(
        f"chosen: coverage {chosen['gamma']} in a round ({limit} is possible), noise {chosen['noise']:.4g}"
    )
    if not found["exact"]:
        done = found["rounds_to_cover"]
        when = f"after {done} rounds" if done else f"not within {window} rounds"
        print(
            f"units are held {chosen['units']} times a round; {tolerate + 1} clients have had every parameter {when}"
        )
    if found["copies"] > 1:
        print(
            f"no device holds the whole model: a run with policy planned trains the largest device's model and makes "
            f"{found['copies']} copies of it; the plan above is planned(copies=false)"
        )


@app.command
def explain(
    codename: Annotated[
        str, Parameter(help="Digits 1 to 7, one per slot, as in the paper.")
    ] = "1111444477",
    *,
    dataset: str = "digits",
    rounds: Whole = 20,
    clients: Whole = 100,
    seeds: Whole = 3,
    switch: Annotated[
        tuple[str, ...], Parameter(help="Only these departures; may be repeated.")
    ] = (),
    data: Data = None,
    json: Json = False,
) -> None:
    """How much each departure of the paper's public code changes its result, against the faithful algorithm."""
    if seeds < 1:
        raise InvalidValue(f"seeds must be at least 1; got {seeds}")
    rows = explain_code(
        codename, seeds=range(seeds), dataset=dataset, rounds=rounds, clients=clients, only=switch, data=data,
        tell=console.notify,
    )  # fmt: skip
    if json:
        return console.show_json(rows)
    columns = ["setting", "accuracy", "spread", "first_round", "noise", "gamma_min"]
    title = f"{codename} on {dataset}, {rounds} rounds, {seeds} seeds: the public code's departures one by one"
    console.table(title, columns, [[row[column] for column in columns] for row in rows])
    return print(conclusions.of_departures(rows))
