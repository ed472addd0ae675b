"""What a fleet can cover: the frontier of coverage and noise, the plan that is chosen, and what other policies give."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.analysis.audit import dataset_shape
from fedcover.errors import InvalidValue, unknown
from fedcover.fleet import Fleet
from fedcover.policies import POLICIES
from fedcover.policies.planned import PLAN_KINDS, plan_problem, planned
from fedcover.policies.planner.multi_group import PlanTarget, is_exact, target_coverage
from fedcover.policies.planner.plan_metrics import (
    count_and_energy,
    coverage_upper_bound,
    energy_on_cut_axes,
)
from fedcover.policies.planner.single_group import BudgetedGroup
from fedcover.policies.replication import num_copies
from fedcover.runs.components import build_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.plotting import COLOURS, MARKERS, new_figure, save_figure
from fedcover.submodels import coverage
from fedcover.submodels.cost import uses_of_weights
from fedcover.submodels.reductions import Slices
from fedcover.types import Client, Coverage, Params, Reduction, View

DIGITS_OF_CAPACITY = {1.0: "1", 0.75: "432", 0.5: "765"}
"""The paper's policies of each capacity, the one of least noise first: its hand-made designs take them in turn."""

MAX_PLAN_DEVICES = 1000

PolicyFunction = Callable[[View], Sequence[Reduction | None]]


@dataclass(frozen=True)
class PolicyCoverage:
    """What a policy did over some rounds: fewest clients per parameter in any round and over all, and its noise."""

    gamma: int
    gamma_window: int
    noise: float

    def line(self) -> dict[str, Any]:
        """As a row of the report."""
        return {"gamma": self.gamma, "gamma_window": self.gamma_window, "noise": self.noise}


def plan_report(
    experiment: Experiment,
    *,
    gamma: int | None = None,
    tolerate: int = 0,
    window: int | None = None,
    kind: str = "subnet",
    params: Params | None = None,
) -> dict[str, Any]:
    """Every device of the fleet, as written, in every round of a window: what could be covered, and what would be.

    Noise is the sum over clients of the share of the weights' energy (the initial ones, or `params`) that they lack.

    >>> found = plan_report(Experiment(dataset="mnist", fleet="4x1.0 + 6x0.75"), gamma=8, kind="pruning", window=1)
    >>> found["gamma_max"], found["chosen"]["gamma"], found["policies"]["codename 1111223344"]["gamma"]
    (8, 8, 8)
    """
    if kind not in PLAN_KINDS:
        raise unknown("kind", kind, PLAN_KINDS)
    rounds = experiment.window if window is None else window
    if rounds < 1:
        raise InvalidValue(f"window must be at least 1; got {rounds}")
    view = fleet_view(experiment, params)
    units = planned_coverage(view, kind, PlanTarget(gamma, tolerate))
    choice = partial(planned, kind=kind, gamma=gamma, tolerate=tolerate)
    parts = choice(view)
    exact = kind == "pruning" or is_exact(view.groups)
    chosen = measure_policy(choice, view, rounds)
    bound, scarce = coverage_upper_bound(view.params, parts)
    policies = {"planned": chosen.line()}
    for name, other in baseline_policies(view, kind).items():
        try:
            policies[name] = measure_policy(other, view, rounds).line()
        except (
            InvalidValue
        ):  # a device too small for this kind of part: there is nothing to compare with
            continue
    made = exact_frontier(view, kind) if exact else achieved_frontier(view, rounds)
    return {
        "model": experiment.model, "fleet": experiment.fleet, "kind": kind, "capacity": experiment.capacity,
        "exact": exact, "window": rounds, "tolerate": tolerate,
        "gamma_max": made[-1]["gamma"] if exact else bound,
        "frontier": made,
        "chosen": {**chosen.line(), "units": units},
        "policies": policies,
        "upper_bound": bound, "limited_by": scarce, "distance": bound - chosen.gamma,
        "rounds_to_cover": rounds_to_cover(choice, view, rounds, tolerate + 1),
        "copies": 1 if kind == "pruning" or gamma is not None or tolerate else num_copies(replace(view, rounds=rounds)),
        "assignment": [
            {"capacity": client.capacity, "parameters": sum(part.sizes(view.params).values()),
             "noise": noise, "holds": held_units(part)}
            for client, part, noise in zip(view.cohort, parts, count_and_noise(view, parts)[1], strict=True)
        ],
    }  # fmt: skip


