"""Plans for one group: how many units every client holds, and which ones.

Shape suffixes: U units, N clients, R runs of equal columns.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class RunLengthPlan:
    """A plan as runs of equal columns.

    `order_U` lists the units run after run, and `columns_RN` says which clients hold each run.

    >>> columns = torch.tensor([[True, True], [True, False]])
    >>> plan = RunLengthPlan(torch.tensor([2, 0, 1]), torch.tensor([1, 2]), columns)
    >>> plan.column_sums().tolist(), plan.row_sums().tolist(), plan.gamma
    ([1, 1, 2], [3, 1], 1)
    """

    order_U: Tensor
    lengths_R: Tensor
    columns_RN: Tensor

    @property
    def gamma(self) -> int:
        """Return the smallest number of clients that hold a unit."""
        return int(self.columns_RN.sum(1).min())

    def labels(self) -> Tensor:
        """Return the run of every unit."""
        device = self.order_U.device
        runs_R = torch.arange(len(self.lengths_R), dtype=torch.int32, device=device)
        runs_U = runs_R.repeat_interleave(self.lengths_R.to(device))
        return torch.empty_like(runs_U).scatter_(0, self.order_U, runs_U)

    def column_sums(self) -> Tensor:
        """Return how many clients hold each unit."""
        return self.columns_RN.sum(1).to(self.order_U.device)[self.labels()]

    def row_sums(self) -> Tensor:
        """Return how many units each client holds."""
        return (self.columns_RN * self.lengths_R[:, None]).sum(0)

    def matrix(self) -> Tensor:
        """Return a matrix that is True where a client (row) holds a unit (column)."""
        return self.columns_RN.T.contiguous().to(self.order_U.device)[:, self.labels()]


@dataclass(frozen=True, eq=False)
class Allocation:
    """How many units of each kind every client holds at one Gamma.

    The `num_nested` heaviest units are held by every client with room for their rank. One more unit
    is held by `between` clients, if that is not 0. Of the units that remain (the shared part), each
    client holds `rest_N`.
    """

    units: int
    gamma: int
    budgets_N: np.ndarray
    num_nested: int
    between: int
    rest_N: np.ndarray

    @property
    def num_shared(self) -> int:
        """Return how many units are shared evenly, each held by exactly Gamma clients."""
        return self.units - self.num_nested - (self.between > 0)

    @property
    def _holds_between(self) -> np.ndarray:
        """Return 1 for clients that hold the unit between nested and shared ones, 0 for others."""
        return np.asarray(np.maximum(0, self.budgets_N - self.num_nested) - self.rest_N)

    def pruned_energy(self, after_U1: Tensor) -> np.ndarray:
        """Return the energy that every client lacks.

        It is a mean over all rotations of the shared part; the clients' sum is the same in each.

        Args:
            after_U1: `after_U1[j]` is the energy of the units from rank j on.
        """
        heads_N = np.minimum(self.budgets_N, self.num_nested)
        ranks = [*heads_N.tolist(), self.num_nested, self.units - self.num_shared]
        tail_energy = after_U1[torch.tensor(ranks, device=after_U1.device)].cpu().numpy()
        after_heads_N, after_nested, shared = tail_energy[:-2], tail_energy[-2], tail_energy[-1]
        lacks_nested_N = after_heads_N - after_nested
        lacks_between_N = 0.0
        if self.between:
            lacks_between_N = (1 - self._holds_between) * (after_nested - shared)
        lacks_shared_N = (1 - self.rest_N / max(1, self.num_shared)) * shared
        return np.asarray(lacks_nested_N + lacks_between_N + lacks_shared_N)

    def inverse_coverage(self) -> np.ndarray:
        """Return 1/Gamma_n of every client, 0 for clients that hold nothing.

        Gamma_n is the least coverage among the units that client n holds.
        """
        ascending = np.sort(self.budgets_N)
        least_N = len(ascending) - np.searchsorted(ascending, self.budgets_N)
        least_N = np.where(self._holds_between > 0, self.between, least_N)
        least_N = np.where(self.rest_N > 0, self.gamma, least_N)
        return np.asarray((self.budgets_N > 0) / np.maximum(1, least_N))

    def assign_units(self, order_U: Tensor, phase: float = 0.0) -> RunLengthPlan:
        """Assign ranked units to the clients.

        Args:
            order_U: The units, heaviest first.
            phase: Where the arcs in the shared part begin, as a share of the circle.
        """
        heads = {int(budget) for budget in self.budgets_N if 0 < budget < self.num_nested}
        if self.num_nested:
            heads.add(self.num_nested)
        levels = sorted(heads)
        columns = [self.budgets_N >= level for level in levels]
        lengths = np.diff([0, *levels]).tolist()
        if self.between:
            columns.append(self._holds_between > 0)
            lengths.append(1)
        if self.num_shared:
            shared_columns, shared_lengths = self._arcs(phase)
            columns += shared_columns
            lengths += shared_lengths
        head = self.units - self.num_shared
        spread_U = torch.cat([order_U[:head], _spread_units(order_U[head:], self.units)])
        return RunLengthPlan(spread_U, torch.tensor(lengths), torch.from_numpy(np.array(columns)))

    def _arcs(self, phase: float) -> tuple[list[np.ndarray], list[int]]:
        """Return the runs of the shared part: the clients of each, and their lengths.

        Each client in turn takes an arc of the circle of shared units. All arcs together go round
        the circle Gamma times.
        """
        first = int(phase % 1 * self.num_shared)
        start_N = (first + np.cumsum(self.rest_N) - self.rest_N) % self.num_shared
        points = np.unique([0, *start_N])
        columns = list((points[:, None] - start_N) % self.num_shared < self.rest_N)
        return columns, np.diff([*points, self.num_shared]).tolist()


def _spread_units(rest: Tensor, units: int) -> Tensor:
    """Return units in an order that depends only on their numbers and separates neighbours.

    The order is not by energy: a unit must keep its position on the circle from round to round, or
    windows of rounds would not cover it.
    """
    first_stride = max(1, round(GOLDEN * units))
    stride = next(s for s in range(first_stride, 2 * units + 1) if gcd(s, units) == 1)
    is_shared_U = torch.zeros(units, dtype=torch.bool, device=rest.device)
    is_shared_U[rest] = True
    spread_U = torch.arange(units, device=rest.device) * stride % units
    return spread_U[is_shared_U[spread_U]]
