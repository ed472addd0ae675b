"""Run folders: what was run, how it went, and everything needed to go on, replay or take the model away.

runs/<name>/
    experiment.toml   the experiment, resolved          manifest.json   versions, commit, engine, device, threads
    metrics.jsonl     one line a round                  summary.json    the result in a few numbers
    checkpoints/      the two newest states             kept/           the states of the rounds in `keep_rounds`
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedcover.errors import InvalidValue, RunError
from fedcover.host import signals
from fedcover.policies.base import fits
from fedcover.runs import checkpoints, plotting
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.experiment import Experiment, read_experiment
from fedcover.runs.launch import WorkerJob, launch_workers, limit_processes
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import Metrics, summarise
from fedcover.runs.released_rounds import figures, warn_of_removable_noise
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import RunSession, check_same_model, load_latest
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.cohort import cohort_of, reduction_for_capacity, view_of
from fedcover.server.evaluation import FULL_REDUCTION, eval_model
from fedcover.server.round import RoundReport, initial_state, run_round
from fedcover.server.round_setup import Setup
from fedcover.types import Dataset, Engine, Model, Policy, Reduction, State

RoundCallback = Callable[[RoundReport], None]


@dataclass(frozen=True, repr=False)
class Run:
    """A finished (or stopped) run: its experiment, its figures, and the model it has made."""

    experiment: Experiment
    setup: Setup = field(repr=False)
    state: State = field(repr=False)
    metrics: Metrics = field(repr=False)
    folder: Path | None = None

    def __repr__(self) -> str:
        figures = (
            f", accuracy={self.accuracy:.4f}, gamma_min={self.gamma_min}" if self._evaluated else ""
        )
        return f"Run({self.experiment.name!r}, rounds={len(self.metrics)}{figures})"

    @property
    def _evaluated(self) -> bool:
        return any("accuracy" in line for line in self.metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """The result in a few numbers, as in summary.json."""
        return summarise(self.metrics)

    @property
    def accuracy(self) -> float:
        """Accuracy of the global model on the test set when it was last evaluated."""
        accuracy = self.summary["accuracy"]
        if accuracy is None:
            raise RunError(
                f"the model has not been evaluated in its {self.state.round} rounds: see evaluate_every"
            )
        return float(accuracy)

    @property
    def gamma_min(self) -> int:
        """The fewest clients that trained any parameter in any round."""
        return int(self.summary["gamma_min"])

    def model(self) -> nn.Module:
        """The trained global model, ready to use."""
        return eval_model(self.setup.task, self.state, FULL_REDUCTION, 1.0)

    def submodel(self, capacity: float) -> nn.Module:
        """The part of the trained model that a device of some capacity holds, ready to use."""
        return eval_model(self.setup.task, self.state, self.part(capacity), capacity)

    def plot(self, path: str | Path | None = None) -> Any:
        """The run's curves as a matplotlib figure, written to a file (.png, .svg, .pdf) if one is named."""
        figure = plotting.draw({self.experiment.name: [self.metrics]})
        if path is not None:
            plotting.save(figure, path)
        return figure

    def part(self, capacity: float) -> Reduction:
        """The reduction that the run's policy gives a device of some capacity."""
        if not isinstance(capacity, int | float) or not 0 < capacity <= 1:
            raise InvalidValue(f"capacity must be in (0, 1]; got {capacity!r:.80}")
        if capacity == 1:
            return FULL_REDUCTION
        part = reduction_for_capacity(self.setup, self.state, capacity)
        view = view_of(self.setup, self.state, cohort_of(self.setup, self.state.round))
        if part is None or not fits(view, capacity, part):
            raise InvalidValue(
                f"this run trains no part for a device of capacity {capacity:g}: its policy "
                f"{self.experiment.policy!r} gives it none, or more than it can hold"
            )
        return part


def run(
    experiment: Experiment | str | Path,
    folder: str | Path | None = None,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: Policy | None = None,
    engine: Engine | None = None,
    watch: RoundCallback | None = None,
    overwrite: bool = False,
) -> Run:
    """Run an experiment (or the one in a TOML file), in memory or into a new run folder.

    `dataset`, `model`, `policy` and `engine` made in Python replace what the experiment and machine name; `watch` sees
    every round. With `overwrite` a run that is in the folder is lost.

    >>> result = run(Experiment(fleet="1x1.0 + 1x0.5", policy="prefix", clients=20, active=4, rounds=2, epochs=1))
    >>> result.gamma_min >= 0, result.state.round
    (True, 2)
    """
    parts = Overrides(dataset, model, policy, engine)
    _check_watch(watch)
    if isinstance(experiment, str | Path):
        experiment = read_experiment(Path(experiment))
    if not isinstance(experiment, Experiment):
        raise InvalidValue(
            f"experiment must be an Experiment or a path; got {type(experiment).__name__}"
        )
    check_data_is_local(experiment, engine)
    chosen = (machine or Machine()).resolved()
    setup = prepare(experiment, chosen, data=data, parts=parts)
    chosen = limit_processes(chosen.for_setup(setup), setup)
    with chosen.applied():
        job = WorkerJob(experiment, chosen, data, parts, setup.rounds)
        if folder is None:
            return _run_rounds(job, RunSession(experiment, setup, initial_state(setup), []), watch)
        with Folder(Path(folder)).created(experiment, chosen, parts, data, overwrite) as made:
            course = RunSession(experiment, setup, initial_state(setup), [], made)
            made.keep(course.state)
            return _run_rounds(job, course, watch)


