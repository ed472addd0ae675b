"""Commands that run an experiment on Flower: flower up, flower run."""

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
from fedcover.cli.local_nodes import node_configs, node_data_configs
from fedcover.cli.options import (
    Data,
    Device,
    Json,
    Overwrite,
    Runs,
    Set,
    Threads,
    Whole,
    app,
    load_experiment,
)
from fedcover.cli.trust import Trust, is_trusted
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import require_supported
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import FLOWER_ENVIRONMENT, FLWR, run_local_federation
from fedcover.flower.monitor import follow_run, stream_log
from fedcover.flower.user_modules import modules_of
from fedcover.host import scratch, signals
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, check_device
from fedcover.runs.metrics_log import count_unanswered, most_common_failure, read_events, summarise
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import prepare
from fedcover.runs.trust import custom_functions

MAX_SECONDS = 86_400

flower_app = App(name="flower", help="Run an experiment on Flower's SuperLink and SuperNodes.")
app.command(flower_app)

ExperimentOrFolder = Annotated[
    Path, Parameter(help="An experiment as a TOML file, or the folder of a run to resume.")
]
Deadline = Annotated[
    float, Parameter(help="Seconds after which a round ends without the missing clients.")
]
Wait = Annotated[
    float, Parameter(help="Seconds to wait for all SuperNodes before the first round.")
]


