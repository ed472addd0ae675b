"""Is a fleet's full model worth having? Runs plans/assembled_or_small.md, run by run, and writes
the table.

    python -m benchmarks.assembled_or_small choose --device cuda --precision bf16 --workers 6
    python -m benchmarks.assembled_or_small judge  --device cuda --precision bf16 --workers 3
    python -m benchmarks.assembled_or_small table

Prefix runs belong to the comparison (its part 5) and are kept there. The same command goes on where
it was stopped.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.coverage import sheets
from benchmarks.coverage.candidates import copy_first_half, open_third_quarter
from benchmarks.coverage.cells import CIFAR, SEEDS, SHARED, TUNING_SEED, Cell
from benchmarks.coverage.student import paired_contrast
from benchmarks.coverage_comparison import RESULTS, measure
from fedcover.host.disk import write_atomically
from fedcover.paper.reproduce import print_progress, run_experiments
from fedcover.paper.results import provenance
from fedcover.paper.statistics import SIGNIFICANCE_LEVEL
from fedcover.runs import checkpoints
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.new_run import create_run
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import Overrides, prepare
from fedcover.types import State, UnitGroup

FOLDER = RESULTS / "coverage_comparison"
JUDGED = SEEDS[:3]
WORTH = 0.005
"""The difference in accuracy from which on a winner is called one."""

POLICIES = "benchmarks.coverage.candidates"


@dataclass(frozen=True)
class Candidate:
    """What differs from the prefix run, from which round on, and how the model is changed then."""

    fields: dict[str, Any]
    start: int = 0
    change: Callable[[Sequence[UnitGroup], State], State] | None = None


CANDIDATES = {
    "star": Candidate({"policy": f"{POLICIES}:star"}),
    "scaler": Candidate({"policy": "random", "scaler": True}),
    "grow": Candidate({"policy": f"{POLICIES}:star"}, 80, open_third_quarter),
    "twins60": Candidate({"policy": f"{POLICIES}:twins"}, 60, copy_first_half),
    "twins80": Candidate({"policy": f"{POLICIES}:twins"}, 80, copy_first_half),
}
PREFIX = Cell("cifar/prefix", {**SHARED, **CIFAR, "policy": "prefix"})


def cell_of(name: str) -> Cell:
    """A candidate's cell; what it grows from is the cell of prefix."""
    return Cell(f"bar/{name}", {**PREFIX.fields, **CANDIDATES[name].fields})


def run(wanted: Iterable[tuple[Cell, int]], folder: Path, machine: Machine) -> None:
    """Run cells and seeds that are missing and keep what they say; folders of prefix stay, others
    grow from them.
    """
    todo = [(cell, seed) for cell, seed in wanted if not _known(folder, cell, seed)]
    of = {_experiment(cell, seed).name: (cell, seed) for cell, seed in todo}
    if not todo:
        return
    for result in run_experiments(
        [_experiment(*each) for each in todo],
        machine,
        show_progress=print_progress,
        runs=folder / "runs",
    ):
        cell, seed = of[result.experiment.name]
        own = folder / "runs" / result.experiment.name
        line = {"seed": seed, "lr": result.experiment.lr, **measure(result, cell.measured, own)}
        sheets.add(
            folder, cell, "tuning" if seed == TUNING_SEED else "runs", line, provenance(result)
        )
        print(
            f"{own.name}: test {line['test']:.4f}, validation {line['validation']:.4f}",
            file=sys.stderr,
            flush=True,
        )
        if cell.id != PREFIX.id:
            shutil.rmtree(own)


def _known(folder: Path, cell: Cell, seed: int) -> bool:
    return any(
        line["seed"] == seed
        for part in ("tuning", "runs")
        for line in sheets.read(folder, cell)[part]
    )


def _experiment(cell: Cell, seed: int) -> Experiment:
    starts = sorted({candidate.start for candidate in CANDIDATES.values()} - {0})
    keep = (*starts, *cell.measured) if cell.id == PREFIX.id else cell.measured
    return cell.experiment(seed, float(cell.fields["lr"])).model_copy(update={"keep_rounds": keep})


