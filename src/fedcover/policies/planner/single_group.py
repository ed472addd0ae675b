"""One group of units, shared out exactly: the most energy that a fleet can keep with every unit covered Gamma times.

Ranked by energy, a best plan has three parts: heavy units are nested (everybody keeps the heaviest he can hold), at
most one unit lies between, and the light rest is dealt out evenly, each unit to exactly Gamma clients, in arcs of a
circle. docs/planner.md proves it. Shape suffixes: U units, N clients, R runs of equal columns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The right side of Theorem 1', over L^2 ||theta||^2: what a plan minimises when no coverage is asked for.

    The sum over clients of variance/Gamma_n^2 + (drift + delta_n^2)/Gamma_n, with Gamma_n the least coverage of what
    client n itself holds. The defaults stand for 300 local steps at the largest learning rate that the theorem
    allows, 1/(2 L T), and gradients as long as L ||theta||: variance 1/300, drift 1/12.
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
        """From the theorem's gamma, T, L, G and sigma^2, the last two over L^2 ||theta||^2.

        >>> PlanObjective.of(lr=1 / 600, steps=300).variance == PlanObjective().variance
        True
        """
        drift = (lr * smoothness) ** 2 * gradient * (steps - 1) * (2 * steps - 1) / 6
        return cls(2 * lr * smoothness * variance, drift)

    def __call__(self, noise_N: np.ndarray, inverse_N: np.ndarray) -> float:
        """The value for the clients' noises and the inverses of their own coverages."""
        return float((self.variance * inverse_N**2 + (self.drift + noise_N) * inverse_N).sum())


def required_coverage(gamma: int | None, tolerate: int, largest: int, why: str) -> int | None:
    """The coverage that was asked for, None if nothing was; too large a wish is answered with the largest."""
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
    return (
        None if gamma is None and not tolerate else max(gamma or 0, tolerate + 1 if tolerate else 0)
    )


MAX_MATRIX_ENTRIES = 10**8
"""Entries (clients x units) above which a plan stays a list of runs."""

GOLDEN = (5**0.5 - 1) / 2

Numbers = Sequence[float] | np.ndarray | Tensor
Counts = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class RunLengthPlan:
    """A plan as runs of equal columns: `order_U` lists the units run after run, `columns_RN` who holds each run.

    >>> made = RunLengthPlan(torch.tensor([2, 0, 1]), torch.tensor([1, 2]), torch.tensor([[True, True], [True, False]]))
    >>> made.column_sums().tolist(), made.row_sums().tolist(), made.gamma
    ([1, 1, 2], [3, 1], 1)
    """

    order_U: Tensor
    lengths_R: Tensor
    columns_RN: Tensor

    @property
    def gamma(self) -> int:
        """The fewest clients that hold any unit."""
        return int(self.columns_RN.sum(1).min())

    def labels(self) -> Tensor:
        """The run of every unit."""
        here = self.order_U.device
        runs_R = torch.arange(len(self.lengths_R), dtype=torch.int32, device=here)
        runs_U = runs_R.repeat_interleave(self.lengths_R.to(here))
        return torch.empty_like(runs_U).scatter_(0, self.order_U, runs_U)

    def column_sums(self) -> Tensor:
        """How many clients hold each unit."""
        return self.columns_RN.sum(1).to(self.order_U.device)[self.labels()]

    def row_sums(self) -> Tensor:
        """How many units each client holds."""
        return (self.columns_RN * self.lengths_R[:, None]).sum(0)

    def matrix(self) -> Tensor:
        """True where a client (row) holds a unit (column)."""
        return self.columns_RN.T.contiguous().to(self.order_U.device)[:, self.labels()]


