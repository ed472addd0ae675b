"""Whole models: what leaves with a unit, which groups meet in a tensor, and one coverage for all groups.

Where no tensor is cut along two axes, the groups separate once Gamma is given, and the plan is exact. Where two groups
meet in a tensor, a weight is covered only by a client that holds both its units; then every group is planned by
itself and the shared parts turn against each other from round to round, so that windows of rounds cover the pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, count, product
from math import ceil, gcd

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.planner.single_group import (
    GOLDEN,
    Allocation,
    BudgetedGroup,
    PlanObjective,
    RunLengthPlan,
    best_gamma,
    required_coverage,
)
from fedcover.submodels.reductions import Slices
from fedcover.submodels.unit_groups import cuts_by_tensor
from fedcover.types import Params, Reduction, UnitGroup

MAX_SHIFTS = 1000
"""Shifts among which a cycle is searched; a longer one is made a little longer still, so that none is needed."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What is asked of a plan: a coverage, drop-outs to survive, or (without both) the smallest of an objective.

    Where the plan is exact the objective is `bound`. Where groups meet it is the least noise with every unit held at
    least `share` as often as the fleet could: full coverage at any noise measured worst there, half of it best.
    """

    gamma: int | None = None
    tolerate: int = 0
    share: float = 0.5
    bound: PlanObjective = field(default_factory=PlanObjective)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InvalidValue(f"policy planned: share must be in (0, 1]; got {self.share}")


def unit_energies(groups: Sequence[UnitGroup], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each group, the squares of all entries that leave with a unit, added up.

    >>> from fedcover.types import Cut
    >>> hidden = UnitGroup("hidden", 2, (Cut("w", 0), Cut("v", 1)))
    >>> unit_energies([hidden], {"w": torch.tensor([[1.0], [2.0]]), "v": torch.tensor([[3.0, 0.0]])})["hidden"].tolist()
    [10.0, 4.0]
    """
    energies = {group.name: torch.zeros(group.size, dtype=torch.float64) for group in groups}
    for tensor, meeting in cuts_by_tensor(groups).items():
        if tensor not in params:  # norm statistics are cut too, but they are no parameters
            continue
        squares = params[tensor].square()
        for group, cut in meeting:
            if cut.axis is None:  # the whole tensor leaves with one unit
                energies[group.name][cut.unit] += squares.sum(dtype=torch.float64).cpu()
                continue
            other = [axis for axis in range(squares.ndim) if axis != cut.axis]
            along = squares.sum(other, dtype=torch.float64) if other else squares.double()
            owned = along[cut.start : cut.start + group.size * cut.per_unit].view(
                group.size, cut.per_unit
            )
            energies[group.name] += owned.sum(1).cpu()
    return energies


def is_exact(groups: Sequence[UnitGroup]) -> bool:
    """Whether no tensor is cut twice, so that the least noise and the coverage of every parameter are known exactly."""
    alone = all(len(meeting) < 2 for meeting in cuts_by_tensor(groups).values())
    return alone and not any(group.nested for group in groups)


def conflict_colouring(groups: Sequence[UnitGroup]) -> dict[str, int]:
    """A small number for each group, different where two groups meet in a tensor.

    >>> from fedcover.types import Cut
    >>> conflict_colouring([UnitGroup("a", 2, (Cut("w", 0),)), UnitGroup("b", 2, (Cut("w", 1),)), UnitGroup("c", 2, ())])
    {'a': 0, 'b': 1, 'c': 0}
    """
    meetings = [{group.name for group, _ in meeting} for meeting in cuts_by_tensor(groups).values()]
    found: dict[str, int] = {}
    for group in groups:
        taken = {
            found.get(name)
            for names in meetings
            if group.name in names
            for name in names - {group.name}
        }
        found[group.name] = next(colour for colour in count() if colour not in taken)
    return found


@cache
def phase_shifts(cycle: int, num_colours: int) -> tuple[tuple[int, ...], ...]:
    """Shifts of every colour, in steps of 1/cycle, such that any two colours take all positions to each other.

    Colour times step does it in `cycle` rounds unless cycle and a difference of colours share a factor; then a few
    more rounds are needed, found greedily.

    >>> phase_shifts(3, 2), len(phase_shifts(4, 3))
    (((0, 0), (0, 1), (0, 2)), 5)
    """
    if all(gcd(cycle, gap) == 1 for gap in range(1, num_colours)):
        return tuple(
            tuple(colour * step % cycle for colour in range(num_colours)) for step in range(cycle)
        )

    def met(shifts: tuple[int, ...]) -> set[tuple[int, int, int]]:
        return {
            (a, b, (shifts[b] - shifts[a]) % cycle) for a, b in combinations(range(num_colours), 2)
        }

    candidates = [(0, *rest) for rest in product(range(cycle), repeat=num_colours - 1)]
    missing = set().union(*map(met, candidates))
    found = []
    while missing:
        found.append(max(candidates, key=lambda shifts: len(missing & met(shifts))))
        missing -= met(found[-1])
    return tuple(found)


