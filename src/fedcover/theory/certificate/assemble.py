"""From a run folder to its certificate: constants, both sides of every bound, and caveats."""

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
from fedcover.runs.setup import Overrides, build_setup, prepare_workload
from fedcover.theory import Bound
from fedcover.theory.certificate.measure import LogFn, Measurements, measure_run
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
    """Compare the gradients of a run with the convergence theorems, and write certificate.json.

    The kept rounds of the run are trained again. If all rounds are kept, `steps` covers all local
    steps and `clients` all clients, then values that otherwise are estimated become exact.

    Args:
        folder: the run's folder.
        steps: at how many local steps each client's trajectory is examined.
        clients: over how many clients, at most, the common loss F is computed.
        device: where to compute.
        data: the folder with the data, if not the run's.
        dataset: the data set, if the run was given one in Python.
        model: the model, if the run was given one in Python.
        policy: the policy, if the run was given one in Python.
        tell: is called with a sentence about the progress.
        trust: as in `fedcover.resume`.

    Returns:
        The content of certificate.json.

    Raises:
        InvalidValue: `steps` or `clients` is below 1.
        RunError: the run keeps no round that can be replayed, or the theorems do not cover it.
    """
    for name, value in (("steps", steps), ("clients", clients)):
        if value < 1:
            raise InvalidValue(f"{name} must be at least 1; got {value}")
    overrides = Overrides(dataset, model, policy)
    run_folder = Folder(Path(folder), trust).read()
    run_folder.check_overrides(overrides)
    check_data_is_local(run_folder.experiment)
    machine = Machine(engine="sequential", device=device).resolved()
    workload = prepare_workload(
        run_folder.experiment, machine.device, data=data or run_folder.data, overrides=overrides
    )
    machine = machine.for_workload(workload)
    setup = build_setup(run_folder.experiment, workload, machine, overrides)
    if setup.task.recipe.exits:
        raise RunError(
            f"{run_folder.path} trains a model with several exits (recipe depthfl); "
            "its loss is not that of the theory"
        )
    with machine.applied():
        measurements = measure_run(run_folder, setup, steps, clients, machine.device, tell)
        certificate = certificate_to_dict(run_folder.experiment.name, measurements)
    content = json.dumps(certificate, indent=2) + "\n"
    write_atomically(run_folder.path / "certificate.json", content.encode())
    return certificate


CONSTANTS_OF_BOUND = {"reshuffled": ("L", "L_batch", "G_step", "F_0", "F_least")}
"""The constants that a bound depends on, where they are not `DEFAULT_CONSTANTS`."""

DEFAULT_CONSTANTS = ("L", "G", "sigma2", "F_0", "F_least")


def certificate_to_dict(name: str, measured: Measurements) -> dict[str, Any]:
    """Return the certificate as it is stored in JSON."""
    rounds = measured.run.rounds
    bounds = {key: _bound(key, bound, measured) for key, bound in measured.bounds.items()}
    return {
        "run": name,
        "kind": "certificate" if any(bound["genuine"] for bound in bounds.values()) else "estimate",
        "rounds": measured.rounds_done,
        "replayed": [r.number for r in rounds],
        "local_steps": measured.run.constants.steps.count,
        "constants": {
            key: {"value": constant.value, "kind": constant.kind, "how": constant.how}
            for key, constant in measured.constants.items()
        },
        "coverage": _coverage(measured),
        "left": {
            "mean": measured.bounds["sharper"].left,
            "start": measured.start_gradient,
            "by_round": {
                str(r.number): {
                    "trained": r.quantities.gradient,
                    "whole": r.gradient,
                    "F": r.value,
                    "gamma": r.gamma,
                }
                for r in rounds
            },
        },
        "bias": {
            "mean": fmean(r.quantities.bias for r in rounds),
            "lasting": measured.persistent_bias,
            "sampled": fmean(r.quantities.spread for r in rounds),
        },
        "bounds": bounds,
        "lemmas": _lemmas(measured),
        "last": _last(measured),
        "notes": _notes(measured),
    }


