"""Optimal plans for one group: keep the most energy with every unit covered Gamma times.

Rank the units by energy. Then a best plan has three parts: heavy units are nested (every client
keeps the heaviest it can hold), at most one unit is an exception, and the light rest is shared
evenly, each unit by exactly Gamma clients, in arcs of a circle. docs/planner.md has the proof.
Shape suffixes: U units, N clients, R runs of equal columns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.planner.allocation import Allocation, RunLengthPlan

MAX_MATRIX_ENTRIES = 10**8
"""Entries (clients x units) above which `plan` returns a `RunLengthPlan`."""

Numbers = Sequence[float] | np.ndarray | Tensor
Counts = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """What a plan minimises without a coverage: Theorem 1' (right side), over L^2 ||theta||^2.

    It is the sum over clients of variance/Gamma_n^2 + (drift + delta_n^2)/Gamma_n, where Gamma_n is
    the least coverage of what client n itself holds. The defaults are for 300 local steps, the
    largest learning rate that the theorem allows, 1/(2 L T), and gradients of length L ||theta||:
    variance 1/300, drift 1/12.
    """

    variance: float = 1 / 300
    drift: float = 1 / 12

    def __post_init__(self) -> None:
        for name in ("variance", "drift"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidValue(f"{name} must be a number from 0 on; got {getattr(self, name)}")

    @classmethod
    def of(
        cls,
        *,
        lr: float,
        steps: int,
        smoothness: float = 1.0,
        gradient: float = 1.0,
        variance: float = 1.0,
    ) -> "PlanObjective":
        """Return the objective for the theorem's constants.

        Args:
            lr: The learning rate gamma.
            steps: The number of local steps T.
            smoothness: L.
            gradient: G, over L^2 ||theta||^2.
            variance: sigma^2, over L^2 ||theta||^2.

        >>> PlanObjective.of(lr=1 / 600, steps=300).variance == PlanObjective().variance
        True
        """
        drift = (lr * smoothness) ** 2 * gradient * (steps - 1) * (2 * steps - 1) / 6
        return cls(2 * lr * smoothness * variance, drift)

    def __call__(self, noise_N: np.ndarray, inverse_N: np.ndarray) -> float:
        """Return the value for the clients' noises and the inverses of their own coverages."""
        return float((self.variance * inverse_N**2 + (self.drift + noise_N) * inverse_N).sum())


