"""The commands: run, resume, export, demo, list, audit, data."""

import sys
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from fedcover import console, datasets
from fedcover.aggregation import RULES, SERVERS
from fedcover.audit import audit as audit_fleet
from fedcover.audit import audit_codename
from fedcover.demo import FLEET, LINE_UP
from fedcover.demo import demo as run_demo
from fedcover.engines import ENGINES
from fedcover.errors import FedcoverError, InvalidValue, unknown
from fedcover.experiment import Experiment, parse_change, read_experiment
from fedcover.export import export as export_part
from fedcover.folders import Folder
from fedcover.models import MODELS
from fedcover.partition import PARTITIONS
from fedcover.policies import POLICIES
from fedcover.preparation import Machine
from fedcover.recipes import RECIPES
from fedcover.runs import Run, load
from fedcover.runs import resume as resume_run
from fedcover.runs import run as run_experiment
from fedcover.sources import Synthetic
from fedcover.spec import options_of
from fedcover.training import SCHEDULES
from fedcover.version import __version__

app = App(
    name="fedcover",
    help="Federated learning for fleets of unequal devices: every client trains the part of one model it can hold.",
    version=__version__,
)
data_app = App(name="data", help="Get or check the data sets.")
app.command(data_app)

Json = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative="")]
Data = Annotated[Path | None, Parameter(help="Folder of the data sets; else $FEDCOVER_DATA, else a cache folder.")]
Device = Annotated[str, Parameter(help="auto, cpu or cuda.")]
EngineName = Annotated[str, Parameter(name="--engine", help="auto or a name from 'fedcover list engines'.")]
Threads = Annotated[int | None, Parameter(help="CPU threads; by default as many as the model is worth.")]
TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "policies": dict(POLICIES),
    "models": dict(MODELS),
    "datasets": {**datasets.DATASETS, "synthetic": Synthetic},
    "partitions": dict(PARTITIONS),
    "engines": dict(ENGINES),
    "recipes": dict(RECIPES),
    "rules": dict(RULES),
    "servers": dict(SERVERS),
    "schedules": dict(SCHEDULES),
}


@app.command
def run(
    experiment: Annotated[Path | None, Parameter(help="A TOML file; without it, the defaults.")] = None,
    *,
    set: Annotated[tuple[str, ...], Parameter(help="key=value, overrides the file; may be repeated.")] = (),
    runs: Annotated[Path, Parameter(help="Where run folders are made.")] = Path("runs"),
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run one experiment into runs/<name>."""
    changes = dict(parse_change(text) for text in set)
    wanted = read_experiment(experiment, changes) if experiment else Experiment(**changes)
    folder = runs / wanted.name
    with console.watching(wanted.name, wanted.rounds) as watch:
        result = _saying_how_to_go_on(
            folder,
            lambda: run_experiment(wanted, folder, machine=Machine(engine, device, threads), data=data, watch=watch),
        )
    _show_result(result, json)


@app.command
def resume(
    folder: Path,
    *,
    force: Annotated[bool, Parameter(help="Go on although engine, device, threads or torch changed.")] = False,
    data: Data = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Go on with a run that was stopped; it ends like one that never was."""
    wanted = Folder(folder).read().experiment
    with console.watching(wanted.name, wanted.rounds) as watch:
        result = _saying_how_to_go_on(
            folder,
            lambda: resume_run(
                folder, machine=Machine(engine, device, threads), force=force, data=data, watch=watch,
                complain=console.say,
            ),
        )  # fmt: skip
    _show_result(result, json)


@app.command
def export(
    folder: Path,
    *,
    capacity: Annotated[float, Parameter(help="The device's capacity; 1 is the whole model.")] = 1.0,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="The file to write.")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Write the trained model, or the part of it that a device can hold, as one safetensors file."""
    path = output or folder / (f"model-{capacity:g}.safetensors")
    written = export_part(load(folder, data=data), capacity, path)
    if json:
        return console.show_json(written)
    print(f"{written['path']}: {written['parameters']:,} parameters; load it with fedcover.load_part({str(path)!r})")
    return None


@app.command
def demo(
    *,
    folder: Annotated[Path | None, Parameter(help="Where to keep the runs; else runs/demo-1, -2, ...")] = None,
    rounds: int = 30,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Five policies side by side on a fleet in which no device holds the whole model; offline, under a minute."""
    if rounds < 1:
        raise InvalidValue(f"rounds must be at least 1; got {rounds}")
    chosen = folder or next(p for n in range(1, sys.maxsize) if not (p := Path(f"runs/demo-{n}")).exists())
    try:
        results = run_demo(chosen, rounds, seed, console.watching)
    except KeyboardInterrupt:
        console.say(f"stopped; the runs so far are in {chosen}; 'fedcover demo' begins anew")
        sys.exit(130)
    if json:
        return console.show_json({run.experiment.name: {**run.summary, "folder": str(run.folder)} for run in results})
    columns = [
        "policy",
        "accuracy",
        "one device",
        "coverage",
        "over 10 rounds",
        "noise",
        "parameters",
        "MB moved",
    ]
    names = ["accuracy", "accuracy_single", "gamma_min", "gamma_window", "delta2_mean", "parameters"]
    rows = [
        [run.experiment.name, *(run.summary[n] for n in names),
         (run.summary["bytes_down"] + run.summary["bytes_up"]) / 1e6]
        for run in results
    ]  # fmt: skip
    title = f"digits, {rounds} rounds, fleet {FLEET} (shares of 4,810 parameters)"
    console.table(title, columns, rows)
    for policy, meaning in LINE_UP.items():
        print(f"  {policy:22} {meaning}")
    print(
        "accuracy: the assembled full model; one device: the largest part that a single device holds;\n"
        "coverage: fewest clients that trained any parameter in a round, and over ten rounds;\n"
        f"noise: share of the weights' energy cut away; parameters: mean per client. Run folders: {chosen}"
    )
    return None


@app.command(name="list")
def list_(kind: str, *, json: Json = False) -> None:
    """What there is: policies, models, datasets, partitions, engines, rules, schedules."""
    if kind not in TABLES:
        raise unknown("list", kind, TABLES)
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "options": {
                option: None if p.default is p.empty else p.default
                for option, p in options_of(function).items()
                if option not in ("seed", "device")
            },
            "about": (getdoc(function) or "").partition("\n\n")[0].replace("\n", " "),
        }
        for name, function in TABLES[kind].items()
    ]
    if json:
        return console.show_json(entries)
    rows = [[e["name"], ", ".join(f"{k}={v!r}" for k, v in e["options"].items()), e["about"]] for e in entries]
    console.table(kind, ["name", "options", "about"], rows)
    return None


