"""Commands for real fleets: flower up, flower run."""

import os
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.options import Data, Device, Json, Overwrite, Threads, Whole, app, load_experiment
from fedcover.cli.trust import Trust, is_trusted
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import require
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import FLOWER_ENVIRONMENT, FLWR, run_local_federation
from fedcover.flower.monitor import follow_run, stream_log
from fedcover.flower.node_data import data_requirements, load_node_data
from fedcover.flower.nodes import clients_of, partition_of
from fedcover.flower.user_modules import modules_of
from fedcover.host import scratch, signals
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, check_device
from fedcover.runs.metrics_log import count_unanswered, most_common_failure, read_events, summarise
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import prepare
from fedcover.runs.trust import custom_functions
from fedcover.types import Source

flower_app = App(name="flower", help="The same experiment on Flower's SuperLink and SuperNodes.")
app.command(flower_app)

Set = Annotated[tuple[str, ...], Parameter(help="key=value, overrides the file; may be repeated.")]
Deadline = Annotated[
    float, Parameter(help="Seconds after which a round ends without those who have not answered.")
]
Wait = Annotated[
    float, Parameter(help="Seconds to wait for all SuperNodes before the first round.")
]


@flower_app.command
def up(
    experiment: Annotated[
        Path, Parameter(help="A TOML file, or the folder of a run to go on with.")
    ],
    *,
    nodes: Annotated[Whole, Parameter(help="How many SuperNodes to start on this machine.")] = 2,
    set: Set = (),
    runs: Annotated[Path, Parameter(help="Where run folders are made.")] = Path("runs"),
    data: Data = None,
    rows: Annotated[
        str, Parameter(help="With partition 'nodes', each node's file: 'node-{}.npz', from 0 on.")
    ] = "",
    device: Device = "cpu",
    threads: Threads = None,
    deadline: Deadline = 300.0,
    wait: Wait = 120.0,
    trust: Trust = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, run an experiment on them, and clean up."""
    require()
    Machine(device=device, threads=threads).resolved()  # refused here rather than by each node
    wanted, again = _load_or_resume(experiment, set, trust)
    if not 1 <= nodes <= wanted.clients:
        raise InvalidValue(f"nodes must be in 1..clients ({wanted.clients}); got {nodes}")
    folder = (experiment if again else runs / wanted.name).resolve()
    _check_folder(Folder(folder), again, overwrite)
    known = data or (Folder(folder).data if again else None)
    setup = prepare(
        wanted, Machine("sequential", "cpu").resolved(), data=known
    )  # what the server would refuse
    mine = node_data_configs(wanted, rows, nodes, setup.task.source)
    told = {"data": str(Path(known).resolve())} if known else {}
    settings = _run_config(
        wanted, folder=str(folder), resume=again, overwrite=overwrite, nodes=nodes, deadline=deadline, wait=wait,
        device=device, threads=threads or 0, **told,
    )  # fmt: skip
    configs = [
        {**config, **told, "device": device, **own}
        for config, own in zip(node_configs(wanted, nodes), mine, strict=True)
    ]
    beside = [] if again else [str(experiment.parent.resolve())]
    _install_signal_handlers()
    trusted = " --trust" if custom_functions(wanted.model_dump()) else ""
    again_by = f"fedcover flower up --nodes {nodes}{f' --rows {shlex.quote(rows)}' if rows else ''}{trusted} {folder}"
    try:
        with scratch.folder("flower") as place, _keep_logs_on_failure(place, folder, again_by):
            log = place / "run.txt"
            with (
                run_local_federation(place, configs, [*beside, os.getcwd()]) as federation,
                log.open("wb") as out,
            ):
                some = "1 SuperNode" if nodes == 1 else f"{nodes} SuperNodes"
                console.notify(
                    f"SuperLink on {federation.address} and {some}; their logs are below {place}"
                )
                with console.show_progress(wanted.name, wanted.rounds) as watch:
                    submitted = federation.submit(write_app(place / "app", settings), out)
                    follow_run(submitted, folder, log, watch, federation.serverapp_is_running)
    except KeyboardInterrupt as error:
        begun = (folder / "experiment.toml").exists()
        console.notify(
            f"stopped; go on with: {again_by}" if begun else "stopped before the run began"
        )
        sys.exit(signals.exit_code(error))
    _show(folder, json)


@contextmanager
def _keep_logs_on_failure(place: Path, folder: Path, again_by: str) -> Iterator[None]:
    """If the run fails, leave what its processes have said, and tell where that is."""
    try:
        yield
    except RunError as error:
        scratch.keep(place)
        begun = (folder / "experiment.toml").exists() and not (folder / "summary.json").exists()
        go_on = f"; go on with: {again_by}" if begun else ""
        raise RunError(f"{error}; the logs are below {place}{go_on}") from error


@flower_app.command
def run(
    experiment: Annotated[
        Path, Parameter(help="A TOML file, or the folder of a run to go on with.")
    ],
    connection: Annotated[
        str | None, Parameter(help="A SuperLink of Flower's config.toml; else its default.")
    ] = None,
    *,
    set: Set = (),
    runs: Annotated[
        Path, Parameter(help="Where run folders are made, on the SuperLink's machine.")
    ] = Path("runs"),
    resume: Annotated[
        bool, Parameter(help="Go on with the run of this name on the SuperLink.", negative="")
    ] = False,
    data: Annotated[
        str, Parameter(help="Folder of the data sets on the SuperLink's machine.")
    ] = "",
    device: Device = "cpu",
    threads: Threads = None,
    nodes: Annotated[
        Whole, Parameter(help="How many SuperNodes share the clients; else as the first one says.")
    ] = 0,
    deadline: Deadline = 300.0,
    wait: Wait = 120.0,
    trust: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Submit an experiment to a federation that is already there, and show its log."""
    require()
    if nodes < 0:
        raise InvalidValue(
            f"nodes must be at least 1, or 0 for as many as the first node says; got {nodes}"
        )
    wanted, again = _load_or_resume(experiment, set, trust)
    if nodes > wanted.clients:
        raise InvalidValue(f"nodes must be in 1..clients ({wanted.clients}), or 0; got {nodes}")
    check_device(device)
    check_connection(connection)
    folder = experiment.resolve() if again else runs / wanted.name
    _check_overwrite(overwrite, again or resume)
    settings = _run_config(
        wanted, folder=str(folder), resume=again or resume, overwrite=overwrite, nodes=nodes, deadline=deadline,
        wait=wait, device=device, threads=threads or 0, data=data,
    )  # fmt: skip
    modules = modules_of(wanted, [Path.cwd(), *([] if again else [experiment.parent])])
    if modules:
        console.notify(f"with the run travel: {', '.join(modules)}")
    _install_signal_handlers()
    with scratch.folder("flower") as place:
        made = write_app(place / "app", settings, modules)
        command = [*FLWR, "run", str(made), *([connection] if connection else []), "--stream"]
        try:
            stream_log(command, {**os.environ, **FLOWER_ENVIRONMENT})
        except KeyboardInterrupt as error:
            console.notify(
                "the run goes on without you: 'flwr list' shows it, 'flwr log' its log, 'flwr stop' ends it"
            )
            sys.exit(signals.exit_code(error))


def check_connection(name: str | None) -> None:
    """Refuse a SuperLink of which Flower's configuration has no address; None is the configuration's default.

    Without an address Flower simulates, and leaves a SuperLink of its own running.
    """
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink")
    except OSError:
        known = {}
    except ValueError:
        return  # Flower says what is wrong with it
    links = known if isinstance(known, dict) else {}
    addresses = {
        key: str(value.get("address", ""))
        for key, value in links.items()
        if isinstance(value, dict)
    }
    names = [
        key for key, address in addresses.items() if address and not address.startswith(":")
    ]  # as in :local:
    if (wanted := name or links.get("default")) not in names:
        raise InvalidValue(
            f"connection must be one of {', '.join(names) or '(none yet)'}; got {wanted!r}: write its address into "
            f"{path}, under [superlink.{wanted or 'NAME'}]"
        )


def node_configs(wanted: Experiment, nodes: int) -> list[dict[str, object]]:
    """What each of a number of local nodes says of itself; its capacity where all of its clients have the same."""
    fleet, held = wanted.scaled_fleet, [list[float]() for _ in range(nodes)]
    for client in range(wanted.clients):
        held[partition_of(client, wanted.clients, nodes)].append(
            fleet.capacity(client) if wanted.assignment == "device" else 1.0
        )
    return [
        {"partition-id": place, "num-partitions": nodes}
        | (
            {"capacity": mine[0]}
            if len(frozenset(mine)) == 1 and wanted.assignment == "device"
            else {}
        )
        for place, mine in enumerate(held)
    ]


def node_data_configs(
    wanted: Experiment, pattern: str, nodes: int, source: Source
) -> list[dict[str, object]]:
    """The file that each local node is told of, where clients' rows are on nodes."""
    if wanted.partition != "nodes":
        if pattern:
            raise InvalidValue(
                f"rows are for partition 'nodes'; this experiment has {wanted.partition!r}"
            )
        return [{} for _ in range(nodes)]
    if "{}" not in pattern:
        raise InvalidValue(
            "rows must name each node's file, with {} for its number from 0 on, such as 'node-{}.npz', as the "
            f"experiment has partition 'nodes'; got {pattern!r}"
        )
    files = [Path(pattern.replace("{}", str(place))).resolve() for place in range(nodes)]
    for place, file in enumerate(files):
        # refused here rather than by the server
        load_node_data(
            str(file),
            wanted,
            clients_of(place, wanted.clients, nodes),
            data_requirements(source, wanted.clients),
        )
    return [{"rows": str(file)} for file in files]


def _install_signal_handlers() -> None:
    """A kill and a closed terminal clean up too, and Ctrl-C even where a shell ignores it; `nohup` is left its will."""
    for number in signals.SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_signal)


