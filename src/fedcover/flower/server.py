"""The ServerApp of an experiment: an ordinary run whose engine is Flower."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover import registry
from fedcover.errors import FedcoverError, InvalidValue, RunError
from fedcover.fleet import Fleet
from fedcover.flower.app_template import RunConfig
from fedcover.flower.crash_report import report_if_killed
from fedcover.flower.engine import NodeTraining, RoundOptions
from fedcover.flower.events import EventLog, log_to_stderr
from fedcover.flower.memory import release_memory
from fedcover.flower.node_data import data_requirements
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import declared_fleet
from fedcover.flower.registration import wait_for_nodes
from fedcover.flower.status import ServerState, StatusFile, announcement, recorded_status
from fedcover.flower.transport import Transport
from fedcover.log import log
from fedcover.runs.api import resume, run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import UNANSWERED, most_common_failure, read_events
from fedcover.runs.new_run import has_run, remove_run
from fedcover.runs.run_folder import Folder
from fedcover.runs.run_result import Run
from fedcover.runs.setup import build_source
from fedcover.server.round import RoundReport


def experiment_app() -> ServerApp:
    """Build the ServerApp that runs an experiment, or resumes it.

    Returns:
        The app for a Flower project's `serverapp`.

    Raises:
        FedcoverError: When the run is started, if it cannot begin, or no client ever answered.
    """
    app = ServerApp()
    app.main()(_main)
    return app


def _main(grid: Grid, context: Context) -> None:
    log_to_stderr()
    settings = RunConfig.read(context.run_config)
    try:
        with (
            report_if_killed(grid),
            recorded_status(Path(settings.folder), settings.launch) as status,
        ):
            _check_trained(serve(grid, settings, status))
        log.info(announcement(ServerState.FINISHED, settings.folder))
    except FedcoverError as error:
        log.error(announcement(ServerState.FAILED, str(error)))
        raise


def _check_trained(finished: Run) -> None:
    """Raise a RunError if no client has ever answered."""
    if not any(line["clients"] for line in finished.metrics):
        raise RunError(
            "no client has answered in any round, so nothing was trained "
            f"({_most_common_failure(finished.folder)}); "
            f"fix that, then choose another name or remove {finished.folder}"
        )


def _most_common_failure(folder: Path | None) -> str:
    return most_common_failure(read_events(folder / "events.jsonl") if folder else [])


def serve(grid: Grid, settings: RunConfig, status: StatusFile) -> Run:
    """Run or resume an experiment on the nodes of a grid."""
    folder = Path(settings.folder)
    experiment = Experiment.from_toml(settings.experiment)
    if settings.resume:
        experiment = experiment_to_resume(folder, experiment)
        status.rounds = len(Folder(folder).metrics(experiment.rounds))
    else:
        _clear_for_new_run(folder, overwrite=settings.overwrite)
    requirements = None
    if experiment.partition == "nodes":
        source = build_source(experiment, "cpu", settings.data or None)
        requirements = data_requirements(source, experiment.clients)
    transport, node_registry = Transport(grid), NodeRegistry(requirements=requirements)
    open_fleet = has_open_fleet(experiment)
    if settings.resume and not open_fleet:
        node_registry.capacities = required_capacities(experiment)
    pending_lines: list[str] = []
    status.write(ServerState.WAITING)
    _wait_for_nodes(transport, node_registry, pending_lines, settings)
    if not settings.resume:
        experiment = with_declared_capacities(experiment, node_registry)
        node_registry.capacities = () if open_fleet else required_capacities(experiment)
    options = RoundOptions(
        experiment.to_toml(),
        experiment.clients,
        settings.deadline,
        private=experiment.privacy != "none",
        open_fleet=open_fleet,
        own_model=registry.is_import_path(experiment.model),
    )
    event_log = EventLog(folder / "events.jsonl", pending_lines)
    node_training = NodeTraining(transport, node_registry, options, event_log)
    status.write(ServerState.RUNNING)
    arguments: dict[str, Any] = {
        "machine": Machine("flower", settings.device, settings.threads or None),
        "data": settings.data or None,
        "watch": partial(_watch_round, status),
        "engine": node_training.engine(),
    }
    if settings.resume:
        return resume(folder, complain=log.warning, **arguments)
    return run(experiment, folder, **arguments)


def _clear_for_new_run(folder: Path, *, overwrite: bool) -> None:
    """Remove an earlier run from the folder, or raise if it must not be overwritten."""
    if overwrite:
        remove_run(Folder(folder))
    elif has_run(Folder(folder)):
        raise RunError(
            f"{folder} already holds a run: resume it (--resume), choose another name, "
            "or replace it (--overwrite)"
        )


def _wait_for_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    pending_lines: list[str],
    settings: RunConfig,
) -> None:
    """Wait for the nodes of a run, unless it is a resumed one with nothing left to do."""
    folder = Path(settings.folder)
    if settings.resume and (folder / "summary.json").exists():
        return
    # an open folder shows to others that the run is alive
    with Folder(folder).opened() if settings.resume else nullcontext():
        wait_for_nodes(
            transport,
            node_registry,
            EventLog(None, pending_lines),
            nodes=settings.nodes,
            timeout=settings.wait,
        )


def experiment_to_resume(folder: Path, requested: Experiment) -> Experiment:
    """Return the experiment of the run in a folder; check that the requested one is the same.

    Its name may differ, and its fleet, which the nodes declare.
    """
    stored_run = Folder(folder).read()
    if stored_run.names_other_functions(requested):
        raise InvalidValue("a run that is resumed cannot be changed: it names other functions")
    experiment = stored_run.experiment
    stored_fields, requested_fields = experiment.model_dump(), requested.model_dump()
    changes = [
        f"{name} = {requested_fields[name]!r} (was {stored!r})"
        for name, stored in stored_fields.items()
        if name not in ("name", "fleet") and stored != requested_fields[name]
    ]
    if changes:
        raise InvalidValue(f"a run that is resumed cannot be changed: {', '.join(changes)}")
    return experiment


def has_open_fleet(experiment: Experiment) -> bool:
    """Return whether nodes may join, leave and change capacity between rounds.

    They may not if the rounds of each client are counted beforehand (privacy), if capacities
    belong to slots, or if a codename gives them.
    """
    uses_codename = registry.parse("policy", experiment.policy).name == "regions"
    is_private = experiment.privacy != "none"
    return experiment.assignment == "device" and not is_private and not uses_codename


def required_capacities(experiment: Experiment) -> list[float]:
    """Return the capacity that each client needs; the largest one if they belong to slots."""
    fleet = experiment.scaled_fleet
    if experiment.assignment == "slot":
        return [max(fleet.capacities)] * experiment.clients
    return [fleet.capacity(client) for client in range(experiment.clients)]


def with_declared_capacities(experiment: Experiment, node_registry: NodeRegistry) -> Experiment:
    """Return the experiment with the fleet that its nodes declare, for its folder to record."""
    nodes = node_registry.node_info.values()
    if all(info.capacity is None for info in nodes):
        return experiment
    if experiment.assignment == "slot":
        raise InvalidValue(
            "capacities belong to slots in this experiment (assignment = 'slot'), "
            "so nodes must not declare any"
        )
    capacities = required_capacities(experiment)
    declared = Fleet.parse(declared_fleet(nodes, experiment.clients, capacities))
    if all(declared.capacity(client) == capacity for client, capacity in enumerate(capacities)):
        return experiment
    return Experiment(**{**experiment.model_dump(), "fleet": str(declared)})


def _watch_round(status: StatusFile, report: RoundReport) -> None:
    """Record and log a round, and release the memory that it has used."""
    status.rounds = report.round + 1
    status.write(ServerState.RUNNING)
    names = ("accuracy", "gamma_round", *UNANSWERED)
    metrics = {name: report.metrics[name] for name in names if name in report.metrics}
    log.info("round %d: %s", report.round + 1, metrics)
    release_memory()
