"""The server's side: an ordinary run, whose engine is Flower, inside Flower's ServerApp."""

from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover import registry
from fedcover.errors import FedcoverError, InvalidValue, RunError
from fedcover.fleet import Fleet
from fedcover.flower.app_template import RunConfig
from fedcover.flower.engine import FlowerEngine, RoundOptions
from fedcover.flower.events import EventLog, log_to_stderr
from fedcover.flower.memory import reserve, tidy
from fedcover.flower.node_data import data_requirements
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import declared_fleet
from fedcover.flower.registration import wait_for_nodes
from fedcover.flower.sudden_ends import reported
from fedcover.flower.transport import Transport
from fedcover.log import log
from fedcover.runs.api import Run, resume, run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import UNANSWERED, most_common_failure, read_events
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import build_source
from fedcover.server.round import RoundReport


def experiment_app() -> ServerApp:
    """The ServerApp that runs an experiment, or goes on with it where its folder holds one already."""
    app = ServerApp()
    app.main()(_main)
    return app


def _main(grid: Grid, context: Context) -> None:
    log_to_stderr()
    try:
        with reported(grid):
            done = serve(grid, RunConfig.read(context.run_config))
        if not any(line["clients"] for line in done.metrics):
            raise RunError(
                f"no client has answered in any round, so nothing was trained ({_reason(done.folder)}); "
                f"mend that, then choose another name or remove {done.folder}"
            )
        log.info("finished: %s", done.folder)
    except FedcoverError as error:
        log.error("stopped: %s", error)
        raise


def _reason(folder: Path | None) -> str:
    return most_common_failure(read_events(folder / "events.jsonl") if folder else [])


def serve(grid: Grid, settings: RunConfig) -> Run:
    """Run, or go on with, an experiment on the nodes behind a grid."""
    folder, again = Path(settings.folder), settings.resume
    experiment = Experiment.from_toml(settings.experiment)
    if again:
        experiment = experiment_to_resume(folder, experiment)
    elif settings.overwrite:
        Folder(folder).clear()
    elif Folder(folder).has_run():
        raise RunError(
            f"{folder} holds a run already: go on with it (--resume), or choose another name, or --overwrite"
        )
    wanted = None
    if experiment.partition == "nodes":
        wanted = data_requirements(
            build_source(experiment, "cpu", settings.data or None), experiment.clients
        )
    transport, node_registry = Transport(grid), NodeRegistry(requirements=wanted)
    fleet_is_open = is_open(experiment)
    if again and not fleet_is_open:
        node_registry.capacities = capacities(experiment)
    pending_lines: list[str] = []
    if not again or not (folder / "summary.json").exists():  # else nothing is left for nodes to do
        with (
            Folder(folder).opened() if again else nullcontext()
        ):  # who watches it sees that it has not stopped
            wait_for_nodes(
                transport,
                node_registry,
                EventLog(None, pending_lines),
                nodes=settings.nodes,
                timeout=settings.wait,
            )
    if not again:
        experiment = with_declared_capacities(experiment, node_registry)
        node_registry.capacities = () if fleet_is_open else capacities(experiment)
    options = RoundOptions(
        experiment.to_toml(), experiment.clients, settings.deadline, experiment.privacy != "none", fleet_is_open,
        own_model=registry.is_import_path(experiment.model),
    )  # fmt: skip
    engine = FlowerEngine(
        transport, node_registry, options, EventLog(folder / "events.jsonl", pending_lines)
    )
    machine = Machine("flower", settings.device, settings.threads or None)
    conclusions = _after_rounds()
    next(conclusions)
    watch = conclusions.send
    common: dict[str, Any] = {
        "machine": machine,
        "data": settings.data or None,
        "watch": watch,
        "engine": engine,
    }
    return (
        resume(folder, complain=log.warning, **common)
        if again
        else run(experiment, folder, **common)
    )


def experiment_to_resume(folder: Path, asked: Experiment) -> Experiment:
    """The experiment of a run that is gone on with; nothing can be changed on the way but what nodes declare."""
    found = Folder(folder).read()
    if found.names_other_functions(asked):
        raise InvalidValue("a run that is gone on with cannot be changed: it names other functions")
    experiment = found.experiment
    known, wanted = experiment.model_dump(), asked.model_dump()
    other = [
        name for name in known if name not in ("name", "fleet") and known[name] != wanted[name]
    ]
    if other:
        told = ", ".join(f"{name} = {wanted[name]!r} (was {known[name]!r})" for name in other)
        raise InvalidValue(f"a run that is gone on with cannot be changed: {told}")
    return experiment


def is_open(experiment: Experiment) -> bool:
    """Whether nodes may come, leave and change capacity between rounds, and cohorts are drawn among those there.

    Not where turns are counted beforehand (privacy), nor where capacities belong to slots or come with a codename.
    """
    own = (
        experiment.privacy != "none"
        or registry.parse("policy", experiment.policy).name == "regions"
    )
    return experiment.assignment == "device" and not own


def capacities(experiment: Experiment) -> list[float]:
    """What every client must be able to hold: its capacity, or the largest where capacities belong to slots."""
    fleet = experiment.scaled_fleet
    if experiment.assignment == "slot":
        return [max(fleet.capacities)] * experiment.clients
    return [fleet.capacity(client) for client in range(experiment.clients)]


def with_declared_capacities(experiment: Experiment, node_registry: NodeRegistry) -> Experiment:
    """The experiment with the fleet that its nodes declare, so that its folder says what was run."""
    if all(known.capacity is None for known in node_registry.node_info.values()):
        return experiment
    if experiment.assignment == "slot":
        raise InvalidValue(
            "capacities belong to slots in this experiment (assignment = 'slot'), so nodes must not declare any"
        )
    known = capacities(experiment)
    declared = Fleet.parse(
        declared_fleet(node_registry.node_info.values(), experiment.clients, known)
    )
    if all(declared.capacity(client) == capacity for client, capacity in enumerate(known)):
        return experiment
    return Experiment(**{**experiment.model_dump(), "fleet": str(declared)})


def _after_rounds() -> Generator[None, RoundReport, None]:
    """What is done after each round; the first one imports and builds what all others use."""
    _after_round((yield))
    with reserve():
        while True:
            _after_round((yield))


def _after_round(report: RoundReport) -> None:
    _log_round(report)
    tidy()


def _log_round(report: RoundReport) -> None:
    figures = {name: report.metrics[name] for name in ("accuracy", "gamma_round", *UNANSWERED)
               if name in report.metrics}  # fmt: skip
    log.info("round %d: %s", report.round + 1, figures)
