"""Run the missing cells of the paper's tables.

Also a program: `python -m fedcover.paper.reproduce table1 seeds=1`. It needs no command-line
packages, only torch, numpy, pydantic, safetensors and tomli_w.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcover.errors import FedcoverError, InvalidValue, unknown
from fedcover.host import signals
from fedcover.paper import document, results, store
from fedcover.paper.cells import AXES, SETS, Cell, cells, select_cells
from fedcover.paper.evidence import Evidence
from fedcover.paper.results import CellRun
from fedcover.paper.smoke import smoke_cell
from fedcover.runs import plotting
from fedcover.runs.api import RoundCallback
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.sweep import sweep
from fedcover.server.round import RoundReport

RESULTS = Path("results") / "reproduction"
SMOKE_RESULTS = Path("runs") / "reproduction-quick"
DOCS = Path("docs")
SEEDS = 3
UNFINISHED = "unfinished"
CHECKPOINT_EVERY = 10
"""Rounds between checkpoints. A checkpoint in every round would cost more than it saves."""

ProgressFactory = Callable[[str, int], AbstractContextManager[RoundCallback]]
CellSeed = tuple[Cell, int]


@dataclass(frozen=True)
class ReproductionRequest:
    """What to reproduce: which sets, which cells and seeds, and whether as a smoke run."""

    sets: tuple[str, ...]
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seeds: int | None = None
    smoke: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise InvalidValue(f"seeds must be at least 1; got {self.seeds}")

    @property
    def seed_count(self) -> int:
        """The number of seeds, which start at 0."""
        return self.seeds or (1 if self.smoke else SEEDS)

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return self.out or (SMOKE_RESULTS if self.smoke else RESULTS)

    def jobs(self) -> list[CellSeed]:
        """Return the selected cells and seeds.

        Cells at a second learning rate exist only once the rates have been tried.
        """
        second_rates = results.second_rates(store.load(self.folder), cells({}))
        selected = select_cells(cells(second_rates), self.sets, self.seed_count, self.only)
        if self.smoke:
            return [(smoke_cell(cell), seed) for cell, seed in selected]
        return selected


def orphan_warnings(request: ReproductionRequest) -> list[str]:
    """Return a line about each result or file that no cell is read from."""
    return [
        f"{entry} belongs to no cell and seed; it is left out"
        for entry in Evidence(request.folder).orphan_results()
    ]


def missing_jobs(folder: Path, jobs: Sequence[CellSeed]) -> list[CellSeed]:
    """Return the cells and seeds without a result."""
    records = store.load(folder)
    return [(cell, seed) for cell, seed in jobs if results.find_result(records, cell, seed) is None]


@contextmanager
def print_progress(title: str, rounds: int) -> Iterator[RoundCallback]:
    """Print a line for every tenth round and the last; this needs no package."""

    def show(report: RoundReport) -> None:
        if (report.round + 1) % 10 == 0 or report.round + 1 == rounds:
            accuracy = report.metrics.get("accuracy")
            print(
                f"{title}  round {report.round + 1}/{rounds}  accuracy {accuracy}",
                file=sys.stderr,
                flush=True,
            )

    yield show


def run_experiments(
    experiments: Sequence[Experiment],
    machine: Machine,
    data: str | Path | None = None,
    show_progress: ProgressFactory = print_progress,
    runs: Path | None = None,
) -> Iterator[CellRun]:
    """Run experiments of one shape in lockstep, and yield each as it ends."""
    title = f"{len(experiments)} runs, {experiments[0].name} first"
    with show_progress(title, experiments[0].rounds) as watch:

        def show(experiment: Experiment, report: RoundReport) -> None:
            if experiment is experiments[0]:
                watch(report)

        for run in sweep(experiments, runs=runs, machine=machine, data=data, watch=show):
            used_machine = replace(machine, engine=run.engine, processes=1)
            yield CellRun(run.experiment, run.metrics, used_machine, run.diverged or None)


SHAPE_FIELDS = (
    "dataset",
    "model",
    "validation",
    "clients",
    "active",
    "rounds",
    "epochs",
    "batch_size",
)


def group_by_shape(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Group experiments of equal data, model, rounds and local training: they can run in step."""
    groups: dict[tuple[object, ...], list[Experiment]] = {}
    for experiment in experiments:
        shape = tuple(getattr(experiment, name) for name in SHAPE_FIELDS)
        groups.setdefault(shape, []).append(experiment)
    return list(groups.values())