@flower_app.command
def up(
    experiment: ExperimentOrFolder,
    *,
    nodes: Annotated[Whole, Parameter(help="Number of SuperNodes to start on this machine.")] = 2,
    set: Set = (),
    runs: Runs = Path("runs"),
    data: Data = None,
    rows: Annotated[
        str,
        Parameter(help="With partition 'nodes': each node's file, such as 'node-{}.npz' (from 0)."),
    ] = "",
    device: Device = "cpu",
    threads: Threads = None,
    deadline: Deadline = 300.0,
    wait: Wait = 120.0,
    trust: Trust = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, run an experiment, and clean up."""
    require_supported()
    Machine(device=device, threads=threads).resolved()  # reports wrong values before nodes start
    config, resuming = _load_or_resume(experiment, set, trust)
    if not 1 <= nodes <= config.clients:
        raise InvalidValue(f"nodes must be in 1..clients ({config.clients}); got {nodes}")
    folder = (experiment if resuming else runs / config.name).resolve()
    _check_folder(Folder(folder), resuming, overwrite)
    data_folder = data or (Folder(folder).data if resuming else None)
    data_option = {"data": str(Path(data_folder).resolve())} if data_folder else {}
    run_config = _run_config(
        config,
        folder=str(folder),
        resume=resuming,
        overwrite=overwrite,
        nodes=nodes,
        deadline=deadline,
        wait=wait,
        device=device,
        threads=threads or 0,
        **data_option,
    )
    common_config: dict[str, object] = {**data_option, "device": device}
    configs = _complete_node_configs(config, nodes, rows, common_config, data_folder)
    module_folders = [os.getcwd()]
    if not resuming:
        module_folders.insert(0, str(experiment.parent.resolve()))
    _install_signal_handlers()
    resume_command = _resume_command(config, nodes, rows, folder)
    try:
        _run_local_federation(config, run_config, configs, module_folders, resume_command)
    except KeyboardInterrupt as error:
        if (folder / "experiment.toml").exists():
            console.notify(f"stopped; resume with: {resume_command}")
        else:
            console.notify("stopped before the run began")
        sys.exit(signals.exit_code(error))
    _show(folder, json)


def _complete_node_configs(
    experiment: Experiment,
    nodes: int,
    rows: str,
    common_config: dict[str, object],
    data_folder: str | Path | None,
) -> list[dict[str, object]]:
    """Return the nodes' configs. Preparing the run first reports what the server would reject."""
    setup = prepare(experiment, Machine("sequential", "cpu").resolved(), data=data_folder)
    data_configs = node_data_configs(experiment, rows, nodes, setup.task.source)
    return [
        {**config, **common_config, **data_config}
        for config, data_config in zip(node_configs(experiment, nodes), data_configs, strict=True)
    ]


def _run_local_federation(
    experiment: Experiment,
    run_config: RunConfig,
    configs: list[dict[str, object]],
    module_folders: list[str],
    resume_command: str,
) -> None:
    """Start the federation, submit the run, and show its progress until it ends."""
    folder = Path(run_config.folder)
    with (
        scratch.folder("flower") as log_folder,
        _keep_logs_on_failure(log_folder, folder, resume_command),
    ):
        log = log_folder / "run.txt"
        with (
            run_local_federation(log_folder, configs, module_folders) as federation,
            log.open("wb") as out,
        ):
            nodes = "1 SuperNode" if len(configs) == 1 else f"{len(configs)} SuperNodes"
            console.notify(
                f"SuperLink on {federation.address} and {nodes}; logs are in {log_folder}"
            )
            with console.show_progress(experiment.name, experiment.rounds) as watch:
                submitted = federation.submit(write_app(log_folder / "app", run_config), out)
                follow_run(submitted, folder, log, watch, federation.serverapp_is_running)


@contextmanager
def _keep_logs_on_failure(log_folder: Path, folder: Path, resume_command: str) -> Iterator[None]:
    """If the run fails, keep the logs of its processes, and name their folder."""
    try:
        yield
    except RunError as error:
        scratch.keep(log_folder)
        hint = ""
        if (folder / "experiment.toml").exists() and not (folder / "summary.json").exists():
            hint = f"; resume with: {resume_command}"
        raise RunError(f"{error}; logs are in {log_folder}{hint}") from error


def _resume_command(experiment: Experiment, nodes: int, rows: str, folder: Path) -> str:
    rows_option = f" --rows {shlex.quote(rows)}" if rows else ""
    trust_option = " --trust" if custom_functions(experiment.model_dump()) else ""
    return f"fedcover flower up --nodes {nodes}{rows_option}{trust_option} {folder}"


@flower_app.command
def run(
    experiment: ExperimentOrFolder,
    connection: Annotated[
        str | None,
        Parameter(help="A SuperLink of Flower's config.toml (default: the default there)."),
    ] = None,
    *,
    set: Set = (),
    runs: Annotated[
        Path, Parameter(help="Parent folder of the run folders, on the SuperLink's machine.")
    ] = Path("runs"),
    resume: Annotated[
        bool, Parameter(help="Resume the run of this name on the SuperLink.", negative="")
    ] = False,
    data: Annotated[
        str, Parameter(help="Folder of the data sets on the SuperLink's machine.")
    ] = "",
    device: Device = "cpu",
    threads: Threads = None,
    nodes: Annotated[
        Whole,
        Parameter(
            help="Number of SuperNodes that share the clients (default: as the first one reports)."
        ),
    ] = 0,
    deadline: Deadline = 300.0,
    wait: Wait = 120.0,
    trust: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Submit an experiment to an existing federation, and show its log."""
    require_supported()
    if nodes < 0:
        raise InvalidValue(
            f"nodes must be at least 1, or 0 for what the first node reports; got {nodes}"
        )
    config, is_folder = _load_or_resume(experiment, set, trust)
    if nodes > config.clients:
        raise InvalidValue(f"nodes must be in 1..clients ({config.clients}), or 0; got {nodes}")
    check_device(device)
    check_connection(connection)
    folder = experiment.resolve() if is_folder else runs / config.name
    resuming = is_folder or resume
    _check_overwrite(overwrite, resuming)
    run_config = _run_config(
        config,
        folder=str(folder),
        resume=resuming,
        overwrite=overwrite,
        nodes=nodes,
        deadline=deadline,
        wait=wait,
        device=device,
        threads=threads or 0,
        data=data,
    )
    module_folders = [Path.cwd()] if is_folder else [Path.cwd(), experiment.parent]
    modules = modules_of(config, module_folders)
    if modules:
        console.notify(f"modules sent with the run: {', '.join(modules)}")
    _install_signal_handlers()
    with scratch.folder("flower") as app_parent:
        app_folder = write_app(app_parent / "app", run_config, modules)
        _submit_and_stream(app_folder, connection)


def _submit_and_stream(app_folder: Path, connection: str | None) -> None:
    command = [*FLWR, "run", str(app_folder), *([connection] if connection else []), "--stream"]
    try:
        stream_log(command, {**os.environ, **FLOWER_ENVIRONMENT})
    except KeyboardInterrupt as error:
        console.notify(
            "the run continues in the federation: 'flwr list' shows it, 'flwr log' shows its log,"
            " 'flwr stop' stops it"
        )
        sys.exit(signals.exit_code(error))


def check_connection(name: str | None) -> None:
    """Check that Flower's configuration has an address for a SuperLink; None is the default one.

    Without an address Flower would simulate, and leave a SuperLink of its own running.

    Raises:
        InvalidValue: if there is no such SuperLink, or it has no address.
    """
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink")
    except OSError:
        section = {}
    except ValueError:
        return  # Flower itself reports invalid TOML
    links = section if isinstance(section, dict) else {}
    names = [key for key, link in links.items() if isinstance(link, dict) and _has_address(link)]
    wanted_name = name or links.get("default")
    if wanted_name not in names:
        raise InvalidValue(
            f"connection must be one of {', '.join(names) or '(none yet)'}; got {wanted_name!r}:"
            f" write its address to {path}, under [superlink.{wanted_name or 'NAME'}]"
        )


def _has_address(link: dict[str, Any]) -> bool:
    address = str(link.get("address", ""))
    return bool(address) and not address.startswith(":")  # ":local:" starts a simulation


def _install_signal_handlers() -> None:
    """Clean up after SIGTERM, a closed terminal and Ctrl-C, even where a shell ignores Ctrl-C.

    Under `nohup`, SIGHUP stays ignored.
    """
    for number in signals.SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_signal)


def _handle_signal(number: int, frame: object) -> None:
    """Begin to clean up. It takes seconds, and a second Ctrl-C must not interrupt it."""
    for other in signals.SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGHUP:
        signals.silence_closed_terminal()
    raise signals.Stopped(number)


def _load_or_resume(
    experiment: Path, changes: tuple[str, ...], trust: bool
) -> tuple[Experiment, bool]:
    """Return the experiment of a TOML file or run folder, and whether it is a run folder."""
    if not experiment.is_dir():
        return load_experiment(experiment, changes), False
    if changes:
        raise InvalidValue("--set cannot change a run that is resumed")
    folder = Folder(experiment, is_trusted(experiment, trust)).read()
    if folder.manifest.get("engine") != "flower":
        raise InvalidValue(
            f"{experiment} was not run on Flower: use 'fedcover resume {experiment}'"
        )
    return folder.experiment, True


def _check_folder(folder: Folder, resuming: bool, overwrite: bool) -> None:
    """Check, before anything is started, that the run can be written to its folder.

    A new run must not exist yet, and a resumed one must not be in use.
    """
    _check_overwrite(overwrite, resuming)
    if resuming:
        with folder.opened():
            pass
    elif not overwrite:
        folder.check_no_run()


def _check_overwrite(overwrite: bool, resuming: bool) -> None:
    if overwrite and resuming:
        raise InvalidValue("--overwrite deletes the run that is to be resumed: remove one of them")


def _run_config(experiment: Experiment, **fields: Any) -> RunConfig:
    for name in ("deadline", "wait"):
        if not 0 < fields[name] <= MAX_SECONDS:
            raise InvalidValue(
                f"{name} must be in (0, {MAX_SECONDS}] seconds; got {fields[name]:g}"
            )
    return RunConfig(experiment.to_toml(), **fields)


def _show(path: Path, json: bool) -> None:
    folder = Folder(path).read()
    metrics = folder.metrics(folder.experiment.rounds)
    unanswered = count_unanswered(metrics)
    summary = {**summarise(metrics), **unanswered, "folder": str(path)}
    if unanswered:
        failure = most_common_failure(read_events(path / "events.jsonl"))
        console.notify(f"some tasks were not answered; most common reason: {failure}")
    if json:
        return console.show_json(summary)
    rows = [[metric, value] for metric, value in summary.items()]
    console.table(folder.experiment.name, ["metric", "value"], rows)
    return print(conclusions.of_run(summary))
