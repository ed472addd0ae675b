"""Run the comparison of plans/coverage_comparison.md, and write its tables.

    python -m benchmarks.coverage_comparison [OPTIONS]

    --device cuda              all cells of a part take their steps together
    --device cpu --workers 2   one cell per worker process
    --quick                    a trial of minutes on digits, into a separate folder
    --table                    only write the tables from the stored results

A finished run is one line in the JSON file of its cell; an unfinished one is in its run folder.
Run the same command again to continue. If a cell's settings have changed since, it is an error.
"""

import argparse
import math
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.coverage import sheets
from benchmarks.coverage.analysis import markdown
from benchmarks.coverage.cells import PARTS, RATES, TUNING_SEED, Cell, quick
from fedcover.data import datasets
from fedcover.errors import FedcoverError
from fedcover.host.disk import write_atomically
from fedcover.paper.reproduce import group_by_shape, print_progress, run_experiments
from fedcover.paper.results import CellRun, provenance
from fedcover.runs import checkpoints
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import summarise
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.evaluation import ReusedGlobalModule, evaluate
from fedcover.server.round_metrics import evaluate_common_and_single
from fedcover.server.round_setup import Setup
from fedcover.submodels.coverage import covered_only
from fedcover.types import Dataset, State

RESULTS = Path(__file__).parent / "results"
GUESSING = 0.1
"""What a run that diverges counts."""


@dataclass(frozen=True)
class Job:
    """One run that is wanted: to choose a cell's learning rate (`tuning`), or to be judged
    (`runs`).
    """

    cell: Cell
    part: str
    seed: int
    lr: float

    @property
    def experiment(self) -> Experiment:
        """The run, under a name of its own."""
        return self.cell.experiment(self.seed, self.lr)


def run_wave(
    wave: Sequence[Cell], folder: Path, machine: Machine, rates: tuple[float, ...]
) -> None:
    """Run what cells lack: first to choose their learning rates, then to be judged."""
    _run(
        [
            Job(c, "tuning", TUNING_SEED, lr)
            for c in wave
            for lr in sheets.untried_rates(folder, c, rates)
        ],
        folder,
        machine,
    )
    chosen = [(cell, sheets.choose_rate(folder, cell)) for cell in wave]
    _run(
        [Job(c, "runs", seed, lr) for c, lr in chosen for seed in sheets.missing_seeds(folder, c)],
        folder,
        machine,
    )


def _run(jobs: Sequence[Job], folder: Path, machine: Machine) -> None:
    """Run jobs in lockstep; each is measured and kept as soon as it ends."""
    by_name = {job.experiment.name: job for job in jobs}
    lines: list[Path] = []
    try:
        for group in group_by_shape(job.experiment for job in jobs):
            for result in run_experiments(
                group, machine, show_progress=print_progress, runs=folder / "runs"
            ):
                job, own = by_name[result.experiment.name], folder / "runs" / result.experiment.name
                line = {"seed": job.seed, "lr": job.lr, **measure(result, job.cell.measured, own)}
                sheets.add(folder, job.cell, job.part, line, provenance(result))
                lines.append(own)
                print(
                    f"{len(lines)}/{len(jobs)}  {own.name}: {line['test']:.4f}",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for own in lines:
            shutil.rmtree(own)


def measure(done: CellRun, rounds: Sequence[int], folder: Path) -> dict[str, Any]:
    """What the plan wants to know of a run: means over the states after the rounds that
    it names.
    """
    seconds = sum(sum(line["seconds"].values()) for line in done.metrics)
    curve = [round(line["validation_accuracy"], 4) for line in done.metrics]
    figures = {"curve": curve, "seconds": round(seconds, 1)}
    if done.diverged:
        return {
            **dict.fromkeys(("test", "validation", "single", "whole"), GUESSING),
            "diverged": True,
            **figures,
        }
    parts = Overrides(dataset=_dataset(done.experiment.dataset, done.machine.device))
    setup = prepare(done.experiment, done.machine, overrides=parts)
    files = {file.round: file for file in checkpoints.list_checkpoints(Folder(folder).kept)}
    states = (
        checkpoints.load_checkpoint(files[number], done.experiment.digest, done.machine.device)
        for number in rounds
    )
    scores = [_scores(setup, state) for state in states]
    summary = summarise(done.metrics)
    return {
        **{name: round(fmean(score[name] for score in scores), 5) for name in scores[0]},
        "whole": round(fmean(done.metrics[number - 1]["accuracy"] for number in rounds), 5),
        "gamma_min": summary["gamma_min"],
        "noise": round(summary["delta2_mean"], 5),
        "parameters": summary["parameters"],
        **figures,
    }


def _scores(setup: Setup, state: State) -> dict[str, float]:
    """Score the common model on test and validation data, and the largest device's part."""
    validation = setup.task.source.validation
    assert validation is not None
    common = replace(state, params=covered_only(state.params, state.coverage))
    scores = evaluate_common_and_single(setup, state, ReusedGlobalModule())
    return {
        "test": scores["accuracy_common"],
        "validation": evaluate(setup.task, common, validation).accuracy,
        "single": scores.get("accuracy_single", math.nan),
    }


@cache
def _dataset(name: str, device: str) -> Dataset:
    loaded = datasets.load(name)
    return replace(loaded, train=loaded.train.to(device), test=loaded.test.to(device))


def each(
    job: Callable[[Sequence[Cell]], None], works: Sequence[Sequence[Cell]], workers: int
) -> Iterator[None]:
    """Do works here, or in fresh processes (a CUDA context does not survive a fork)."""
    if workers == 1:
        yield from map(job, works)
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            yield from pool.imap_unordered(job, works)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["grid", "factorial", "width", "longer"]
    )
    parser.add_argument(
        "--quick", action="store_true", help="short cells on digits, into a folder of their own"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that cells are dealt out to"
    )
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or RESULTS / (
        "coverage_comparison-quick" if chosen.quick else "coverage_comparison"
    )
    if not chosen.table:
        machine = Machine(device=chosen.device, precision=chosen.precision).resolved()
        together = machine.device.startswith("cuda")
        processes = chosen.workers if chosen.workers > 1 else "auto"
        machine = replace(machine, processes=processes) if together else replace(machine, threads=1)
        job = partial(
            run_wave, folder=folder, machine=machine, rates=RATES[1:2] if chosen.quick else RATES
        )
        for wave in (
            quick() if chosen.quick else (wave for part in chosen.parts for wave in PARTS[part]())
        ):
            cells = [cell for cell in wave if chosen.only in cell.id]
            for _ in each(
                job,
                [cells] if together else [[cell] for cell in cells],
                1 if together else chosen.workers,
            ):
                pass
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "README.md", markdown(folder, quick=chosen.quick).encode())
    print(folder / "README.md")


if __name__ == "__main__":
    try:
        main()
    except FedcoverError as error:
        sys.exit(f"coverage_comparison: {error}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
