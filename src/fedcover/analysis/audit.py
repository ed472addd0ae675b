"""Compute what every capacity of a fleet costs, and what a codename of the paper covers."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from fedcover.analysis.first_round import FirstRound, first_round
from fedcover.policies.paper_regions import region_coverage
from fedcover.runs.experiment import Experiment
from fedcover.runs.setup import build_policy
from fedcover.submodels import coverage
from fedcover.submodels.cost import cost, memory_to_train
from fedcover.types import Reduction

MAX_AUDIT_DEVICES = 10_000


def audit(experiment: Experiment) -> dict[str, Any]:
    """Return cost per capacity and coverage of a first round with every device of the fleet.

    >>> audit(codename("1111223344", "pruning"))["gamma_min"]
    8
    """
    setting = first_round(experiment, MAX_AUDIT_DEVICES, "an audit")
    policy = build_policy(experiment)
    view = setting.view
    if policy.grow:
        view = replace(view, rounds=experiment.rounds)
    reductions: list[Reduction] = []
    reductions_by_capacity: dict[float, list[Reduction]] = {level: [] for level in view.levels}
    for client, reduction in zip(view.cohort, policy(view), strict=True):
        if reduction is not None:
            reductions.append(reduction)
            reductions_by_capacity[client.capacity].append(reduction)
    costs = [cost(reduction, view.params, view.uses) for reduction in reductions]
    counts = coverage.count(view.params, reductions)
    return {
        "model": experiment.model,
        "policy": experiment.policy,
        "parameters": fmean(client_cost.parameters for client_cost in costs),
        "multiply_adds": fmean(client_cost.multiply_adds for client_cost in costs),
        "gamma_min": coverage.minimum(counts),
        "histogram": {str(k): v for k, v in coverage.histogram(counts).items()},
        "capacities": [
            _capacity_row(setting, capacity, group, experiment.batch_size)
            for capacity, group in reductions_by_capacity.items()
            if group
        ],
    }


def _capacity_row(
    setting: FirstRound, capacity: float, reductions: Sequence[Reduction], batch_size: int
) -> dict[str, Any]:
    """Return the costs of one device of a capacity, and the mean noise of all of them."""
    model, shape, dtype, view = setting
    memory = memory_to_train(model, reductions[0], shape, batch_size=batch_size, dtype=dtype)
    return {
        "capacity": capacity,
        "devices": len(reductions),
        **asdict(cost(reductions[0], view.params, view.uses)),
        "memory": memory,
        "delta2": fmean(coverage.delta2(view.params, reductions)),
    }


def codename(digits: str, kind: str, p5: str = "code", **fields: Any) -> Experiment:
    """Return the experiment of a codename of the paper; `fields` are as for any experiment."""
    policy = f"regions(codename={digits!r}, kind={kind!r}, p5={p5!r})"
    defaults = {"dataset": "mnist", "clients": max(100, len(digits))}
    return Experiment(**{**defaults, **fields, "policy": policy})


def audit_codename(digits: str, kind: str, p5: str = "code", **fields: Any) -> dict[str, Any]:
    """Return the audit of a codename, and the coverage of each region."""
    report = audit(codename(digits, kind, p5, **fields))
    return {
        "codename": digits,
        "kind": kind,
        **report,
        "coverage": region_coverage(digits, p5),
    }