def phase(round: int, colour: int, cycle: int, num_colours: int) -> float:
    """Where the shared part of a group begins in a round, as a share of the circle.

    First all colours pass each other in equal steps, so that arcs of 1/cycle meet everywhere; then all of them move
    on by irrational amounts, so that what fell on an edge is met later.

    >>> [phase(round, 1, 3, 2) for round in range(3)] == [0, 1 / 3, 2 / 3]
    True
    """
    cycles, step = divmod(round, len(phase_shifts(cycle, num_colours)))
    return (
        phase_shifts(cycle, num_colours)[step][colour] / cycle
        + cycles * (GOLDEN + colour * (2**0.5 - 1) / cycle)
    ) % 1


def cycle_length(profiles: Sequence[Allocation], num_colours: int) -> int:
    """How many steps a circle has: one over the arc that a unit sees on average."""
    if num_colours < 2:
        return 1
    arcs = [
        allocation.rest_N / allocation.num_shared
        for allocation in profiles
        if allocation.num_shared
    ]
    wanted = max(
        (ceil(arc_N.sum() / np.square(arc_N).sum() - 1e-9) for arc_N in arcs if arc_N.any()),
        default=1,
    )
    if wanted ** (num_colours - 1) < MAX_SHIFTS:
        return wanted
    return next(n for n in count(wanted) if all(gcd(n, gap) == 1 for gap in range(1, num_colours)))


def target_coverage(
    groups: Mapping[str, BudgetedGroup],
    stacked: Sequence[str],
    total: float,
    target: PlanTarget,
    exact: bool,
) -> int:
    """The coverage of every unit that a wish amounts to, common to all groups; 0 if a round cannot cover them.

    Of the `stacked` groups only first units can be kept, so that their last unit has as many clients as hold all.
    """
    largest = {name: group.gamma_max for name, group in groups.items()}
    largest |= {name: int((groups[name].budgets_N == groups[name].units).sum()) for name in stacked}
    scarce = min(largest, key=lambda name: largest[name])
    room, units = int(groups[scarce].budgets_N.sum()), groups[scarce].units
    why = f"the clients have room for {room} units of {scarce!r}, which has {units}"
    if scarce in stacked:
        why = f"{largest[scarce]} clients hold all of {scarce!r}, whose units stand on each other"
    wanted = required_coverage(target.gamma, target.tolerate, largest[scarce], why)
    if wanted is not None:
        return wanted
    if exact:
        return best_gamma(list(groups.values()), total, target.bound)
    most = min((largest[name] for name in groups if name not in stacked), default=0)
    return min(most, max(1, int(target.share * most + 1e-9)))


