"""Report what a fleet can cover: the frontier, the plan, and what other policies give."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fedcover.analysis.first_round import first_round
from fedcover.analysis.frontier import achieved_frontier, exact_frontier, planned_coverage
from fedcover.analysis.policy_coverage import (
    count_and_noise,
    measure_policy,
    rounds_to_cover,
)
from fedcover.errors import InvalidValue, unknown
from fedcover.policies import POLICIES
from fedcover.policies.planned import PLAN_KINDS, plan_reductions
from fedcover.policies.planner.multi_group import PlanTarget, is_exact
from fedcover.policies.planner.plan_metrics import (
    coverage_upper_bound,
)
from fedcover.policies.replication import num_copies
from fedcover.runs.experiment import Experiment
from fedcover.submodels.reductions import Slices
from fedcover.types import Params, PolicyFunction, Reduction, View

DIGITS_OF_CAPACITY = {1.0: "1", 0.75: "432", 0.5: "765"}
"""The digits of the paper's codenames by capacity, in the order in which its designs use them."""

MAX_PLAN_DEVICES = 1000


def plan_report(
    experiment: Experiment,
    *,
    gamma: int | None = None,
    tolerate: int = 0,
    window: int | None = None,
    kind: str = "subnet",
    params: Params | None = None,
) -> dict[str, Any]:
    """Plan a fleet of which every device takes part in every round, and compare with policies.

    Noise is the share of the weights' energy that a client lacks, summed over clients.

    Args:
        experiment: Model, data set and fleet.
        gamma: Coverage that every unit must have (default: chosen by the planner).
        tolerate: Number of clients that may drop out without leaving a parameter untrained.
        window: Number of rounds over which coverage is counted (default: the experiment's).
        kind: "subnet" to plan units, or "pruning" to plan single weights.
        params: Weights to plan for (default: the initial ones).

    Returns:
        The report as a dictionary for JSON.

    Raises:
        InvalidValue: if an option is invalid, or the weights belong to another model.

    >>> experiment = Experiment(dataset="mnist", fleet="4x1.0 + 6x0.75")
    >>> report = plan_report(experiment, gamma=8, kind="pruning", window=1)
    >>> by_hand = report["policies"]["codename 1111223344"]
    >>> report["gamma_max"], report["chosen"]["gamma"], by_hand["gamma"]
    (8, 8, 8)
    """
    if kind not in PLAN_KINDS:
        raise unknown("kind", kind, PLAN_KINDS)
    rounds = _checked_window(experiment.window if window is None else window)
    view = fleet_view(experiment, params)
    units = planned_coverage(view, kind, PlanTarget(gamma, tolerate))
    policy = partial(plan_reductions, kind=kind, gamma=gamma, tolerate=tolerate)
    reductions = policy(view)
    plan_coverage = measure_policy(policy, view, rounds)
    upper_bound, limiting_tensor = coverage_upper_bound(view.params, reductions)
    exact = kind == "pruning" or is_exact(view.groups)
    frontier = exact_frontier(view, kind) if exact else achieved_frontier(view, rounds)
    replicates = kind != "pruning" and gamma is None and not tolerate
    return {
        "model": experiment.model,
        "fleet": experiment.fleet,
        "kind": kind,
        "capacity": experiment.capacity,
        "exact": exact,
        "window": rounds,
        "tolerate": tolerate,
        "gamma_max": frontier[-1]["gamma"] if exact else upper_bound,
        "frontier": frontier,
        "chosen": {**plan_coverage.line(), "units": units},
        "policies": {"planned": plan_coverage.line(), **_baseline_coverage(view, kind, rounds)},
        "upper_bound": upper_bound,
        "limited_by": limiting_tensor,
        "distance": upper_bound - plan_coverage.gamma,
        "rounds_to_cover": rounds_to_cover(policy, view, rounds, tolerate + 1),
        "copies": num_copies(replace(view, rounds=rounds)) if replicates else 1,
        "assignment": _assignment_rows(view, reductions),
    }


