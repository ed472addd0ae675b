"""The command that computes what a fleet costs and covers: audit."""

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.analysis.audit import audit as audit_fleet
from fedcover.analysis.audit import audit_codename
from fedcover.cli import console
from fedcover.cli.options import Json, MaybeWhole, add_working_folder_to_path, app
from fedcover.errors import InvalidValue
from fedcover.paper.tables import audit_tables
from fedcover.runs.experiment import Experiment

AUDIT_DEFAULTS = {
    "kind": "pruning",
    "p5": "code",
    "fleet": "1x1.0 + 1x0.5 + 1x0.25",
    "policy": "prefix",
    "capacity": "width",
    "model": "mlp",
    "dataset": "mnist",
    "batch_size": 10,
}
"""The values of options that are not given."""

AUDIT_COLUMNS = {
    "capacity": "capacity",
    "devices": "devices",
    "parameters": "parameters",
    "multiply_adds": "multiply adds",
    "memory": "memory (bytes)",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "delta2": "delta2",
}
"""Fields of a capacity and their headings."""

PAPER_METRICS = ("parameters", "multiply_adds", "gamma")


@app.command
def audit(
    codename: Annotated[
        str | None,
        Parameter(
            help="A codename of the paper: digits 1 to 7, one per slot; or 'paper' for both of"
            " its tables."
        ),
    ] = None,
    *,
    kind: Annotated[
        str | None, Parameter(help="With a codename: pruning (default) or subnet.")
    ] = None,
    p5: Annotated[
        str | None,
        Parameter(help="With a codename: P5 as in the paper's code (default), or as printed."),
    ] = None,
    fleet: Annotated[
        str | None, Parameter(help='Without a codename, such as "4x1.0 + 6x0.5".')
    ] = None,
    policy: Annotated[str | None, Parameter(help="Without a codename (default: prefix).")] = None,
    capacity: Annotated[
        str | None,
        Parameter(
            help="Without a codename: what a capacity is a share of, width (default) or parameters."
        ),
    ] = None,
    model: Annotated[str | None, Parameter(help="Default: mlp.")] = None,
    dataset: Annotated[
        str | None,
        Parameter(help="Data set that sets input shape and number of classes (default: mnist)."),
    ] = None,
    batch_size: Annotated[MaybeWhole, Parameter(help="Default: 10.")] = None,
    json: Json = False,
) -> None:
    """Compute parameters, multiply-adds, memory and traffic per capacity, and the coverage."""
    add_working_folder_to_path()
    options = {
        "kind": kind,
        "p5": p5,
        "fleet": fleet,
        "policy": policy,
        "capacity": capacity,
        "model": model,
        "dataset": dataset,
        "batch_size": batch_size,
    }
    given_options = {name: value for name, value in options.items() if value is not None}
    _check_ignored_options(codename, given_options)
    if codename == "paper":
        return _audit_paper(json)
    all_options = {**AUDIT_DEFAULTS, **given_options}
    report = _run_audit(codename, all_options)
    if json:
        return console.show_json(report)
    return _show_audit(report, codename, all_options)


def _check_ignored_options(codename: str | None, options: dict[str, Any]) -> None:
    """Check that no option is given that this kind of audit would ignore."""
    if codename == "paper":
        ignored, why = list(options), "'paper' is an audit of the paper's own tables"
    elif codename is not None:
        ignored, why = ["fleet", "policy", "capacity"], "a codename has its own fleet and policy"
    else:
        ignored, why = ["kind", "p5"], "kind and p5 need a codename"
    wrong_options = [f"--{name.replace('_', '-')}" for name in ignored if name in options]
    if wrong_options:
        raise InvalidValue(f"{why}: leave {' and '.join(wrong_options)} out")


def _run_audit(codename: str | None, options: dict[str, Any]) -> dict[str, Any]:
    fields = {name: options[name] for name in ("model", "dataset", "batch_size")}
    if codename is not None:
        return audit_codename(codename, options["kind"], options["p5"], **fields)
    fleet_fields = {name: options[name] for name in ("fleet", "policy", "capacity")}
    return audit_fleet(Experiment(**fields, **fleet_fields))


def _show_audit(report: dict[str, Any], codename: str | None, options: dict[str, Any]) -> None:
    title = (
        f"{report['model']} on {options['dataset']}, {codename or report['policy']},"
        f" batches of {options['batch_size']}"
    )
    rows = [[row[field] for field in AUDIT_COLUMNS] for row in report["capacities"]]
    console.table(title, list(AUDIT_COLUMNS.values()), rows)
    coverage = report["gamma_min"]
    if coverage:
        trained = f"every parameter is trained by at least {coverage} clients"
    else:
        trained = "some parameters are trained by no client"
    regions = ", ".join(f"{region} {n}" for region, n in report.get("coverage", {}).items())
    if regions:
        trained += f" ({regions})"
    print(
        f"mean per client: {report['parameters']:,.0f} parameters,"
        f" {report['multiply_adds']:,.0f} multiply-adds; {trained}"
    )


def _audit_paper(json: bool) -> None:
    """Recompute both tables of the appendix. Exit with 1 if the closed form gives other numbers."""
    report = audit_tables()
    if json:
        console.show_json(report)
    else:
        _show_tables(report["rows"])
        for sentence in report["contradictions"]:
            print(f"- {sentence}")
        equal = "equal" if report["equal_to_closed_form"] else "DIFFER FROM"
        print(f"our numbers {equal} the closed form in all rows")
    if not report["equal_to_closed_form"]:
        sys.exit(1)


def _show_tables(rows: list[dict[str, Any]]) -> None:
    """Print the paper's numbers and ours, table by table, and which are misprinted."""
    headings = ["codename"]
    for metric in PAPER_METRICS:
        headings += [f"{metric.replace('_', ' ')} {source}" for source in ("paper", "ours")]
    for kind in dict.fromkeys(row["table"] for row in rows):
        cells = [_paper_and_ours(row) for row in rows if row["table"] == kind]
        console.table(f"the paper's appendix table of {kind}, recomputed", headings, cells)
    misprints = [
        [row["codename"], row["table"], ", ".join(row["wrong"])] for row in rows if row["wrong"]
    ]
    console.table("misprints", ["codename", "table", "numbers"], misprints)


def _paper_and_ours(row: dict[str, Any]) -> list[object]:
    cells = [row["codename"]]
    for metric in PAPER_METRICS:
        cells += [row["printed"][metric], row["measured"][metric]]
    return cells
