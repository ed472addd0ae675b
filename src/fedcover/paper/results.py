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
"""The second learning rate is the one with the best mean validation accuracy over so many last rounds."""

_RUN_ONLY_FIELDS = {"name", "checkpoint_every", "keep_rounds"}
_OMITTED_MANIFEST_KEYS = {"data", "seed", "experiment", "custom", "system"}


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its experiment, its rounds, and why it ended early if it did."""

    experiment: Experiment
    metrics: Metrics
    machine: Machine
    diverged: str | None = None


def to_result(cell: Cell, run: Finished) -> dict[str, Any]:
    """What is kept of a run: last and best accuracy, local accuracy, costs, the curve, and how it was made."""
    scored = [line for line in run.metrics if cell.score in line]
    summary = summarise(run.metrics) if run.metrics else {}
    best = max(scored, key=lambda line: float(line[cell.score]), default=None)
    good = run.diverged is None
    return {
        "cell": cell.id,
        "seed": run.experiment.seed,
        "score": cell.score,
        "last": _rounded(scored[-1][cell.score]) if good and scored else None,
        "best": _rounded(best[cell.score]) if best else None,
        "best_round": best["round"] + 1 if best else None,
        "local": _rounded(summary.get("accuracy_local")),
        "trained": _rounded(summary.get("accuracy_trained")),
        "diverged": run.diverged,
        **{name: _rounded(summary.get(name)) for name in COSTS},
        "curve": _curve(cell.score, scored),
        "experiment": experiment_fields(run.experiment),
        "made": provenance(run),
    }


def provenance(run: Finished) -> dict[str, Any]:
    """With what a run was made: versions, commit, computer, engine and source."""
    known = build_manifest(run.experiment, run.machine, Overrides(), None)
    return {
        **{k: v for k, v in known.items() if k not in _OMITTED_MANIFEST_KEYS},
        "source": source_digest(),
    }


def _curve(score: str, scored: Metrics) -> dict[str, list[Any]]:
    """The rounds done (counted from 1) and what was seen after each of them."""
    names = {"accuracy": score, "validation": "validation_accuracy"}
    if score == "accuracy":  # the loss is of the same model: all of it
        names["loss"] = "loss"
    present = {short: name for short, name in names.items() if all(name in line for line in scored)}
    return {
        "round": [line["round"] + 1 for line in scored],
        **{short: [_rounded(line[name]) for line in scored] for short, name in present.items()},
    }


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def experiment_fields(experiment: Experiment) -> dict[str, Any]:
    """Every field that matters for what is computed."""
    return experiment.model_dump(mode="json", exclude=_RUN_ONLY_FIELDS)


@cache
def _defaults() -> dict[str, Any]:
    return experiment_fields(Experiment())


@cache
def source_digest() -> str:
    """Twelve digits that name the package's own source, also where there is no git."""
    code = hashlib.sha256()
    home = Path(str(files("fedcover")))
    for path in sorted(home.rglob("*.py")):
        code.update(str(path.relative_to(home)).encode() + path.read_bytes())
    return code.hexdigest()[:12]


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────


def find_result(records: StoredResults, cell: Cell, seed: int) -> Mapping[str, Any] | None:
    """Return a cell's result, or None; a result of another experiment, or one that cannot be, is refused."""
    record = records.get((cell.id, seed))
    if record is None:
        return None
    try:
        _check(record.result)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{record} is no result of a cell: {error}; remove it to run the cell again"
        ) from error
    # a field that a newer version adds does not matter as long as the cell leaves it at its default
    stored = {**_defaults(), **record.result["experiment"]}
    expected = experiment_fields(cell.with_seed(seed))
    other = [
        f"{key} is {stored[key]!r}, not {value!r}"
        for key, value in expected.items()
        if stored[key] != value
    ]
    if other:
        raise RunError(
            f"{record} is of another experiment ({'; '.join(other)}); move it away to run the cell again"
        )
    return record.result


def find_results(
    records: StoredResults, cell: Cell, seeds: Iterable[int]
) -> list[Mapping[str, Any]]:
    """Return the results of a cell with some seeds, as far as there are any."""
    return [result for seed in seeds if (result := find_result(records, cell, seed)) is not None]


def _check(result: Mapping[str, Any]) -> None:
    """Check that the figures of a result can be what they say they are."""
    if not isinstance(result["experiment"], dict):
        raise TypeError("experiment must be an object")
    curve = result["curve"]
    shares = {name: [result[name]] for name in ("last", "best", "local", "trained")} | {
        "curve": curve["accuracy"]
    }
    for name, values in shares.items():
        for value in values:
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
                raise ValueError(f"{name} must be between 0 and 1; got {value!r}")
    if len(curve["round"]) != len(curve["accuracy"]):
        raise ValueError("curve must have an accuracy for each round")


# ── the second learning rate ────────────────────────────────────────────────────────────────────────────


def validation_score(result: Mapping[str, Any]) -> float:
    """How good a learning rate was on held-out training rows: the mean over the last rounds, 0 where it diverged."""
    seen = result["curve"].get("validation", [])
    return fmean(seen[-LAST_ROUNDS:]) if seen and result["diverged"] is None else 0.0


def second_rates(records: StoredResults, of: Iterable[Cell]) -> dict[str, float]:
    """For each data set whose rates were all tried, the best one, unless that is the first one anyway."""
    tried = {cell.id: cell for cell in of if cell.row == "rates"}
    chosen: dict[str, float] = {}
    for dataset in DATASETS:
        scores = {}
        for rate in RATES:
            cell = tried[cell_id(dataset, "iid", "full", f"rate{rate:g}")]
            for result in find_results(records, cell, [cell.seeds(1)[0]]):
                scores[rate] = validation_score(result)
        if len(scores) == len(RATES):
            best = max(scores, key=lambda rate: scores[rate])
            chosen |= {dataset: best} if best != RATE else {}
    return chosen
