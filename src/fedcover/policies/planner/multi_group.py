"""Plans for whole models: unit energies, groups that meet in a tensor, and their common coverage.

Where no tensor is cut along two axes, the groups are independent once Gamma is given, and the plan
is exact. Where two groups meet in a tensor, a weight is covered only by a client that holds both of
its units. Then every group is planned by itself, and the shared parts rotate against each other
from round to round, so that windows of rounds cover the pairs.
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
from fedcover.policies.planner.allocation import GOLDEN, Allocation, RunLengthPlan
from fedcover.policies.planner.single_group import (
    BudgetedGroup,
    PlanObjective,
    best_gamma,
    required_coverage,
)
from fedcover.submodels.unit_groups import cuts_by_tensor
from fedcover.types import UnitGroup

MAX_SHIFTS = 1000
"""The most shifts among which a short cycle is searched greedily.

A longer cycle is lengthened a little instead, until steps of equal size meet everywhere.
"""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What a plan has to achieve.

    `gamma` is a coverage and `tolerate` a number of drop-outs to survive. Without both, the plan
    minimises an objective: where it is exact, `bound`; where groups meet, the noise with every unit
    held at least `share` as often as the fleet could. In our measurements full coverage at any
    noise was worst there, and half of it best.
    """

    gamma: int | None = None
    tolerate: int = 0
    share: float = 0.5
    bound: PlanObjective = field(default_factory=PlanObjective)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InvalidValue(f"policy planned: share must be in (0, 1]; got {self.share}")