@dataclass(frozen=True, eq=False)
class Allocation:
    """Who holds how much at one Gamma: `num_nested` units by rank, one that `between` clients hold (if any), and
    `rest_N` units of what remains for each client."""

    units: int
    gamma: int
    budgets_N: np.ndarray
    num_nested: int
    between: int
    rest_N: np.ndarray

    @property
    def num_shared(self) -> int:
        """How many units are dealt out evenly, each to exactly Gamma clients."""
        return self.units - self.num_nested - (self.between > 0)

    @property
    def _holds_between(self) -> np.ndarray:
        return np.asarray(np.maximum(0, self.budgets_N - self.num_nested) - self.rest_N)

    def pruned_energy(self, after_U1: Tensor) -> np.ndarray:
        """The energy that every client lacks, as a mean over all turns of the shared part (the sum has no spread).

        `after_U1[j]` is the energy of the units from rank j on.
        """
        heads_N = np.minimum(self.budgets_N, self.num_nested)
        places = [*heads_N.tolist(), self.num_nested, self.units - self.num_shared]
        tail_energy = after_U1[torch.tensor(places, device=after_U1.device)].cpu().numpy()
        nested_N = tail_energy[: len(heads_N)] - tail_energy[-2]
        between_N = (
            (1 - self._holds_between) * (tail_energy[-2] - tail_energy[-1]) if self.between else 0.0
        )
        return np.asarray(
            nested_N + between_N + (1 - self.rest_N / max(1, self.num_shared)) * tail_energy[-1]
        )

    def inverse_coverage(self) -> np.ndarray:
        """1/Gamma_n of every client: the least coverage of what it holds itself; 0 where it holds nothing."""
        ascending = np.sort(self.budgets_N)
        least_N = len(ascending) - np.searchsorted(ascending, self.budgets_N)
        least_N = np.where(self._holds_between > 0, self.between, least_N)
        least_N = np.where(self.rest_N > 0, self.gamma, least_N)
        return np.asarray((self.budgets_N > 0) / np.maximum(1, least_N))

    def assign_units(self, order_U: Tensor, phase: float = 0.0) -> RunLengthPlan:
        """Give the ranked units to the clients; `phase` (a share of the circle) says where the shared part begins."""
        levels = sorted(
            {int(k) for k in self.budgets_N if 0 < k < self.num_nested} | ({self.num_nested} - {0})
        )
        columns = [self.budgets_N >= level for level in levels]
        lengths = np.diff([0, *levels]).tolist()
        if self.between:
            columns, lengths = [*columns, self._holds_between > 0], [*lengths, 1]
        if self.num_shared:
            # client after client takes an arc of the circle; together they go round it Gamma times
            start_N = (
                int(phase % 1 * self.num_shared) + np.cumsum(self.rest_N) - self.rest_N
            ) % self.num_shared
            points = np.unique([0, *start_N])
            columns += list((points[:, None] - start_N) % self.num_shared < self.rest_N)
            lengths += np.diff([*points, self.num_shared]).tolist()
        head = self.units - self.num_shared
        dealt_U = torch.cat([order_U[:head], _spread_units(order_U[head:], self.units)])
        return RunLengthPlan(dealt_U, torch.tensor(lengths), torch.from_numpy(np.array(columns)))


def _spread_units(rest: Tensor, units: int) -> Tensor:
    """Units in an order that depends on their numbers alone and puts neighbours far apart.

    Not by energy: a unit must keep its place on the circle from round to round, or windows would not cover it.
    """
    stride = next(
        s for s in range(max(1, round(GOLDEN * units)), 2 * units + 1) if gcd(s, units) == 1
    )
    wanted_U = torch.zeros(units, dtype=torch.bool, device=rest.device)
    wanted_U[rest] = True
    spread_U = torch.arange(units, device=rest.device) * stride % units
    return spread_U[wanted_U[spread_U]]