def start_from_prefix(name: str, seed: int, folder: Path, machine: Machine) -> None:
    """Begin the folder of a candidate that grows from prefix: its rounds up to then, and the
    changed model.
    """
    candidate, cell = CANDIDATES[name], cell_of(name)
    experiment = _experiment(cell, seed)
    own = Folder(folder / "runs" / experiment.name)
    if candidate.change is None or own.path.exists() or _known(folder, cell, seed):
        return
    prefix = Folder(folder / "runs" / _experiment(PREFIX, seed).name).read()
    file_by_round = {file.round: file for file in checkpoints.list_checkpoints(prefix.kept)}
    state = checkpoints.load_checkpoint(
        file_by_round[candidate.start], prefix.experiment.digest, "cpu"
    )
    groups = prepare(
        experiment, Machine(device="cpu", engine="sequential").resolved()
    ).task.model.groups
    with create_run(own, experiment, replace(machine, processes=1), Overrides(), None):
        for line in prefix.metrics(candidate.start):
            own.append(line)
        own.checkpoint(candidate.change(groups, state))


def choose(folder: Path, machine: Machine, first: Sequence[int]) -> None:
    """Prefix for the seeds that are needed, then every candidate with the seed that is
    not judged.
    """
    early = [name for name, candidate in CANDIDATES.items() if not candidate.start]
    run(
        [*((PREFIX, s) for s in first), *((cell_of(name), TUNING_SEED) for name in early)],
        folder,
        machine,
    )
    for name in CANDIDATES:
        start_from_prefix(name, TUNING_SEED, folder, machine)
    run([(cell_of(name), TUNING_SEED) for name in CANDIDATES], folder, machine)


def best(folder: Path) -> str:
    """The candidate that is best on validation data."""
    tried = {name: sheets.read(folder, cell_of(name))["tuning"] for name in CANDIDATES}
    return max(
        (name for name in tried if tried[name]),
        key=lambda name: float(tried[name][0]["validation"]),
    )


def judge(folder: Path, machine: Machine, seeds: Sequence[int]) -> None:
    """The chosen candidate with the seeds that are judged."""
    name = best(folder)
    run([(PREFIX, seed) for seed in seeds], folder, machine)
    for seed in seeds:
        start_from_prefix(name, seed, folder, machine)
    run([(cell_of(name), seed) for seed in seeds], folder, machine)


def table(folder: Path) -> str:
    """What was found, in Markdown."""
    prefix = sheets.read(folder, PREFIX)
    rows = ["| candidate | assembled, validation | assembled, test |", "|---|---|---|"]
    tuned = {"prefix": prefix, **{name: sheets.read(folder, cell_of(name)) for name in CANDIDATES}}
    for name, sheet in tuned.items():
        for line in sheet["tuning"]:
            rows.append(f"| {name} | {line['validation']:.4f} | {line['test']:.4f} |")
    for line in prefix["tuning"]:
        rows.append(f"| the half-width model inside prefix | - | {line['single']:.4f} |")
    text = [
        "# Is a fleet's full model worth having?",
        "",
        "Plan: benchmarks/plans/assembled_or_small.md.",
        "",
    ]
    text += [f"Seed {TUNING_SEED}, which only chooses:", "", *rows, ""]
    if not any(sheet["tuning"] for name, sheet in tuned.items() if name != "prefix"):
        return "\n".join(text)
    name = best(folder)
    assembled = {line["seed"]: line["test"] for line in tuned[name]["runs"]}
    small = {line["seed"]: line["single"] for line in prefix["runs"] if line["seed"] in assembled}
    text += [
        f"Chosen: `{name}`. Judged:",
        "",
        "| seed | assembled | half-width model inside prefix |",
        "|---|---|---|",
    ]
    text += [f"| {seed} | {assembled[seed]:.4f} | {small[seed]:.4f} |" for seed in sorted(small)]
    for contrast in paired_contrast(name, assembled, small):
        wins = contrast.p < SIGNIFICANCE_LEVEL and contrast.mean >= WORTH
        text += [
            "",
            f"Difference: {100 * contrast.mean:+.2f} percentage points, "
            f"95 % interval +- {100 * contrast.half_width:.2f}, "
            f"standard deviation {100 * contrast.spread:.2f}, "
            f"p = {contrast.p:.3f}, {contrast.seeds} seeds: "
            f"{'it wins' if wins else 'not shown to win'}.",
        ]
    return "\n".join([*text, ""])


def main() -> None:
    """Choose, judge, or only write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["choose", "judge", "table"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    chosen = parser.parse_args()
    machine = replace(
        Machine(device=chosen.device, precision=chosen.precision).resolved(),
        processes=chosen.workers,
    )
    if chosen.what == "choose":
        choose(chosen.folder, machine, (TUNING_SEED, *JUDGED))
    elif chosen.what == "judge":
        judge(chosen.folder, machine, JUDGED)
    write_atomically(chosen.folder / "assembled_or_small.md", table(chosen.folder).encode())
    print(chosen.folder / "assembled_or_small.md")


if __name__ == "__main__":
    main()