def unit_energies(groups: Sequence[UnitGroup], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each group the sum of squares of all entries that are removed with a unit.

    >>> from fedcover.types import Cut
    >>> hidden = UnitGroup("hidden", 2, (Cut("w", 0), Cut("v", 1)))
    >>> params = {"w": torch.tensor([[1.0], [2.0]]), "v": torch.tensor([[3.0, 0.0]])}
    >>> unit_energies([hidden], params)["hidden"].tolist()
    [10.0, 4.0]
    """
    energies = {group.name: torch.zeros(group.size, dtype=torch.float64) for group in groups}
    for tensor, cuts in cuts_by_tensor(groups).items():
        if tensor not in params:  # norm statistics are cut too, but they are not parameters
            continue
        squares = params[tensor].square()
        for group, cut in cuts:
            if cut.axis is None:  # the whole tensor belongs to one unit
                energies[group.name][cut.unit] += squares.sum(dtype=torch.float64).cpu()
                continue
            other_axes = [axis for axis in range(squares.ndim) if axis != cut.axis]
            if other_axes:
                along_axis = squares.sum(other_axes, dtype=torch.float64)
            else:
                along_axis = squares.double()
            end = cut.start + group.size * cut.per_unit
            by_unit = along_axis[cut.start : end].view(group.size, cut.per_unit)
            energies[group.name] += by_unit.sum(1).cpu()
    return energies


def is_exact(groups: Sequence[UnitGroup]) -> bool:
    """Return whether no tensor is cut twice.

    Then the least noise and the coverage of every parameter are known exactly.
    """
    if any(group.nested for group in groups):
        return False
    return all(len(cuts) < 2 for cuts in cuts_by_tensor(groups).values())


def conflict_colouring(groups: Sequence[UnitGroup]) -> dict[str, int]:
    """Return a small number (a colour) per group; groups that meet in a tensor get different ones.

    >>> from fedcover.types import Cut
    >>> a, b = UnitGroup("a", 2, (Cut("w", 0),)), UnitGroup("b", 2, (Cut("w", 1),))
    >>> conflict_colouring([a, b, UnitGroup("c", 2, ())])
    {'a': 0, 'b': 1, 'c': 0}
    """
    names_by_tensor = [
        {group.name for group, _ in cuts} for cuts in cuts_by_tensor(groups).values()
    ]
    colour_of: dict[str, int] = {}
    for group in groups:
        neighbours: set[str] = set()
        for names in names_by_tensor:
            if group.name in names:
                neighbours |= names - {group.name}
        used_colours = {colour_of.get(name) for name in neighbours}
        colour_of[group.name] = next(colour for colour in count() if colour not in used_colours)
    return colour_of


@cache
def phase_shifts(cycle: int, num_colours: int) -> tuple[tuple[int, ...], ...]:
    """Return shifts of every colour, so that any two colours take all positions to each other.

    Shifts are in steps of 1/cycle. The shift "colour times step" needs `cycle` rounds, unless the
    cycle and a difference of colours have a common factor. Then a few more rounds are needed, which
    are found greedily.

    >>> phase_shifts(3, 2), len(phase_shifts(4, 3))
    (((0, 0), (0, 1), (0, 2)), 5)
    """
    if _equal_steps_suffice(cycle, num_colours):
        return tuple(
            tuple(colour * step % cycle for colour in range(num_colours)) for step in range(cycle)
        )

    def positions(shifts: tuple[int, ...]) -> set[tuple[int, int, int]]:
        pairs = combinations(range(num_colours), 2)
        return {(a, b, (shifts[b] - shifts[a]) % cycle) for a, b in pairs}

    candidates = [(0, *rest) for rest in product(range(cycle), repeat=num_colours - 1)]
    missing = set().union(*map(positions, candidates))
    best_shifts = []
    while missing:
        best_shifts.append(max(candidates, key=lambda shifts: len(missing & positions(shifts))))
        missing -= positions(best_shifts[-1])
    return tuple(best_shifts)


def _equal_steps_suffice(cycle: int, num_colours: int) -> bool:
    return all(gcd(cycle, gap) == 1 for gap in range(1, num_colours))


def phase(round: int, colour: int, cycle: int, num_colours: int) -> float:
    """Return where the shared part of a group begins in a round, as a share of the circle.

    Within a cycle the colours pass each other in equal steps, so that arcs of 1/cycle meet
    everywhere. Then all of them advance by irrational amounts, so that a pair that was missed at
    the edge of an arc is covered later.

    >>> [phase(round, 1, 3, 2) for round in range(3)] == [0, 1 / 3, 2 / 3]
    True
    """
    shifts = phase_shifts(cycle, num_colours)
    cycles, step = divmod(round, len(shifts))
    drift_per_cycle = GOLDEN + colour * (2**0.5 - 1) / cycle
    return (shifts[step][colour] / cycle + cycles * drift_per_cycle) % 1


def cycle_length(allocations: Sequence[Allocation], num_colours: int) -> int:
    """Return the number of steps of a circle: one over the arc that holds a unit on average."""
    if num_colours < 2:
        return 1
    lengths = [1]
    for allocation in allocations:
        if allocation.num_shared and allocation.rest_N.any():
            arcs_N = allocation.rest_N / allocation.num_shared
            lengths.append(ceil(arcs_N.sum() / np.square(arcs_N).sum() - 1e-9))
    length = max(lengths)
    if length ** (num_colours - 1) < MAX_SHIFTS:
        return length
    return next(n for n in count(length) if _equal_steps_suffice(n, num_colours))


def target_coverage(
    groups: Mapping[str, BudgetedGroup],
    nested: Sequence[str],
    total: float,
    target: PlanTarget,
    exact: bool,
) -> int:
    """Return the coverage of every unit that a target requires, common to all groups.

    It is 0 if one round cannot cover all units. Of the `nested` groups only first units can be
    kept, so their last unit has as many clients as hold the whole group.
    """
    largest = {name: group.gamma_max for name, group in groups.items()}
    for name in nested:
        largest[name] = int((groups[name].budgets_N == groups[name].units).sum())
    scarce = min(largest, key=lambda name: largest[name])
    if scarce in nested:
        why = f"{largest[scarce]} clients hold all of {scarce!r}, which is nested"
    else:
        room, units = int(groups[scarce].budgets_N.sum()), groups[scarce].units
        why = f"the clients have room for {room} units of {scarce!r}, which has {units}"
    required = required_coverage(target.gamma, target.tolerate, largest[scarce], why)
    if required is not None:
        return required
    if exact:
        return best_gamma(list(groups.values()), total, target.bound)
    feasible = min((largest[name] for name in groups if name not in nested), default=0)
    return min(feasible, max(1, int(target.share * feasible + 1e-9)))


def plan_round(
    groups: Mapping[str, BudgetedGroup],
    colour_of: Mapping[str, int] | None,
    total: float,
    target: PlanTarget,
    round: int,
    nested: Sequence[str] = (),
) -> dict[str, RunLengthPlan]:
    """Plan which client holds which units of every group in a round.

    `colour_of` gives the colours of groups that meet; it is None if no groups meet. If the cohort
    is too small to hold every unit once, several rounds are planned as if they were one.
    """
    gamma = target_coverage(groups, nested, total, target, exact=colour_of is None)
    free = {name: group for name, group in groups.items() if name not in nested}
    num_rounds = 1
    if gamma == 0 and target.gamma is None:
        num_rounds = _rounds_to_hold_all(free, target.share)
        free = {
            name: BudgetedGroup(group.energies_U, np.tile(group.budgets_N, num_rounds))
            for name, group in free.items()
        }
        gamma = min([1, *(group.gamma_max for group in free.values())])
    allocations = {name: group.allocation(gamma) for name, group in free.items()}
    colour_of = colour_of or dict.fromkeys(groups, 0)
    num_colours = 1 + max(colour_of.values())
    cycle = cycle_length(list(allocations.values()), num_colours)
    plans: dict[str, RunLengthPlan] = {}
    for name, allocation in allocations.items():
        start = phase(round // num_rounds, colour_of[name], cycle, num_colours)
        plan = allocation.assign_units(free[name].order, start)
        plans[name] = _plan_of_round(plan, round % num_rounds, num_rounds)
    for name in nested:
        in_order = torch.arange(groups[name].units)
        plans[name] = groups[name].allocation(0).assign_units(in_order)
    return plans


def _rounds_to_hold_all(groups: Mapping[str, BudgetedGroup], share: float) -> int:
    """Return in how many rounds the clients can hold every unit, using a share of their room."""
    return max(
        (
            ceil(group.units / (int(group.budgets_N.sum()) * share))
            for group in groups.values()
            if group.budgets_N.any()
        ),
        default=1,
    )


def _plan_of_round(plan: RunLengthPlan, index: int, num_rounds: int) -> RunLengthPlan:
    """Return the columns of one round from a plan of several rounds."""
    clients = plan.columns_RN.shape[1] // num_rounds
    columns_RN = plan.columns_RN[:, index * clients : (index + 1) * clients]
    return RunLengthPlan(plan.order_U, plan.lengths_R, columns_RN)
