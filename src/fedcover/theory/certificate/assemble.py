"""From a run folder to its certificate: the theorems' constants, both sides of every bound, and what does not apply."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from fedcover.errors import InvalidValue, RunError
from fedcover.host.disk import write_atomically
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.machine import Machine
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import Overrides, prepare
from fedcover.theory import Bound
from fedcover.theory.certificate.constants import LogFn, Measurements, measure_run
from fedcover.theory.certificate.replay import ReplayedRound
from fedcover.theory.quantities import gradient_gap, squared_inverse
from fedcover.types import Dataset, Model, PolicyFunction


def certify(
    folder: str | Path,
    *,
    steps: int = 5,
    clients: int = 200,
    device: str = "cpu",
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: PolicyFunction | None = None,
    tell: LogFn = lambda sentence: None,
    trust: bool = False,
) -> dict[str, Any]:
    """Replay the kept rounds of a run and compare its gradients with the theorems; also writes certificate.json.

    Every client's path is looked at in `steps` of its local steps, F over at most `clients` clients; all of them, and
    all rounds kept, make exact what otherwise is estimated. `trust` as in `fedcover.resume`.
    """
    for name, value in (("steps", steps), ("clients", clients)):
        if value < 1:
            raise InvalidValue(f"{name} must be at least 1; got {value}")
    parts = Overrides(dataset, model, policy)
    found = Folder(Path(folder), trust).read()
    found.check_overrides(parts)
    check_data_is_local(found.experiment)
    machine = Machine(engine="sequential", device=device).resolved()
    setup = prepare(found.experiment, machine, data=data or found.data, overrides=parts)
    if setup.task.recipe.exits:
        raise RunError(
            f"{found.path} trains a model with several exits (recipe depthfl); its loss is not that of the theory"
        )
    with machine.for_setup(setup).applied():
        seen = measure_run(found, setup, steps, clients, machine.device, tell)
        made = certificate_to_dict(found.experiment.name, seen)
    write_atomically(found.path / "certificate.json", (json.dumps(made, indent=2) + "\n").encode())
    return made


CONSTANTS_OF_BOUND = {"reshuffled": ("L", "L_batch", "G_step", "F_0", "F_least")}
"""The constants of a bound, where they are not the usual ones."""


DEFAULT_CONSTANTS = ("L", "G", "sigma2", "F_0", "F_least")


def certificate_to_dict(name: str, seen: Measurements) -> dict[str, Any]:
    """Everything, in the order in which one would read it."""
    quantities = [r.quantities for r in seen.case.rounds]
    never = {key: int((~bits).sum()) for key, bits in seen.trained.items()}
    bounds = {key: _bound(key, bound, seen) for key, bound in seen.bounds.items()}
    return {
        "run": name,
        "kind": "certificate" if any(bound["genuine"] for bound in bounds.values()) else "estimate",
        "rounds": seen.rounds_done,
        "replayed": [r.number for r in seen.case.rounds],
        "local_steps": seen.case.known.steps.count,
        "constants": {
            key: {"value": known.value, "kind": known.kind, "how": known.how} for key, known in seen.constants.items()
        },
        "coverage": {
            "gamma": 0 if sum(never.values()) else min(r.gamma for r in seen.case.rounds),
            "gamma_union": min(r.gamma for r in seen.case.rounds),
            "never_trained": sum(never.values()),
            "gamma_client": [min(1 / max(r.inverse_coverage) for r in quantities), max(1 / min(r.inverse_coverage) for r in quantities)],
            "noise": fmean(fmean(r.pruned_energy) / r.energy if r.energy else 0.0 for r in quantities),
        },
        "left": {
            "mean": seen.bounds["sharper"].left,
            "start": seen.start_gradient,
            "by_round": {
                str(r.number): {"trained": r.quantities.gradient, "whole": r.gradient, "F": r.value, "gamma": r.gamma}
                for r in seen.case.rounds
            },
        },
        "bias": {
            "mean": fmean(r.bias for r in quantities),
            "lasting": seen.persistent_bias,
            "sampled": fmean(r.spread for r in quantities),
        },
        "bounds": bounds,
        "lemmas": _lemmas(seen),
        "last": _last(seen),
        "notes": _notes(seen),
    }  # fmt: skip


def _bound(key: str, bound: Bound, seen: Measurements) -> dict[str, Any]:
    constants = [
        seen.constants[name].kind for name in CONSTANTS_OF_BOUND.get(key, DEFAULT_CONSTANTS)
    ]
    proved = seen.complete and "estimate" not in constants
    return {
        "name": bound.name,
        "value": bound.value,
        "terms": bound.terms,
        "left": bound.left,
        "ratio": bound.left / bound.value if bound.value else None,
        "conditions": [
            {
                "name": c.name,
                "allowed": c.allowed,
                "actual": c.actual,
                "violated": max(1.0, c.factor),
                "holds": c.holds,
            }
            for c in bound.conditions
        ],
        "outside": list(bound.violated_assumptions),
        "vacuous": bound.value >= seen.start_gradient,
        "applies": bound.applies,
        "genuine": bound.applies and proved,
    }


def _lemmas(seen: Measurements) -> dict[str, Any]:
    """Measured over bound: the split of Lemma 1 (to rounding), its drift, Lemma 2 and Lemma 3."""
    known = seen.case.known
    rounds = seen.case.rounds
    paths = [(r.quantities.lr, path) for r in rounds for path in r.paths]
    drift = [
        path.squared_drift / limit
        for lr, path in paths
        if (limit := lr**2 * known.gradient * path.steps.drift)
    ]
    second = [
        sum(gradient_gap(known, r.quantities, smoothness=known.smoothness, gradient=known.gradient))
        for r in rounds
    ]
    third = [
        known.variance * _probe_variance_factor(r) * squared_inverse(r.quantities) for r in rounds
    ]
    return {
        "split_error": max(path.split_error for _, path in paths),
        "drift": max(drift, default=None),
        "gap": _ratio([r.gradient_gap for r in rounds], second),
        "noise": _ratio([r.noise for r in rounds], third),
    }


def _probe_variance_factor(r: ReplayedRound) -> float:
    """The sum of c_j^2 over the squared sum of c_j, over the steps that were looked at; the largest of any client."""
    return max(
        sum(c * c for c in path.probe_weights) / sum(path.probe_weights) ** 2 for path in r.paths
    )


def _ratio(measured: list[float], limit: list[float]) -> float | None:
    return sum(measured) / sum(limit) if sum(limit) else None


def _last(seen: Measurements) -> dict[str, Any]:
    """The newest model; with a known optimum also how far it is, and how far it may be."""
    found: dict[str, Any] = {
        "round": seen.last.round,
        "F": seen.last.value,
        "gradient": seen.last.gradient,
    }
    if seen.convex and seen.convex.optimum:
        decay, theorem = seen.case.experiment.weight_decay, seen.bounds["reshuffled"]
        found |= {
            "F_optimum": seen.convex.least,
            "above": seen.last.value - seen.convex.least,
            "above_at_most": seen.last.gradient / (2 * decay),
            "distance": seen.last.distance,
            "best_round_above_at_most": theorem.value / (2 * decay) if theorem.applies else None,
        }
    return found


def _notes(seen: Measurements) -> list[str]:
    counted = seen.case.known.rounds
    notes = []
    if not seen.complete:
        notes.append(
            f"means over {len(seen.case.rounds)} of {counted} rounds: keep all of them for exact ones"
        )
    if counted < seen.rounds_done:
        notes.append(
            f"in {seen.rounds_done - counted} of {seen.rounds_done} rounds nobody trained: the theorems are about the others"
        )
    if not seen.convex:
        notes.append(
            "L is a lower estimate along the trajectory; a network with ReLU has no such constant"
        )
    notes.append(
        "all bounds but Theorem R hold in expectation over batches (and cohorts); a run is one draw"
    )
    return notes