def held_units(part: Reduction) -> dict[str, Any]:
    """What a device holds: the units of each group, as (first, last) of their runs; of weights, how many in a tensor.

    >>> held_units(Slices((), {"hidden": torch.tensor([0, 1, 2, 7])}))
    {'hidden': [(0, 2), (7, 7)]}
    """
    if not isinstance(part, Slices):
        return {name: int(bits.sum()) for name, bits in part.gradient_mask().items()}
    held: dict[str, Any] = {}
    for name, kept in part.kept.items():
        ends = [*(kept.diff() != 1).nonzero().flatten().tolist(), len(kept) - 1]
        starts = [0, *(end + 1 for end in ends[:-1])]
        held[name] = [
            (int(kept[start]), int(kept[end])) for start, end in zip(starts, ends, strict=True)
        ]
    return held


def fleet_view(experiment: Experiment, params: Params | None = None) -> View:
    """The first round of an experiment in which every device of its fleet takes part."""
    shape, classes, dtype = dataset_shape(experiment.dataset)
    model = build_model(experiment, shape, classes, dtype)
    fleet = Fleet.parse(experiment.fleet)
    if sum(fleet.counts) > MAX_PLAN_DEVICES:
        raise InvalidValue(
            f"fleet: a plan takes at most {MAX_PLAN_DEVICES:,} devices; got {sum(fleet.counts):,}"
        )
    cohort = tuple(Client(i, fleet.capacity(i), i, 1, ()) for i in range(sum(fleet.counts)))
    own = {name: p.detach() for name, p in model.module.named_parameters()}
    if params is not None and {n: t.shape for n, t in params.items()} != {
        n: t.shape for n, t in own.items()
    }:
        raise InvalidValue(
            f"the weights do not belong to model {experiment.model!r}: names or shapes differ"
        )
    own = own if params is None else dict(params)
    return View(0, own, model.groups, model.prunable, cohort, fleet.levels, experiment.capacity,
                Coverage((), {}), experiment.seed, uses=uses_of_weights(model.module, shape, dtype),
                classifier=model.classifier)  # fmt: skip


def baseline_policies(view: View, kind: str) -> dict[str, PolicyFunction]:
    """The policies to compare with, and the paper's hand-made design where its capacities are those of the fleet."""
    found: dict[str, PolicyFunction] = {
        "prefix": POLICIES["prefix"],
        "rolling": POLICIES["rolling"],
        "rolling spread": partial(POLICIES["rolling"], spread=True),
        "random": POLICIES["random"],
        "greedy": POLICIES["magnitude"]
        if kind == "pruning"
        else partial(planned, kind=kind, gamma=0),
    }
    digits = codename_of_capacities([client.capacity for client in view.cohort])
    if digits and view.measure == "width":
        found[f"codename {digits}"] = partial(POLICIES["regions"], codename=digits, kind=kind)
    return found


def codename_of_capacities(shares: Sequence[float]) -> str | None:
    """The paper's way to cover more by hand: the regions beside the first are left out in turn.

    >>> codename_of_capacities([1, 1, 1, 1, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75]), codename_of_capacities([0.3])
    ('1111223344', None)
    """
    if set(shares) - set(DIGITS_OF_CAPACITY):
        return None
    held = Counter(shares)
    digits = {
        share: iter(sorted(islice(cycle(DIGITS_OF_CAPACITY[share]), n)))
        for share, n in held.items()
    }
    return "".join(next(digits[share]) for share in shares)


def reductions_by_round(
    choice: PolicyFunction, view: View, rounds: int
) -> Iterator[list[Reduction]]:
    """The parts that a policy gives in some rounds with the same weights and clients."""
    for round in range(rounds):
        yield [part for part in choice(replace(view, round=round)) if part is not None]


def count_and_noise(view: View, parts: Sequence[Reduction]) -> tuple[Params, list[float]]:
    """How many parts hold each parameter, and the share of the weights' energy that every part lacks."""
    slices = [part for part in parts if isinstance(part, Slices)]
    if len(slices) == len(parts):
        total = coverage.energy(view.params)
        counts, kept_N = count_and_energy(
            view.groups, energy_on_cut_axes(view.groups, view.params), slices
        )
        return counts, [_lost(float(kept), total) for kept in kept_N]
    return coverage.count(view.params, parts), coverage.delta2(view.params, parts)


def _lost(kept: float, total: float) -> float:
    """The share that is gone; what is due to rounding is nothing."""
    lost = 1 - kept / total if total else 0.0
    return lost if lost > 1e-9 else 0.0