def required_coverage(gamma: int | None, tolerate: int, largest: int, why: str) -> int | None:
    """Return the coverage that `gamma` and `tolerate` require together, None if both are unset.

    Raises:
        InvalidValue: If a value is invalid or more than the `largest` feasible coverage; `why` says
            what limits that.
    """
    for name, value in (("gamma", gamma), ("tolerate", tolerate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InvalidValue(f"{name} must be a whole number from 0 on; got {value!r}")
        if value is not None and value < 0:
            raise InvalidValue(f"{name} must be at least 0; got {value}")
    if gamma is not None and gamma > largest:
        raise InvalidValue(f"gamma must be at most {largest} ({why}); got {gamma}")
    if tolerate and tolerate + 1 > largest:
        allowed = f"at most {largest - 1}" if largest > 1 else "0"
        raise InvalidValue(
            f"tolerate must be {allowed}: {tolerate} drop-outs need coverage {tolerate + 1}, "
            f"and the largest feasible is {largest} ({why}); got {tolerate}"
        )
    if gamma is None and not tolerate:
        return None
    return max(gamma or 0, tolerate + 1 if tolerate else 0)


@dataclass(frozen=True, eq=False)
class BudgetedGroup:
    """The energies of a group's units, and how many of them each client may hold."""

    energies_U: Tensor
    budgets_N: np.ndarray

    @classmethod
    def of(cls, energies: Numbers, budgets: Counts) -> "BudgetedGroup":
        """Return the group of these energies and budgets, checked.

        Raises:
            InvalidValue: If the energies or the budgets are invalid.
        """
        energies_U = _checked_energies(energies)
        budgets_N = _checked_budgets(budgets, energies_U.numel())
        if not energies_U.sum().isfinite():  # only their ratios matter
            energies_U = energies_U / energies_U.max()
        return cls(energies_U, budgets_N)

    @property
    def units(self) -> int:
        """Return the number of units."""
        return self.energies_U.numel()

    @property
    def gamma_max(self) -> int:
        """Return the largest feasible coverage of every unit: the sum of budgets over the units."""
        return int(self.budgets_N.sum()) // self.units

    @cached_property
    def order(self) -> Tensor:
        """Return the units by energy, heaviest first; equal ones by number."""
        return self.energies_U.argsort(descending=True, stable=True)

    @cached_property
    def tail_energy(self) -> Tensor:
        """Return the energy of the units from each rank on."""
        ends_U = self.energies_U[self.order].flip(0).cumsum(0, dtype=torch.float64).flip(0)
        return torch.cat([ends_U, ends_U.new_zeros(1)])

    def allocation(self, gamma: int) -> Allocation:
        """Return the allocation of least noise that covers every unit at least `gamma` times.

        It is greedy on the rank sums of Gale and Ryser.
        """
        units, budgets_N, room = self.units, self.budgets_N, int(self.budgets_N.sum())
        if gamma < 0:
            raise InvalidValue(f"gamma must be at least 0; got {gamma}")
        if gamma > self.gamma_max:
            raise InvalidValue(
                f"gamma must be at most {self.gamma_max}: the clients have room for {room} units "
                f"together, and {units} units {gamma} times each would be {units * gamma}; "
                f"got {gamma}"
            )

        def leaves_too_little(num_nested: int) -> bool:
            """Return whether nesting this many units leaves too little room for the others."""
            room_of_nested = int(np.minimum(budgets_N, num_nested).sum())
            return room_of_nested > room - gamma * (units - num_nested)

        first = bisect_left(range(units), True, key=leaves_too_little)
        if first == units:
            return Allocation(units, gamma, budgets_N, units, 0, np.zeros_like(budgets_N))
        rest_N = np.maximum(0, budgets_N - (first - 1))
        between = int(rest_N.sum()) - gamma * (units - first)
        if between == gamma:  # not an exception: it is shared like the others
            return Allocation(units, gamma, budgets_N, first - 1, 0, rest_N)
        rest_N[np.argsort(-rest_N, kind="stable")[:between]] -= 1
        return Allocation(units, gamma, budgets_N, first - 1, between, rest_N)


def _checked_energies(energies: Numbers) -> Tensor:
    try:
        energies_U = torch.as_tensor(energies, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # torch raises any of these for other objects
        energies_U = torch.empty(0, 0)
    is_list = energies_U.ndim == 1 and energies_U.numel() > 0
    if not is_list or not bool((energies_U.isfinite() & (energies_U >= 0)).all()):
        raise InvalidValue(
            "energies must be a list of finite numbers from 0 on, one per unit, at least one; "
            f"got {energies!r:.80}"
        )
    return energies_U


def _checked_budgets(budgets: Counts, units: int) -> np.ndarray:
    budgets_N = np.asarray(budgets)
    is_whole = budgets_N.ndim == 1 and budgets_N.size and budgets_N.dtype.kind in "iu"
    if not is_whole or budgets_N.min() < 0 or budgets_N.max() > units:
        raise InvalidValue(
            f"budgets must be whole numbers in 0..{units} (of an integer type), one per client, "
            f"at least one; got {budgets!r:.80}"
        )
    return budgets_N.astype(np.int64)


def best_gamma(groups: Sequence[BudgetedGroup], total: float, bound: PlanObjective) -> int:
    """Return the common coverage whose least-noise plan has the smallest bound.

    It is 0 only if a coverage of 1 is infeasible.
    """
    largest = min(group.gamma_max for group in groups)

    def value(gamma: int) -> float:
        allocations = [group.allocation(gamma) for group in groups]
        removed = [
            allocation.pruned_energy(group.tail_energy)
            for allocation, group in zip(allocations, groups, strict=True)
        ]
        inverse = [allocation.inverse_coverage() for allocation in allocations]
        return bound(np.sum(removed, axis=0) / (total or 1.0), np.max(inverse, axis=0))

    # of equal values take the larger coverage, which costs nothing
    return min(range(min(1, largest), largest + 1), key=lambda gamma: (value(gamma), -gamma))


def frontier(energies: Numbers, budgets: Counts) -> tuple[float, ...]:
    """Return the least noise for every Gamma from 0 to the largest feasible one.

    Noise is the sum over clients of the share of energy that they lack.

    >>> [round(noise, 3) for noise in frontier([4, 3, 2, 1], [4, 2, 2])]
    [0.6, 0.6, 1.0]
    """
    group = BudgetedGroup.of(energies, budgets)
    total = float(group.tail_energy[0]) or 1.0
    allocations = [group.allocation(gamma) for gamma in range(group.gamma_max + 1)]
    return tuple(
        float(allocation.pruned_energy(group.tail_energy).sum()) / total
        for allocation in allocations
    )


def plan(
    energies: Numbers,
    budgets: Counts,
    gamma: int | None = None,
    tolerate: int = 0,
    bound: PlanObjective | None = None,
) -> np.ndarray | RunLengthPlan:
    """Plan which client holds which unit, with the least noise at the required coverage.

    Args:
        energies: The energy of every unit (the sum of squares of its weights).
        budgets: How many units every client can hold.
        gamma: The least number of clients that hold each unit.
        tolerate: The number of drop-outs after which every unit is still held.
        bound: The objective that chooses Gamma if neither `gamma` nor `tolerate` is given.

    Returns:
        A boolean matrix (clients x units), or a `RunLengthPlan` above 100 million entries.

    Raises:
        InvalidValue: If an argument is invalid or the coverage is infeasible.

    >>> plan([4, 3, 2, 1], [4, 2, 2], gamma=2).astype(int).tolist()
    [[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    """
    group = BudgetedGroup.of(energies, budgets)
    why = f"room for {int(group.budgets_N.sum())} units over {group.units} units"
    coverage = required_coverage(gamma, tolerate, group.gamma_max, why)
    if coverage is None:
        total = float(group.tail_energy[0])
        coverage = best_gamma([group], total, bound or PlanObjective())
    assignment = group.allocation(coverage).assign_units(group.order)
    num_clients = assignment.columns_RN.shape[1]
    if num_clients * group.units > MAX_MATRIX_ENTRIES:
        return assignment
    return assignment.matrix().cpu().numpy()