def plan_round(
    groups: Mapping[str, BudgetedGroup],
    colour_of: Mapping[str, int] | None,
    total: float,
    target: PlanTarget,
    round: int,
    stacked: Sequence[str] = (),
) -> dict[str, RunLengthPlan]:
    """Who holds which units of every group in a round; `colour_of` are the colours of groups that meet, else None.

    Where a cohort is too small to hold every unit once, some rounds are planned as if they were one.
    """
    gamma = target_coverage(groups, stacked, total, target, exact=colour_of is None)
    free = {name: group for name, group in groups.items() if name not in stacked}
    together = 1
    if gamma == 0 and target.gamma is None:
        together = max(
            (
                ceil(g.units / (int(g.budgets_N.sum()) * target.share))
                for g in _groups_with_budget(free)
            ),
            default=1,
        )
        free = {
            name: BudgetedGroup(g.energies_U, np.tile(g.budgets_N, together))
            for name, g in free.items()
        }
        gamma = min([1, *(group.gamma_max for group in free.values())])
    profiles = {name: group.allocation(gamma) for name, group in free.items()}
    colour_of = colour_of or dict.fromkeys(groups, 0)
    num_colours = 1 + max(colour_of.values())
    cycle = cycle_length(list(profiles.values()), num_colours)
    made = {
        name: allocation.assign_units(
            free[name].order, phase(round // together, colour_of[name], cycle, num_colours)
        )
        for name, allocation in profiles.items()
    }
    first = {
        name: groups[name].allocation(0).assign_units(torch.arange(groups[name].units))
        for name in stacked
    }
    return {
        name: _client_columns(runs, round % together, together) for name, runs in made.items()
    } | first


def _groups_with_budget(groups: Mapping[str, BudgetedGroup]) -> list[BudgetedGroup]:
    return [group for group in groups.values() if group.budgets_N.any()]


def _client_columns(runs: RunLengthPlan, which: int, parts: int) -> RunLengthPlan:
    clients = runs.columns_RN.shape[1] // parts
    return RunLengthPlan(
        runs.order_U, runs.lengths_R, runs.columns_RN[:, which * clients : (which + 1) * clients]
    )


def coverage_upper_bound(
    params: Mapping[str, Tensor], reductions: Sequence[Reduction]
) -> tuple[int, str]:
    """The coverage that no arrangement of parts of these sizes can exceed, and the tensor that limits it."""
    held = [reduction.sizes(params) for reduction in reductions]
    bounds = {
        name: sum(sizes[name] for sizes in held) // max(1, t.numel()) for name, t in params.items()
    }
    scarce = min(bounds, key=lambda name: bounds[name])
    return bounds[scarce], scarce


def count_and_energy(
    groups: Sequence[UnitGroup], squares: Params, parts: Sequence[Slices]
) -> tuple[Params, np.ndarray]:
    """Per tensor how many parts hold each entry, and the energy that every part keeps, from `energy_on_cut_axes` squares.

    The fast twin of counting part by part: a weight is held where both its units are, so counts are products.
    """
    places = membership_by_axis(groups, squares, parts)
    counts: Params = {}
    kept_N = np.zeros(len(parts))
    for name, tensor in squares.items():
        present_N, along = places[name]
        letters = "abcdefgh"[: tensor.ndim]
        factors = [
            torch.ones(len(parts), tensor.shape[axis]) if m is None else m
            for axis, m in enumerate(along)
        ]
        rule = ",".join(["n", *(f"n{letter}" for letter in letters)])
        counts[name] = torch.einsum(f"{rule}->{letters}", present_N, *factors).round().int()
        doubles = [factor.double() for factor in (present_N, *factors)]
        kept_N += torch.einsum(f"{rule},{letters}->n", *doubles, tensor).numpy()
    return counts, kept_N


def membership_by_axis(
    groups: Sequence[UnitGroup], params: Mapping[str, Tensor], parts: Sequence[Slices]
) -> dict[str, tuple[Tensor, list[Tensor | None]]]:
    """For each tensor, which parts have it at all, and along each cut axis which places each part holds (1 or 0)."""
    units = {g.name: torch.zeros(len(parts), g.size) for g in groups}
    for n, part in enumerate(parts):
        for group in groups:
            units[group.name][n, part.kept[group.name]] = 1
    found: dict[str, tuple[Tensor, list[Tensor | None]]] = {}
    meetings = cuts_by_tensor(groups)
    for name, tensor in params.items():
        present_N = torch.ones(len(parts))
        along: list[Tensor | None] = [None] * tensor.ndim
        for group, cut in meetings.get(name, ()):
            if cut.axis is None:
                present_N = present_N * units[group.name][:, cut.unit]
                continue
            whole = along[cut.axis]
            whole = torch.ones(len(parts), tensor.shape[cut.axis]) if whole is None else whole
            owned = units[group.name].repeat_interleave(cut.per_unit, 1)
            whole[:, cut.start : cut.start + owned.shape[1]] = owned
            along[cut.axis] = whole
        found[name] = (present_N, along)
    return found


def energy_on_cut_axes(groups: Sequence[UnitGroup], params: Mapping[str, Tensor]) -> Params:
    """The squares of the parameters, added up along the axes that no group cuts: as good for counting, and small."""
    meeting = cuts_by_tensor(groups)
    small: Params = {}
    for name, tensor in params.items():
        cut = {place.axis for _, place in meeting.get(name, ()) if place.axis is not None}
        whole = [axis for axis in range(tensor.ndim) if axis not in cut]
        squares = tensor.square()
        small[name] = (
            squares.sum(whole, keepdim=True, dtype=torch.float64) if whole else squares.double()
        )
    return small