def resume(
    folder: str | Path,
    *,
    machine: Machine | None = None,
    force: bool = False,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: Policy | None = None,
    engine: Engine | None = None,
    watch: RoundCallback | None = None,
    complain: Callable[[str], None] = print,
    trust: bool = False,
) -> Run:
    """Go on where a run folder stops; ends like a run that was never interrupted.

    A function of some module that the folder names is called only if this process has named it before, or with `trust`.
    """
    parts = Overrides(dataset, model, policy, engine)
    _check_watch(watch)
    with Folder(Path(folder), trust).opened() as found:
        chosen = found.machine(machine, force=force)
        found.check_overrides(parts)
        with chosen.applied():
            setup = prepare(found.experiment, chosen, data=data or found.data, parts=parts)
            course = RunSession(
                found.experiment, setup, *load_latest(found, setup, chosen.device, complain), found
            )
            if course.running:
                check_data_is_local(found.experiment, engine)
            chosen = limit_processes(chosen, setup)
            found.record_machine(chosen, course.state.round)
            job = WorkerJob(found.experiment, chosen, data or found.data, parts, setup.rounds)
            return _run_rounds(job, course, watch)


def load(
    folder: str | Path,
    *,
    device: str = "cpu",
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: Policy | None = None,
    trust: bool = False,
) -> Run:
    """A run folder's newest state and figures, without running anything; `trust` as in `resume`."""
    parts = Overrides(dataset, model, policy)
    found = Folder(Path(folder), trust).read()
    found.check_overrides(parts)
    machine = Machine(device=device).resolved()
    setup = prepare(found.experiment, machine, data=data or found.data, parts=parts)
    state, _ = checkpoints.newest(found.checkpoints, found.experiment.digest, machine.device)
    check_same_model(found, setup, state)
    warn_of_removable_noise(found)
    return Run(found.experiment, setup, state, figures(found, state), found.path)


def replay(
    folder: str | Path,
    round: int,
    *,
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: Policy | None = None,
    trust: bool = False,
) -> tuple[State, RoundReport]:
    """Run a kept round again, exactly: its state was kept, and all its randomness has an address."""
    parts = Overrides(dataset, model, policy)
    found = Folder(Path(folder), trust).read()
    found.check_overrides(parts)
    check_data_is_local(found.experiment)
    if found.experiment.privacy != "none":
        raise InvalidValue(
            "privacy: a private round cannot be run again: its noise would be drawn anew, uncounted"
        )
    kept = {file.round: file for file in checkpoints.found(found.kept)}
    if round not in kept:
        listed = ", ".join(map(str, sorted(kept))) or "none (set keep_rounds)"
        raise RunError(f"{found.path} keeps no state of round {round}; kept rounds: {listed}")
    chosen = found.machine(None)
    with chosen.applied():
        setup = prepare(found.experiment, chosen, data=data or found.data, parts=parts)
        state = checkpoints.read(kept[round], found.experiment.digest, chosen.device)
        check_same_model(found, setup, state)
        chosen = limit_processes(chosen, setup)
        with launch_workers(
            WorkerJob(found.experiment, chosen, data or found.data, parts, round + 1), setup, state
        ) as team:
            return run_round(team, state)


def _check_watch(watch: object) -> None:
    if isinstance(watch, type) or not (watch is None or callable(watch)):
        raise InvalidValue(
            f"watch must be a function of a round's report, or None; got {watch!r:.80}"
        )


def _run_rounds(job: WorkerJob, course: RunSession, watch: RoundCallback | None) -> Run:
    """Rounds up to the last one; only the course has the state, so that none is kept longer than its round."""
    with (
        signals.raise_on_signals(),
        course.checkpoint_on_exit(),
        launch_workers(job, course.setup, course.state) as team,
    ):
        while course.running:
            after, report = run_round(team, course.state)
            course.record_round(after, report)
            if watch:
                watch(report)
    course.finish()
    folder = course.folder.path if course.folder else None
    return Run(course.experiment, course.setup, course.state, course.metrics, folder)