def measure_policy(choice: PolicyFunction, view: View, rounds: int) -> PolicyCoverage:
    """Count per parameter what a policy covers, and add up what it cuts away, over some rounds."""
    gammas, delta2 = [], []
    total: Params = {}
    for parts in reductions_by_round(choice, view, rounds):
        counts, lost = count_and_noise(view, parts)
        total = {name: t.int() + total.get(name, 0) for name, t in counts.items()}
        gammas.append(coverage.minimum(counts))
        delta2.append(sum(lost))
    return PolicyCoverage(min(gammas), coverage.minimum(total), fmean(delta2))


def rounds_to_cover(choice: PolicyFunction, view: View, rounds: int, clients: int) -> int | None:
    """After how many rounds every parameter has been trained by so many different clients; None if after more."""
    small = {n: t[tuple(slice(0, k) for k in s.shape)] for (n, s), t in
             zip(energy_on_cut_axes(view.groups, view.params).items(), view.params.values(), strict=True)}  # fmt: skip
    ever: list[dict[str, Tensor]] = []
    for done, parts in enumerate(reductions_by_round(choice, view, rounds), start=1):
        entries = small if all(isinstance(part, Slices) for part in parts) else view.params
        masks = [part.mask(entries) for part in parts]
        ever = (
            [{n: old[n] | new[n] for n in new} for old, new in zip(ever, masks, strict=True)]
            if ever
            else masks
        )
        if all(
            int(torch.stack([mask[name] for mask in ever]).sum(0).min()) >= clients
            for name in entries
        ):
            return done
    return None


def planned_coverage(view: View, kind: str, target: PlanTarget) -> int:
    """The coverage of every unit that the planned policy aims at in a round."""
    groups, stacked, exact = plan_problem(view, kind)
    return target_coverage(groups, stacked, coverage.energy(view.params), target, exact)


def exact_frontier(view: View, kind: str) -> list[dict[str, Any]]:
    """Gamma and the least noise, exactly, over all groups together: absolute energies, divided once."""
    groups, _, _ = plan_problem(view, kind)
    total = coverage.energy(view.params) or 1.0
    largest = min(group.gamma_max for group in groups.values())

    def noise(group: BudgetedGroup, gamma: int) -> float:
        return float(np.sum(group.allocation(gamma).pruned_energy(group.tail_energy)))

    return [
        {"gamma": gamma, "noise": sum(noise(group, gamma) for group in groups.values()) / total}
        for gamma in range(largest + 1)
    ]


def achieved_frontier(view: View, rounds: int) -> list[dict[str, Any]]:
    """Where groups meet: what every parameter gets when every unit is held so many times (`units`)."""
    groups, stacked, _ = plan_problem(view, "subnet")
    most = min(
        (group.gamma_max for name, group in groups.items() if name not in stacked), default=0
    )
    if stacked:
        most = min(
            most, *(int((groups[name].budgets_N == groups[name].units).sum()) for name in stacked)
        )
    return [
        {"units": units, **measure_policy(partial(planned, gamma=units), view, rounds).line()}
        for units in range(most + 1)
    ]


def plot(report: Mapping[str, Any], path: str | Path) -> None:
    """Draw the frontier with the policies as points, in colours and shapes that differ for every eye."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    clock, meaning = (
        ("gamma", "in a round")
        if report["exact"]
        else ("gamma_window", f"in {report['window']} rounds")
    )
    points = report["frontier"]
    label = "least noise (exact)" if report["exact"] else "every unit held 0, 1, 2, ... times"
    axes.plot(
        [p[clock] for p in points],
        [p["noise"] for p in points],
        ".-",
        color="0.55",
        label=label,
        zorder=1,
    )
    for place, (name, seen) in enumerate(
        report["policies"].items()
    ):  # hollow, ever smaller: none hides another
        style = {
            "edgecolors": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
        }
        size = 30 * (len(report["policies"]) - place) + 30
        axes.scatter(
            seen[clock], seen["noise"], s=size, label=name, facecolors="none", linewidths=2, **style
        )
    axes.set_xlabel(f"coverage: fewest times that any parameter is trained {meaning}")
    axes.set_ylabel("noise: energy cut away, summed over clients")
    axes.set_title(f"{report['model']}, {report['kind']}, fleet {report['fleet']}", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, labelspacing=1.0
    )
    save_figure(figure, path)
