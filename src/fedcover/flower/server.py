"""The server's side: an ordinary run, whose engine is Flower, inside Flower's ServerApp."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover.errors import FedcoverError
from fedcover.experiment import Experiment
from fedcover.flower.engine import Events, FlowerEngine, Terms, gather, log_to_stderr
from fedcover.flower.link import Link
from fedcover.flower.places import Roster, declared_fleet
from fedcover.folders import Folder
from fedcover.preparation import Machine
from fedcover.rounds import Report
from fedcover.runs import Run, resume, run

log = logging.getLogger("fedcover")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run on Flower is started with, beside the experiment itself; all of it fits Flower's run config."""

    experiment: str
    folder: str
    data: str = ""
    device: str = "auto"
    threads: int = 0
    nodes: int = 0
    deadline: float = 300.0
    wait: float = 60.0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Settings":
        """From Flower's run config."""
        return cls(**{name: kind(config[name]) for name, kind in _KINDS.items()})


_KINDS = {
    "experiment": str, "folder": str, "data": str, "device": str,
    "threads": int, "nodes": int, "deadline": float, "wait": float,
}  # fmt: skip


def experiment_app() -> ServerApp:
    """The ServerApp that runs an experiment, or goes on with it where its folder holds one already."""
    app = ServerApp()
    app.main()(_main)
    return app


def _main(grid: Grid, context: Context) -> None:
    log_to_stderr()
    try:
        serve(grid, Settings.read(context.run_config))
    except FedcoverError as error:
        log.error("%s", error)
        raise


def serve(grid: Grid, settings: Settings) -> Run:
    """Run, or go on with, an experiment on the nodes behind a grid."""
    folder = Path(settings.folder)
    begun = (folder / "experiment.toml").exists()
    experiment = Folder(folder).experiment if begun else Experiment.from_toml(settings.experiment)
    link, roster, events = Link(grid), Roster(), Events(None)
    gather(link, roster, events, nodes=settings.nodes, patience=settings.wait)
    if not begun:
        experiment = with_declared_capacities(experiment, roster)
    terms = Terms(experiment.to_toml(), experiment.clients, settings.deadline)
    machine = Machine("flower", settings.device, settings.threads or None)
    engine = FlowerEngine(link, roster, terms, Events(folder / "events.jsonl"))
    common: dict[str, Any] = {"machine": machine, "data": settings.data or None, "watch": _say, "engine": engine}
    return resume(folder, complain=log.warning, **common) if begun else run(experiment, folder, **common)


def with_declared_capacities(experiment: Experiment, roster: Roster) -> Experiment:
    """The experiment with the fleet that its nodes declare, so that its folder says what was run."""
    declaring = [known for known in roster.known.values() if known.capacity is not None]
    if not declaring:
        return experiment
    if experiment.assignment == "slot":
        raise FedcoverError(
            "capacities belong to slots in this experiment (assignment = 'slot'), so nodes must not declare any"
        )
    fleet = experiment.scaled_fleet
    known = [fleet.capacity(client) for client in range(experiment.clients)]
    return Experiment(**{**experiment.model_dump(), "fleet": declared_fleet(declaring, experiment.clients, known)})


def _say(report: Report) -> None:
    figures = {name: report.metrics[name] for name in ("accuracy", "gamma_round", "rejected", "late", "lost")
               if name in report.metrics}  # fmt: skip
    log.info("round %d: %s", report.round + 1, figures)