def _coverage(measured: Measurements) -> dict[str, Any]:
    quantities = [r.quantities for r in measured.run.rounds]
    never_trained = sum(int((~trained).sum()) for trained in measured.trained.values())
    gamma_union = min(r.gamma for r in measured.run.rounds)
    smallest_gamma = min(1 / max(q.inverse_coverage) for q in quantities)
    largest_gamma = max(1 / min(q.inverse_coverage) for q in quantities)
    return {
        "gamma": 0 if never_trained else gamma_union,
        "gamma_union": gamma_union,
        "never_trained": never_trained,
        "gamma_client": [smallest_gamma, largest_gamma],
        "noise": fmean(fmean(q.pruned_energy) / q.energy if q.energy else 0.0 for q in quantities),
    }


def _bound(key: str, bound: Bound, measured: Measurements) -> dict[str, Any]:
    names = CONSTANTS_OF_BOUND.get(key, DEFAULT_CONSTANTS)
    has_estimates = any(measured.constants[name].kind == "estimate" for name in names)
    return {
        "name": bound.name,
        "value": bound.value,
        "terms": bound.terms,
        "left": bound.left,
        "ratio": bound.left / bound.value if bound.value else None,
        "conditions": [
            {
                "name": condition.name,
                "allowed": condition.allowed,
                "actual": condition.actual,
                "violated": max(1.0, condition.factor),
                "holds": condition.holds,
            }
            for condition in bound.conditions
        ],
        "outside": list(bound.violated_assumptions),
        "vacuous": bound.value >= measured.start_gradient,
        "applies": bound.applies,
        "genuine": bound.applies and measured.complete and not has_estimates,
    }


def _lemmas(measured: Measurements) -> dict[str, Any]:
    """Compare the two sides of each lemma: measured value divided by bound.

    For Lemma 1 there is also the error of its split, which should be rounding only.
    """
    constants, rounds = measured.run.constants, measured.run.rounds
    drift_ratios = []
    for r in rounds:
        for path in r.paths:
            drift_bound = r.quantities.lr**2 * constants.gradient * path.steps.drift
            if drift_bound:
                drift_ratios.append(path.squared_drift / drift_bound)
    gap_bounds = [
        sum(
            gradient_gap(
                constants,
                r.quantities,
                smoothness=constants.smoothness,
                gradient=constants.gradient,
            )
        )
        for r in rounds
    ]
    noise_bounds = [
        constants.variance * _probe_variance_factor(r) * squared_inverse(r.quantities)
        for r in rounds
    ]
    return {
        "split_error": max(path.split_error for r in rounds for path in r.paths),
        "drift": max(drift_ratios, default=None),
        "gap": _ratio([r.gradient_gap for r in rounds], gap_bounds),
        "noise": _ratio([r.noise for r in rounds], noise_bounds),
    }


def _probe_variance_factor(r: ReplayedRound) -> float:
    """Return the largest sum of c_j^2 over the squared sum of c_j, among the round's clients.

    The sums are over the steps that were examined.
    """
    return max(
        sum(weight * weight for weight in path.probe_weights) / sum(path.probe_weights) ** 2
        for path in r.paths
    )


def _ratio(values: list[float], bounds: list[float]) -> float | None:
    return sum(values) / sum(bounds) if sum(bounds) else None


def _last(measured: Measurements) -> dict[str, Any]:
    """Describe the newest model; with a known optimum, also its distance and the proved limits."""
    last = measured.last
    entry: dict[str, Any] = {"round": last.round, "F": last.value, "gradient": last.gradient}
    if measured.convex and measured.convex.optimum:
        decay = measured.run.experiment.weight_decay
        theorem = measured.bounds["reshuffled"]
        entry |= {
            "F_optimum": measured.convex.least,
            "above": last.value - measured.convex.least,
            "above_at_most": last.gradient / (2 * decay),
            "distance": last.distance,
            "best_round_above_at_most": theorem.value / (2 * decay) if theorem.applies else None,
        }
    return entry


def _notes(measured: Measurements) -> list[str]:
    num_rounds, num_replayed = measured.run.constants.rounds, len(measured.run.rounds)
    notes = []
    if not measured.complete:
        notes.append(
            f"means over {num_replayed} of {num_rounds} rounds: keep all of them for exact ones"
        )
    if num_rounds < measured.rounds_done:
        empty_rounds = measured.rounds_done - num_rounds
        notes.append(
            f"in {empty_rounds} of {measured.rounds_done} rounds nobody trained: "
            "the theorems are about the others"
        )
    if not measured.convex:
        notes.append(
            "L is a lower estimate along the trajectory; a network with ReLU has no such constant"
        )
    notes.append(
        "all bounds but Theorem R hold in expectation over batches (and cohorts); a run is one draw"
    )
    return notes