def _checked_window(window: int) -> int:
    if window < 1:
        raise InvalidValue(f"window must be at least 1; got {window}")
    return window


def _baseline_coverage(view: View, kind: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the coverage of other policies, except those for which a device is too small."""
    rows = {}
    for name, policy in baseline_policies(view, kind).items():
        try:
            rows[name] = measure_policy(policy, view, rounds).line()
        except InvalidValue:
            continue
    return rows


def _assignment_rows(view: View, reductions: Sequence[Reduction]) -> list[dict[str, Any]]:
    """Return what each device holds, and its noise."""
    _, noises = count_and_noise(view, reductions)
    return [
        {
            "capacity": client.capacity,
            "parameters": sum(reduction.sizes(view.params).values()),
            "noise": noise,
            "holds": held_units(reduction),
        }
        for client, reduction, noise in zip(view.cohort, reductions, noises, strict=True)
    ]


def held_units(part: Reduction) -> dict[str, Any]:
    """Return what a device holds, by unit group or tensor.

    Units are given as (first, last) of each run of neighbours; of weights only the number is given.

    >>> held_units(Slices((), {"hidden": torch.tensor([0, 1, 2, 7])}))
    {'hidden': [(0, 2), (7, 7)]}
    """
    if isinstance(part, Slices):
        return {group: _runs_of_neighbours(units) for group, units in part.kept.items()}
    return {name: int(bits.sum()) for name, bits in part.gradient_mask().items()}


def _runs_of_neighbours(units: Tensor) -> list[tuple[int, int]]:
    gaps = (units.diff() != 1).nonzero().flatten().tolist()
    ends = [*gaps, len(units) - 1]
    starts = [0, *(gap + 1 for gap in gaps)]
    return [(int(units[start]), int(units[end])) for start, end in zip(starts, ends, strict=True)]


def fleet_view(experiment: Experiment, params: Params | None = None) -> View:
    """Return the view of a first round in which every device of the fleet takes part."""
    view = first_round(experiment, MAX_PLAN_DEVICES, "a plan").view
    if params is None:
        return view
    if _shapes(params) != _shapes(view.params):
        raise InvalidValue(
            f"the weights do not belong to model {experiment.model!r}: names or shapes differ"
        )
    return replace(view, params=dict(params))


def _shapes(params: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in params.items()}


def baseline_policies(view: View, kind: str) -> dict[str, PolicyFunction]:
    """Return the policies to compare with.

    The paper's hand-made design is among them if its capacities are those of the fleet.
    """
    least_noise = partial(plan_reductions, kind=kind, gamma=0)
    policies: dict[str, PolicyFunction] = {
        "prefix": POLICIES["prefix"],
        "rolling": POLICIES["rolling"],
        "rolling spread": POLICIES["rolling"].with_options(spread=True),
        "random": POLICIES["random"],
        "greedy": POLICIES["magnitude"] if kind == "pruning" else least_noise,
    }
    digits = codename_of_capacities([client.capacity for client in view.cohort])
    if digits and view.measure == "width":
        policies[f"codename {digits}"] = POLICIES["regions"].with_options(
            codename=digits, kind=kind
        )
    return policies


def codename_of_capacities(capacities: Sequence[float]) -> str | None:
    """Return the paper's hand-made design for some capacities, or None if it has none.

    Clients of equal capacity leave out the regions after the first in turn.

    >>> codename_of_capacities([1, 1, 1, 1, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75])
    '1111223344'
    >>> codename_of_capacities([0.3])
    """
    if not set(capacities) <= set(DIGITS_OF_CAPACITY):
        return None
    digits_by_capacity = {}
    for capacity in set(capacities):
        digits_in_turn = cycle(DIGITS_OF_CAPACITY[capacity])
        digits = sorted(next(digits_in_turn) for _ in range(capacities.count(capacity)))
        digits_by_capacity[capacity] = iter(digits)
    return "".join(next(digits_by_capacity[capacity]) for capacity in capacities)