def reproduce(
    request: ReproductionRequest,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    show_progress: ProgressFactory = print_progress,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Run every requested cell and seed without a result, and return the new results.

    Each result is on disk as soon as its run ends. Unfinished runs have folders of their own below
    the results, from which the same call resumes.
    """
    resolved_machine = (machine or Machine()).resolved()
    jobs = request.jobs()
    missing = missing_jobs(request.folder, jobs)
    tell(f"{len(missing)} of {len(jobs)} runs are missing in {request.folder}")
    cell_by_name = {cell.with_seed(seed).name: cell for cell, seed in missing}
    new_results = []
    unfinished = request.folder / UNFINISHED
    for group in group_by_shape(cell.with_seed(seed) for cell, seed in missing):
        experiments = [
            experiment.model_copy(update={"checkpoint_every": CHECKPOINT_EVERY})
            for experiment in group
        ]
        for finished in run_experiments(
            experiments, resolved_machine, data, show_progress, unfinished
        ):
            name = finished.experiment.name
            cell = cell_by_name[name]
            result = results.to_result(cell, finished)
            store.write(request.folder, cell, result)
            new_results.append(result)
            # The result is stored, so the run folder is no longer needed.
            shutil.rmtree(unfinished / name, ignore_errors=True)
            tell(f"{len(new_results)}/{len(missing)}  {name}")
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return new_results


# ── the program without command-line packages ───────────────────────────────────────────────────

DEFAULT_OPTIONS = {
    "seeds": "",
    "quick": "false",
    "out": "",
    "data": "",
    "device": "auto",
    "engine": "auto",
    "precision": "fp32",
    "processes": "auto",
}


def parse_only(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse filters such as dataset=mnist,cifar10. Several filters must all hold.

    >>> parse_only(["dataset=mnist,cifar10", "seed=0"])
    {'dataset': ['mnist', 'cifar10'], 'seed': ['0']}
    """
    filters: dict[str, list[str]] = {}
    for text in texts:
        axis, equals, values = text.partition("=")
        if not equals or axis not in AXES:
            raise InvalidValue(
                f"only must look like axis=value,value with an axis of {', '.join(AXES)};"
                f" got {text!r}"
            )
        filters.setdefault(axis, []).extend(values.split(","))
    return filters


def main(words: Sequence[str]) -> None:
    """Run sets by name, with filters and options as key=value; `docs` writes the document."""
    sets = [word for word in words if "=" not in word]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    filters = {key: value for key, value in settings.items() if key not in DEFAULT_OPTIONS}
    only = parse_only([f"{key}={value}" for key, value in filters.items()])
    options = {key: settings.get(key, default) for key, default in DEFAULT_OPTIONS.items()}
    if not sets:
        raise unknown("reproduce", "", [*SETS, "docs"])
    request = _parse_request(sets, only, options)
    if "docs" in sets:
        plotting.check_plot_path("figure.svg")
    if request.sets:
        reproduce(
            request,
            machine=_parse_machine(options),
            data=options["data"] or None,
            tell=lambda line: print(line, flush=True),
        )
    if "docs" in sets:
        for path in document.write(request.folder, DOCS):
            print(path)
        for line in orphan_warnings(request):
            print(line, file=sys.stderr)


def _parse_request(
    sets: Sequence[str], only: dict[str, list[str]], options: Mapping[str, str]
) -> ReproductionRequest:
    quick, seeds = options["quick"], options["seeds"]
    if quick not in ("true", "false") or not (seeds or "1").isdecimal():
        raise InvalidValue(f"quick must be true or false and seeds a number; got {quick}, {seeds}")
    return ReproductionRequest(
        sets=tuple(name for name in sets if name != "docs"),
        only=only,
        seeds=int(seeds) if seeds else None,
        smoke=quick == "true",
        out=Path(options["out"]) if options["out"] else None,
    )


def _parse_machine(options: Mapping[str, str]) -> Machine:
    count = options["processes"]
    return Machine(
        engine=options["engine"],
        device=options["device"],
        precision=options["precision"],
        processes=int(count) if count.isdecimal() else count,
    )


if __name__ == "__main__":
    try:
        with signals.raise_on_signals():
            main(sys.argv[1:])
    except FedcoverError as error:
        sys.exit(f"fedcover: {error}")
    except KeyboardInterrupt as error:
        command = shlex.join(["python", "-m", "fedcover.paper.reproduce", *sys.argv[1:]])
        print(f"stopped; finished runs are kept; resume with: {command}", file=sys.stderr)
        sys.exit(signals.exit_code(error))
