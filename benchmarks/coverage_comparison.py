"""Does planned coverage help? Runs plans/coverage_comparison.md cell by cell, and writes the tables.

    python -m benchmarks.coverage_comparison --parts grid factorial width longer --engine auto --device cuda --workers 8
    python -m benchmarks.coverage_comparison --quick          a minute on digits, into a folder of its own
    python -m benchmarks.coverage_comparison --table          only the tables, from what is there

Every finished run is on disk, in one small JSON file per cell; start the same command again to go on. Files and code
of one folder belong together: a cell whose settings have changed since is refused.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.coverage.analysis import markdown
from benchmarks.coverage.cells import PARTS, RATES, TUNING_SEED, Cell, quick
from fedcover.checkpoints import write_atomically
from fedcover.coverage import covered_only
from fedcover.errors import TrainingDiverged
from fedcover.evaluation import evaluate
from fedcover.preparation import Machine, prepare
from fedcover.rounds import Setup, first_state, part_for, run_round
from fedcover.types import State
from fedcover.version import __version__

RESULTS = Path(__file__).parent / "results"


def measure(cell: Cell, seed: int, lr: float, machine: Machine) -> dict[str, Any]:
    """One run: accuracies of the assembled model, untrained weights at zero, at the rounds that the plan names."""
    started = time.perf_counter()
    experiment = cell.experiment(seed, lr)
    setup = prepare(experiment, machine)
    chosen = machine.for_setup(setup)
    state, curve, seen, gammas, noises = first_state(setup), [], [], [], []
    line: dict[str, Any] = {"seed": seed, "lr": lr}
    try:
        with chosen.applied():
            while state.round < setup.rounds:
                state, report = run_round(setup, state)
                curve.append(round(_common(setup, state, "validation"), 4))
                gammas.append(report.metrics["gamma_round"])
                noises.append(report.metrics["delta2_mean"])
                if state.round in cell.measured:
                    seen.append(_scores(setup, state))
        line |= {name: round(fmean(score[name] for score in seen), 5) for name in seen[0]}
        line |= {"gamma_min": min(gammas), "noise": round(fmean(noises), 5), "parameters": report.metrics["parameters"]}
    except TrainingDiverged:
        line |= {"diverged": True, "test": 0.1, "validation": 0.1, "single": 0.1, "whole": 0.1}
    return {**line, "curve": curve, "seconds": round(time.perf_counter() - started, 1)}


def _common(setup: Setup, state: State, rows: str) -> float:
    samples = getattr(setup.task.source, rows)
    common = replace(state, params=covered_only(state.params, state.coverage))
    return evaluate(setup.task, common, samples).accuracy


def _scores(setup: Setup, state: State) -> dict[str, float]:
    """The metric on both kinds of data, and beside it the largest device's part and the model as it stands."""
    largest = max(setup.fleet.levels)
    part = part_for(setup, state, largest)
    test = setup.task.source.test
    single = evaluate(setup.task, state, test, reduction=part, capacity=largest).accuracy if part else math.nan
    return {
        "test": _common(setup, state, "test"),
        "validation": _common(setup, state, "validation"),
        "single": single,
        "whole": evaluate(setup.task, state, test).accuracy,
    }


def run_cell(cell: Cell, folder: Path, machine: Machine, rates: tuple[float, ...]) -> str:
    """All runs of a cell that are not there yet."""
    path = folder / f"{cell.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = dict(cell.fields)
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {
        "id": cell.id, "fields": fields, "tuning": [], "runs": [],
        "machine": {"engine": machine.engine, "device": machine.device, "torch": torch.__version__},
        "fedcover": __version__,
    }  # fmt: skip
    if known["fields"] != fields:
        raise SystemExit(f"{path} was made with other settings: move it away")
    _choose_rate(cell, known, folder, machine, rates, path)
    for seed in cell.seeds:
        if seed not in [line["seed"] for line in known["runs"]]:
            known["runs"].append(measure(cell, seed, known["lr"], machine))
            _write(path, known)
    means = fmean(line["test"] for line in known["runs"])
    return f"{cell.id}: {means:.4f} over {len(known['runs'])} seeds, learning rate {known['lr']:g}"


def _choose_rate(
    cell: Cell, known: dict[str, Any], folder: Path, machine: Machine, rates: tuple[float, ...], path: Path
) -> None:
    """Fixed, that of another cell, or the best on validation data with a seed that is never judged."""
    if "lr" in known:
        return
    if cell.rate_of:
        known["lr"] = json.loads((folder / f"{cell.rate_of}.json").read_text())["lr"]
    elif "lr" in cell.fields:
        known["lr"] = cell.fields["lr"]
    else:
        for lr in rates:
            if lr not in [line["lr"] for line in known["tuning"]]:
                known["tuning"].append(measure(cell, TUNING_SEED, lr, machine))
                _write(path, known)
        known["lr"] = max(known["tuning"], key=lambda line: line["validation"])["lr"]
    _write(path, known)


def _write(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["grid", "factorial", "width", "longer"])
    parser.add_argument("--quick", action="store_true", help="short cells on digits, into a folder of their own")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="cells at once")
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or RESULTS / ("coverage_comparison-quick" if chosen.quick else "coverage_comparison")
    waves = [] if chosen.table else quick() if chosen.quick else (w for part in chosen.parts for w in PARTS[part]())
    machine = Machine(engine=chosen.engine, device=chosen.device).resolved()
    job = partial(run_cell, folder=folder, machine=machine, rates=RATES[1:2] if chosen.quick else RATES)
    # fresh processes: a CUDA context does not survive a fork
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        for wave in waves:
            wanted = [cell for cell in wave if chosen.only in cell.id]
            each = pool.imap_unordered(job, wanted) if chosen.workers > 1 else map(job, wanted)
            for done, sentence in enumerate(each, 1):
                print(f"{done}/{len(wanted)} {sentence}", file=sys.stderr, flush=True)
    write_atomically(folder / "README.md", markdown(folder, quick=chosen.quick).encode())
    print(folder / "README.md")


if __name__ == "__main__":
    main()
