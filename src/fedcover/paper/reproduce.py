"""Run what is missing of the paper's tables, cell by cell; also `python -m fedcover.paper.reproduce table1 seeds=1`.

This module needs no command-line packages, so that it runs where only torch, numpy, pydantic and safetensors are.
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
from fedcover.paper.cells import AXES, SETS, Cell, cells, select_cells, smoke_cell
from fedcover.paper.evidence import Evidence
from fedcover.paper.results import Finished
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
"""Rounds of a stopped run that are run again at most; a checkpoint in every round would cost more than it saves."""

ProgressFactory = Callable[[str, int], AbstractContextManager[RoundCallback]]
CellSeed = tuple[Cell, int]


@dataclass(frozen=True)
class ReproductionRequest:
    """What is to be reproduced: which sets, which of their cells and seeds, at full size or as a smoke run."""

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
        """How many seeds, from 0 on."""
        return self.seeds or (1 if self.smoke else SEEDS)

    @property
    def folder(self) -> Path:
        """Where the results lie."""
        return self.out or (SMOKE_RESULTS if self.smoke else RESULTS)

    def jobs(self) -> list[CellSeed]:
        """The cells and seeds that are wanted; the second learning rates are known only once the first was chosen."""
        known = cells(results.second_rates(store.load(self.folder), cells({})))
        wanted = select_cells(known, self.sets, self.seed_count, self.only)
        return [(smoke_cell(cell), seed) for cell, seed in wanted] if self.smoke else wanted


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
    """Progress without any package: a line for every tenth round."""

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
) -> Iterator[Finished]:
    """Run experiments of one shape in lockstep, each into its folder below `runs`, and hand each over as it ends."""
    title = f"{len(experiments)} runs, {experiments[0].name} first"
    with show_progress(title, experiments[0].rounds) as watch:

        def show(experiment: Experiment, report: RoundReport) -> None:
            if experiment is experiments[0]:
                watch(report)

        for done in sweep(experiments, runs=runs, machine=machine, data=data, watch=show):
            how = replace(machine, engine=done.engine, processes=1)
            yield Finished(done.experiment, done.metrics, how, done.diverged or None)


def group_by_shape(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Those of one shape together: same data, model, rounds and local training, so that they could run in step."""
    alike: dict[tuple[object, ...], list[Experiment]] = {}
    for e in experiments:
        shape = (
            e.dataset,
            e.model,
            e.validation,
            e.clients,
            e.active,
            e.rounds,
            e.epochs,
            e.batch_size,
        )
        alike.setdefault(shape, []).append(e)
    return list(alike.values())


def reproduce(
    request: ReproductionRequest,
    *,
    machine: Machine | None = None,
    data: str | Path | None = None,
    show_progress: ProgressFactory = print_progress,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Run every cell and seed that is wanted and missing, and return the new results.

    Each result is on disk as soon as its run ends. Unfinished runs have folders of their own beside the results, from
    which the same call resumes.
    """
    chosen_machine = (machine or Machine()).resolved()
    jobs = request.jobs()
    todo = missing_jobs(request.folder, jobs)
    tell(f"{len(todo)} of {len(jobs)} runs are missing in {request.folder}")
    cell_of = {cell.with_seed(seed).name: cell for cell, seed in todo}
    new_results = []
    unfinished = request.folder / UNFINISHED
    for group in group_by_shape(cell.with_seed(seed) for cell, seed in todo):
        rarely = [e.model_copy(update={"checkpoint_every": CHECKPOINT_EVERY}) for e in group]
        for finished in run_experiments(rarely, chosen_machine, data, show_progress, unfinished):
            cell = cell_of[finished.experiment.name]
            result = results.to_result(cell, finished)
            store.write(request.folder, cell, result)
            new_results.append(result)
            shutil.rmtree(
                unfinished / finished.experiment.name, ignore_errors=True
            )  # the result is safe without it
            tell(f"{len(new_results)}/{len(todo)}  {finished.experiment.name}")
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return new_results


# ── without a command line ──────────────────────────────────────────────────────────────────────────────


def parse_only(texts: Sequence[str]) -> dict[str, list[str]]:
    """Filters such as dataset=mnist,cifar10; several filters must all hold.

    >>> parse_only(["dataset=mnist,cifar10", "seed=0"])
    {'dataset': ['mnist', 'cifar10'], 'seed': ['0']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        axis, equals, values = text.partition("=")
        if not equals or axis not in AXES:
            raise InvalidValue(
                f"only must look like axis=value,value with an axis of {', '.join(AXES)}; got {text!r}"
            )
        found.setdefault(axis, []).extend(values.split(","))
    return found


def main(words: Sequence[str]) -> None:
    """Sets by name, filters and options as key=value; `docs` writes the document from the results that are there."""
    options = {
        "seeds": "",
        "quick": "false",
        "out": "",
        "data": "",
        "device": "auto",
        "engine": "auto",
        "precision": "fp32",
        "processes": "auto",
    }
    sets = [word for word in words if "=" not in word]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    only = parse_only([f"{key}={value}" for key, value in given.items() if key not in options])
    options |= {key: value for key, value in given.items() if key in options}
    if not sets:
        raise unknown("reproduce", "", [*SETS, "docs"])
    out = Path(options["out"]) if options["out"] else None
    if options["quick"] not in ("true", "false") or not (options["seeds"] or "1").isdecimal():
        raise InvalidValue(
            f"quick must be true or false and seeds a number; got {options['quick']}, {options['seeds']}"
        )
    seeds = int(options["seeds"]) if options["seeds"] else None
    request = ReproductionRequest(
        tuple(name for name in sets if name != "docs"), only, seeds, options["quick"] == "true", out
    )
    if request.sets:
        count = options["processes"]
        processes = int(count) if count.isdecimal() else count
        machine = Machine(
            options["engine"],
            options["device"],
            precision=options["precision"],
            processes=processes,
        )
        reproduce(
            request,
            machine=machine,
            data=options["data"] or None,
            tell=lambda line: print(line, flush=True),
        )
    if "docs" in sets:
        for path in document.write(request.folder, DOCS):
            print(path)
        for line in orphan_warnings(request):
            print(line, file=sys.stderr)


if __name__ == "__main__":
    try:
        with signals.raise_on_signals():
            main(sys.argv[1:])
    except FedcoverError as error:
        sys.exit(f"fedcover: {error}")
    except KeyboardInterrupt as error:
        again = shlex.join(["python", "-m", "fedcover.paper.reproduce", *sys.argv[1:]])
        print(f"stopped; what has ended is kept; resume with: {again}", file=sys.stderr)
        sys.exit(signals.exit_code(error))
