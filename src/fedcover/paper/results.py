"""Describe finished runs of the reproduction, and read them back for the cells they belong to."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import RunError
from fedcover.paper.cells import RATE, RATES, Cell, cell_id
from fedcover.paper.claims import DATASETS
from fedcover.paper.store import StoredResults
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.manifest import build_manifest
from fedcover.runs.metrics_log import Metrics, summarise
from fedcover.runs.setup import Overrides

COSTS = (
    "gamma_min",
    "delta2_mean",
    "parameters",
    "multiply_adds",
    "bytes_down",
    "bytes_up",
    "rounds",
    "seconds",
)
LAST_ROUNDS = 5
"""Number of last rounds whose mean validation accuracy decides on the learning rate."""

_RUN_ONLY_FIELDS = {"name", "checkpoint_every", "keep_rounds"}
_OMITTED_MANIFEST_KEYS = {"data", "seed", "experiment", "custom", "system"}


@dataclass(frozen=True)
class CellRun:
    """A run that has ended: its experiment and metrics, and where it diverged if it did."""

    experiment: Experiment
    metrics: Metrics
    machine: Machine
    diverged: str | None = None


def to_result(cell: Cell, run: CellRun) -> dict[str, Any]:
    """Return what is stored of a run: accuracies, costs, the curve, and how it was made."""
    evaluated = [line for line in run.metrics if cell.score in line]
    summary = summarise(run.metrics) if run.metrics else {}
    best = max(evaluated, key=lambda line: float(line[cell.score]), default=None)
    last = evaluated[-1] if evaluated and run.diverged is None else None
    return {
        "cell": cell.id,
        "seed": run.experiment.seed,
        "score": cell.score,
        "last": _rounded(last[cell.score]) if last else None,
        "best": _rounded(best[cell.score]) if best else None,
        "best_round": best["round"] + 1 if best else None,
        "local": _rounded(summary.get("accuracy_local")),
        "trained": _rounded(summary.get("accuracy_trained")),
        "diverged": run.diverged,
        **{name: _rounded(summary.get(name)) for name in COSTS},
        "curve": _curve(cell.score, evaluated),
        "experiment": experiment_fields(run.experiment),
        "made": provenance(run),
    }


def provenance(run: CellRun) -> dict[str, Any]:
    """Return how a run was made: versions, commit, computer, engine and source."""
    manifest = build_manifest(run.experiment, run.machine, Overrides(), None)
    entries = {key: value for key, value in manifest.items() if key not in _OMITTED_MANIFEST_KEYS}
    return {**entries, "source": source_digest()}


def _curve(score: str, lines: Metrics) -> dict[str, list[Any]]:
    """Return the evaluated rounds, counted from 1, and the scores after each of them."""
    metrics = {"accuracy": score, "validation": "validation_accuracy"}
    if score == "accuracy":  # only then is the loss that of the same model
        metrics["loss"] = "loss"
    curve = {"round": [line["round"] + 1 for line in lines]}
    for name, metric in metrics.items():
        if all(metric in line for line in lines):
            curve[name] = [_rounded(line[metric]) for line in lines]
    return curve


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def experiment_fields(experiment: Experiment) -> dict[str, Any]:
    """Return every field of an experiment that affects its result."""
    return experiment.model_dump(mode="json", exclude=_RUN_ONLY_FIELDS)


@cache
def _defaults() -> dict[str, Any]:
    return experiment_fields(Experiment())


@cache
def source_digest() -> str:
    """Return twelve digits that identify the package's source, even without git."""
    digest = hashlib.sha256()
    package = Path(str(files("fedcover")))
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def find_result(records: StoredResults, cell: Cell, seed: int) -> Mapping[str, Any] | None:
    """Return a cell's result, or None.

    Raises:
        RunError: if the result is invalid, or belongs to another experiment.
    """
    record = records.get((cell.id, seed))
    if record is None:
        return None
    try:
        _check(record.result)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{record} is not a result of a cell: {error}; remove it to run the cell again"
        ) from error
    # A field that a newer version has added does not matter while the cell uses its default.
    stored = {**_defaults(), **record.result["experiment"]}
    expected = experiment_fields(cell.with_seed(seed))
    differences = [
        f"{key} is {stored[key]!r}, not {value!r}"
        for key, value in expected.items()
        if stored[key] != value
    ]
    if differences:
        raise RunError(
            f"{record} is of another experiment ({'; '.join(differences)});"
            " move it away to run the cell again"
        )
    return record.result


def find_results(
    records: StoredResults, cell: Cell, seeds: Iterable[int]
) -> list[Mapping[str, Any]]:
    """Return the results of a cell for those of the seeds that have one."""
    candidates = [find_result(records, cell, seed) for seed in seeds]
    return [result for result in candidates if result is not None]


def _check(result: Mapping[str, Any]) -> None:
    """Check that the values of a result are possible."""
    if not isinstance(result["experiment"], dict):
        raise TypeError("experiment must be an object")
    curve = result["curve"]
    accuracies = {name: [result[name]] for name in ("last", "best", "local", "trained")}
    accuracies["curve"] = curve["accuracy"]
    for name, values in accuracies.items():
        for value in values:
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
                raise ValueError(f"{name} must be between 0 and 1; got {value!r}")
    if len(curve["round"]) != len(curve["accuracy"]):
        raise ValueError("curve must have an accuracy for each round")


# ── the second learning rate ──────────────────────────────────────────────────────────────────────


def validation_score(result: Mapping[str, Any]) -> float:
    """Return the mean accuracy on held-out training rows over the last rounds.

    A run that diverged scores 0.
    """
    accuracies = result["curve"].get("validation", [])
    if not accuracies or result["diverged"] is not None:
        return 0.0
    return fmean(accuracies[-LAST_ROUNDS:])


def second_rates(records: StoredResults, all_cells: Iterable[Cell]) -> dict[str, float]:
    """Return the best learning rate of each data set whose rates were all tried.

    A data set for which the first rate is the best is left out.
    """
    rate_cells = {cell.id: cell for cell in all_cells if cell.row == "rates"}
    best_rates: dict[str, float] = {}
    for dataset in DATASETS:
        scores = {}
        for rate in RATES:
            cell = rate_cells[cell_id(dataset, "iid", "full", f"rate{rate:g}")]
            result = find_result(records, cell, cell.seeds(1)[0])
            if result is not None:
                scores[rate] = validation_score(result)
        if len(scores) < len(RATES):
            continue
        best_rate = max(scores, key=lambda rate: scores[rate])
        if best_rate != RATE:
            best_rates[dataset] = best_rate
    return best_rates