def _handle_signal(number: int, frame: object) -> None:
    """Begin to clean up, which takes seconds; who presses Ctrl-C again must not keep that from being finished."""
    for later in signals.SIGNALS:
        signal.signal(later, signal.SIG_IGN)
    if number == signal.SIGHUP:
        signals.silence_closed_terminal()
    raise signals.Stopped(number)


def _load_or_resume(
    experiment: Path, changes: tuple[str, ...], trust: bool
) -> tuple[Experiment, bool]:
    """The experiment of a TOML file, or of a run folder to go on with."""
    if experiment.is_dir():
        if changes:
            raise InvalidValue("--set cannot change a run that is gone on with")
        found = Folder(experiment, is_trusted(experiment, trust)).read()
        if found.manifest.get("engine") != "flower":
            raise InvalidValue(
                f"{experiment} was not run on Flower: go on with 'fedcover resume {experiment}'"
            )
        return found.experiment, True
    return load_experiment(experiment, changes), False


def _check_folder(folder: Folder, again: bool, overwrite: bool) -> None:
    """Refuse, before anything is started, a run that there is already, or one to go on with that is being run."""
    _check_overwrite(overwrite, again)
    if not again:
        if not overwrite:
            folder.check_no_run()
        return
    with folder.opened():
        pass


def _check_overwrite(overwrite: bool, again: bool) -> None:
    if overwrite and again:
        raise InvalidValue(
            "--overwrite begins anew, and this goes on with a run: leave one of them out"
        )


def _run_config(wanted: Experiment, **fields: Any) -> RunConfig:
    for name in ("deadline", "wait"):
        if not 0 < fields[name] <= 86_400:
            raise InvalidValue(f"{name} must be in (0, 86400] seconds; got {fields[name]:g}")
    return RunConfig(wanted.to_toml(), **fields)


def _show(folder: Path, json: bool) -> None:
    found = Folder(folder).read()
    metrics = found.metrics(found.experiment.rounds)
    summary = {**summarise(metrics), **count_unanswered(metrics), "folder": str(folder)}
    if count_unanswered(metrics):
        why = most_common_failure(read_events(folder / "events.jsonl"))
        console.notify(f"not every task was answered, most often for this reason: {why}")
    if json:
        return console.show_json(summary)
    console.table(found.experiment.name, ["figure", "value"], [[k, v] for k, v in summary.items()])
    return print(conclusions.of_run(summary))
