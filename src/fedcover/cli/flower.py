"""Commands that run an experiment on Flower: flower up, flower run."""

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedcover.cli import console
from fedcover.cli.interruption import (
    resume_hint_when_stopped,
    stop_once_on_signals,
    stopped_hint,
)
from fedcover.cli.local_nodes import complete_node_configs
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
from fedcover.cli.summary import show_summary
from fedcover.cli.trust import Trust, is_trusted
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import require_supported
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.connections import check_connection
from fedcover.flower.local_federation import FLOWER_ENVIRONMENT, FLWR, run_local_federation
from fedcover.flower.monitor import Launch, follow_run, stream_log
from fedcover.flower.status import remove_lone_status
from fedcover.flower.user_modules import modules_of
from fedcover.host import scratch
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine, check_device
from fedcover.runs.metrics_log import count_unanswered, most_common_failure, read_events, summarise
from fedcover.runs.new_run import check_no_run
from fedcover.runs.run_folder import Folder
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of both commands that describe the server of the run."""

    device: Device = "cpu"
    threads: Threads = None
    deadline: Deadline = 300.0
    wait: Wait = 120.0

    def run_config(self, experiment: Experiment, folder: Path, **fields: Any) -> RunConfig:
        """Return Flower's run config of an experiment."""
        for name, seconds in (("deadline", self.deadline), ("wait", self.wait)):
            if not 0 < seconds <= MAX_SECONDS:
                raise InvalidValue(f"{name} must be in (0, {MAX_SECONDS}] seconds; got {seconds:g}")
        return RunConfig(
            experiment.to_toml(),
            str(folder),
            device=self.device,
            threads=self.threads or 0,
            deadline=self.deadline,
            wait=self.wait,
            **fields,
        )


DEFAULT_SERVER_OPTIONS = ServerOptions()


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
    server: ServerOptions = DEFAULT_SERVER_OPTIONS,
    trust: Trust = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, run an experiment, and clean up."""
    require_supported()
    # reports wrong values before nodes start
    Machine(device=server.device, threads=server.threads).resolved()
    config, resuming = _load_or_resume(experiment, set, trust)
    if not 1 <= nodes <= config.clients:
        raise InvalidValue(f"nodes must be in 1..clients ({config.clients}); got {nodes}")
    folder = (experiment if resuming else runs / config.name).resolve()
    _check_folder(Folder(folder), resuming, overwrite)
    data_folder = data or (Folder(folder).data if resuming else None)
    data_option = {"data": str(Path(data_folder).resolve())} if data_folder else {}
    run_config = server.run_config(
        config,
        folder,
        resume=resuming,
        overwrite=overwrite,
        nodes=nodes,
        launch=secrets.token_hex(8),
        **data_option,
    )
    common_config: dict[str, object] = {**data_option, "device": server.device}
    configs = complete_node_configs(config, nodes, rows, common_config, data_folder)
    module_folders = [os.getcwd()]
    if not resuming:
        module_folders.insert(0, str(experiment.parent.resolve()))
    resume_command = _resume_command(config, nodes, rows, folder)
    stop_once_on_signals()
    with resume_hint_when_stopped(lambda: stopped_hint(folder, resume_command)):
        _run_local_federation(config, run_config, configs, module_folders, resume_command)
    _show(folder, json)


def _run_local_federation(
    experiment: Experiment,
    run_config: RunConfig,
    configs: Sequence[Mapping[str, object]],
    module_folders: list[str],
    resume_command: str,
) -> None:
    """Start the federation, submit the run, and show its progress until it ends."""
    folder = Path(run_config.folder)
    with (
        scratch.folder("flower") as log_folder,
        _keep_logs_on_failure(log_folder, folder, resume_command),
    ):
        launch = Launch(run_config.launch, folder, log_folder / "run.txt")
        with (
            run_local_federation(log_folder, configs, module_folders) as federation,
            launch.log.open("wb") as out,
        ):
            nodes = "1 SuperNode" if len(configs) == 1 else f"{len(configs)} SuperNodes"
            console.notify(
                f"SuperLink on {federation.address} and {nodes}; logs are in {log_folder}"
            )
            with console.show_progress(experiment.name, experiment.rounds) as watch:
                submitted = federation.submit(write_app(log_folder / "app", run_config), out)
                follow_run(submitted, launch, watch)


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
    finally:
        remove_lone_status(folder)


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
    server: ServerOptions = DEFAULT_SERVER_OPTIONS,
    nodes: Annotated[
        Whole,
        Parameter(
            help="Number of SuperNodes that share the clients (default: as the first one reports)."
        ),
    ] = 0,
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
    check_device(server.device)
    check_connection(connection)
    folder = experiment.resolve() if is_folder else runs / config.name
    resuming = is_folder or resume
    _check_overwrite(overwrite, resuming)
    run_config = server.run_config(
        config, folder, resume=resuming, overwrite=overwrite, nodes=nodes, data=data
    )
    module_folders = [Path.cwd()] if is_folder else [Path.cwd(), experiment.parent]
    modules = modules_of(config, module_folders)
    if modules:
        console.notify(f"modules sent with the run: {', '.join(modules)}")
    stop_once_on_signals()
    with scratch.folder("flower") as app_parent:
        app_folder = write_app(app_parent / "app", run_config, modules)
        _submit_and_stream(app_folder, connection)


def _submit_and_stream(app_folder: Path, connection: str | None) -> None:
    command = [*FLWR, "run", str(app_folder), *([connection] if connection else []), "--stream"]
    hint = (
        "the run continues in the federation: 'flwr list' shows it, 'flwr log' shows its log,"
        " 'flwr stop' stops it"
    )
    with resume_hint_when_stopped(lambda: hint):
        stream_log(command, {**os.environ, **FLOWER_ENVIRONMENT})


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
        check_no_run(folder)


def _check_overwrite(overwrite: bool, resuming: bool) -> None:
    if overwrite and resuming:
        raise InvalidValue("--overwrite deletes the run that is to be resumed: remove one of them")


def _show(path: Path, json: bool) -> None:
    folder = Folder(path).read()
    metrics = folder.metrics(folder.experiment.rounds)
    unanswered = count_unanswered(metrics)
    if unanswered:
        failure = most_common_failure(read_events(path / "events.jsonl"))
        console.notify(f"some tasks were not answered; most common reason: {failure}")
    summary = {**summarise(metrics), **unanswered, "folder": str(path)}
    show_summary(folder.experiment.name, summary, json)