@dataclass(frozen=True, eq=False)
class BudgetedGroup:
    """Units with energies, and how many of them each client may hold."""

    energies_U: Tensor
    budgets_N: np.ndarray

    @classmethod
    def of(cls, energies: Numbers, budgets: Counts) -> "BudgetedGroup":
        """The group, or one sentence about what is wrong with it."""
        try:
            energies_U = torch.as_tensor(energies, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):  # whatever torch makes of something else
            energies_U = torch.empty(0, 0)
        units = energies_U.numel()
        if (
            energies_U.ndim != 1
            or not units
            or not bool((energies_U.isfinite() & (energies_U >= 0)).all())
        ):
            raise InvalidValue(
                f"energies must be a list of finite numbers from 0 on, one per unit, at least one; got {energies!r:.80}"
            )
        budgets_N = np.asarray(budgets)
        whole = budgets_N.ndim == 1 and budgets_N.size and budgets_N.dtype.kind in "iu"
        if not whole or budgets_N.min() < 0 or budgets_N.max() > units:
            raise InvalidValue(
                f"budgets must be whole numbers in 0..{units} (of an integer type), one per client, at least one; "
                f"got {budgets!r:.80}"
            )
        if not energies_U.sum().isfinite():  # only their ratios matter
            energies_U = energies_U / energies_U.max()
        return cls(energies_U, budgets_N.astype(np.int64))

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.energies_U.numel()

    @property
    def gamma_max(self) -> int:
        """The largest feasible coverage of every unit: all places that the clients have, over the units."""
        return int(self.budgets_N.sum()) // self.units

    @cached_property
    def order(self) -> Tensor:
        """Units by energy, heaviest first; equal ones by number."""
        return self.energies_U.argsort(descending=True, stable=True)

    @cached_property
    def tail_energy(self) -> Tensor:
        """The energy of the units from each rank on."""
        ends_U = self.energies_U[self.order].flip(0).cumsum(0, dtype=torch.float64).flip(0)
        return torch.cat([ends_U, ends_U.new_zeros(1)])

    def allocation(self, gamma: int) -> Allocation:
        """The least noise with every unit covered at least `gamma` times: greedy on the rank sums of Gale and Ryser."""
        units, budgets_N, places = self.units, self.budgets_N, int(self.budgets_N.sum())
        if not 0 <= gamma <= self.gamma_max:
            raise InvalidValue(
                f"gamma must be at most {self.gamma_max}: the clients have room for {places} units together, "
                f"and {units} units {gamma} times each would be {units * gamma}; got {gamma}"
                if gamma > 0
                else f"gamma must be at least 0; got {gamma}"
            )

        def starves(
            heads: int,
        ) -> bool:  # whether nesting so many units leaves too little room for the others
            return int(np.minimum(budgets_N, heads).sum()) > places - gamma * (units - heads)

        first = bisect_left(range(units), True, key=starves)
        if first == units:
            return Allocation(units, gamma, budgets_N, units, 0, np.zeros_like(budgets_N))
        rest_N = np.maximum(0, budgets_N - (first - 1))
        between = int(rest_N.sum()) - gamma * (units - first)
        if between == gamma:  # no exception: it is shared like the others
            return Allocation(units, gamma, budgets_N, first - 1, 0, rest_N)
        rest_N[np.argsort(-rest_N, kind="stable")[:between]] -= 1
        return Allocation(units, gamma, budgets_N, first - 1, between, rest_N)


def best_gamma(groups: Sequence[BudgetedGroup], total: float, bound: PlanObjective) -> int:
    """The coverage, common to all groups, whose least-noise plan has the smallest bound; 0 only if 1 is too much."""
    largest = min(group.gamma_max for group in groups)

    def value(gamma: int) -> float:
        profiles = [(group.allocation(gamma), group.tail_energy) for group in groups]
        removed_N = np.sum(
            [allocation.pruned_energy(after_U1) for allocation, after_U1 in profiles], axis=0
        )
        inverse_N = np.max([allocation.inverse_coverage() for allocation, _ in profiles], axis=0)
        return bound(removed_N / (total or 1.0), inverse_N)

    # equal values: the larger coverage costs nothing
    return min(range(min(1, largest), largest + 1), key=lambda gamma: (value(gamma), -gamma))


def frontier(energies: Numbers, budgets: Counts) -> tuple[float, ...]:
    """The least noise (the sum over clients of the share of energy they lack) for Gamma = 0, 1, ..., the largest.

    >>> [round(noise, 3) for noise in frontier([4, 3, 2, 1], [4, 2, 2])]
    [0.6, 0.6, 1.0]
    """
    group = BudgetedGroup.of(energies, budgets)
    total = float(group.tail_energy[0]) or 1.0
    profiles = (group.allocation(gamma) for gamma in range(group.gamma_max + 1))
    return tuple(
        float(allocation.pruned_energy(group.tail_energy).sum()) / total for allocation in profiles
    )


def plan(
    energies: Numbers,
    budgets: Counts,
    gamma: int | None = None,
    tolerate: int = 0,
    bound: PlanObjective | None = None,
) -> np.ndarray | RunLengthPlan:
    """Who holds which unit: the least noise with every unit held by at least `gamma` and `tolerate + 1` clients.

    Without either, Gamma is the one of smallest `bound`. The answer is a boolean matrix clients x units, or `RunLengthPlan`
    above 100 million entries.

    >>> plan([4, 3, 2, 1], [4, 2, 2], gamma=2).astype(int).tolist()
    [[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    """
    group = BudgetedGroup.of(energies, budgets)
    why = f"room for {int(group.budgets_N.sum())} units over {group.units} units"
    wish = required_coverage(gamma, tolerate, group.gamma_max, why)
    chosen = (
        best_gamma([group], float(group.tail_energy[0]), bound or PlanObjective())
        if wish is None
        else wish
    )
    made = group.allocation(chosen).assign_units(group.order)
    return (
        made
        if made.columns_RN.shape[1] * group.units > MAX_MATRIX_ENTRIES
        else made.matrix().cpu().numpy()
    )