@app.command
def audit(
    codename: Annotated[str | None, Parameter(help="Digits 1 to 7, one per slot, as in the paper.")] = None,
    *,
    kind: Annotated[str, Parameter(help="With a codename: pruning or subnet.")] = "pruning",
    p5: Annotated[str, Parameter(help="With a codename: P5 as in the paper's code, or as printed.")] = "code",
    fleet: Annotated[str, Parameter(help='Without a codename, such as "4x1.0 + 6x0.5".')] = "1x1.0 + 1x0.5 + 1x0.25",
    policy: Annotated[str, Parameter(help="Without a codename.")] = "prefix",
    capacity: Annotated[str, Parameter(help="What a capacity is a share of: width or parameters.")] = "width",
    model: str = "mlp",
    dataset: Annotated[str, Parameter(help="Whose input shape and classes to take.")] = "mnist",
    batch_size: int = 10,
    json: Json = False,
) -> None:
    """Does this fit my device: parameters, multiply-adds, memory and traffic per capacity; and what is covered."""
    if codename is not None:
        found = audit_codename(codename, kind, p5, model, dataset)
    else:
        found = audit_fleet(
            Experiment(
                dataset=dataset, model=model, fleet=fleet, policy=policy, capacity=capacity, batch_size=batch_size,
            )
        )  # fmt: skip
    if json:
        return console.show_json(found)
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
    title = f"{found['model']} on {dataset}, {codename or found['policy']}, batches of {batch_size}"
    console.table(title, columns, [[row[column] for column in columns] for row in found["capacities"]])
    covered = ", ".join(f"{region} {n}" for region, n in found.get("coverage", {}).items())
    print(
        f"mean per client: {found['parameters']:,.0f} parameters, {found['multiply_adds']:,.0f} multiply-adds; "
        f"every parameter is trained by at least {found['gamma_min']} clients" + (f" ({covered})" if covered else "")
    )
    return None


@data_app.command
def get(name: str, *, data: Data = None) -> None:
    """Download a data set from its publisher, unless it is there, and check it."""
    folder = datasets.data_folder(data)
    datasets.get(name, folder)
    print(f"{name} is complete in {folder}")


@data_app.command
def check(name: str, *, data: Data = None, json: Json = False) -> None:
    """Compare a data set's files with their publisher's digests."""
    results = datasets.check(name, datasets.data_folder(data))
    if json:
        console.show_json([{"path": str(r.path), "ok": r.ok, "got": r.got, "expected": r.expected} for r in results])
    else:
        rows = [[str(r.path), "ok" if r.ok else "WRONG", r.got or "missing", r.expected] for r in results]
        console.table(name, ["file", "", "digest", "expected"], rows)
    if not all(result.ok for result in results):
        sys.exit(1)


def _saying_how_to_go_on(folder: Path, work: Callable[[], Run]) -> Run:
    try:
        return work()
    except KeyboardInterrupt:
        begun = (folder / "experiment.toml").exists()
        console.say(f"stopped; go on with: fedcover resume {folder}" if begun else "stopped before the run began")
        sys.exit(130)


def _show_result(result: Run, json: bool) -> None:
    summary = {**result.summary, "folder": str(result.folder)}
    if json:
        return console.show_json(summary)
    console.table(result.experiment.name, ["figure", "value"], [[k, v] for k, v in summary.items()])
    return None


def main() -> None:
    """Parse the command line; what is wrong is said in one sentence: exit code 2 for input, 1 for the rest."""
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except InvalidValue as error:
        _leave(error, 2)
    except FedcoverError as error:
        _leave(error, 1)
    except CycloptsError as error:
        _leave(error, 2)


def _leave(error: Exception, code: int) -> None:
    console.say(f"fedcover: {error}")
    sys.exit(code)
