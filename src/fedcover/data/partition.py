"""Assign training rows to clients: every row to exactly one client, and at least one row to each.

Shapes: N rows, C clients, K labels that occur, S label slots per client, A (client, label) pairs.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.rng import numpy_generator
from fedcover.types import Dataset

Ints = npt.NDArray[np.int64]

_NO_LABEL = -1
_MAX_SWEEPS = 50
_PATIENCE = 5
"""Sweeps end when the imbalance repeats one from at least this many sweeps before."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Hold the training rows, ordered by client.

    Attributes:
        order: The rows; client c has `order[bounds[c]:bounds[c + 1]]`.
        bounds: The start of each client's rows, and the number of all rows.
    """

    order: Tensor
    bounds: Tensor

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.bounds) - 1

    def indices(self, client: int) -> Tensor:
        """Return the rows of one client, in ascending order.

        Args:
            client: The number of the client, starting at 0.

        Returns:
            The rows as an int64 tensor.

        Raises:
            InvalidValue: If there is no such client.

        >>> Partition(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])).indices(0).tolist()
        [0, 2]
        """
        if not 0 <= client < self.clients:
            raise InvalidValue(f"client must be between 0 and {self.clients - 1}; got {client}")
        return self.order[int(self.bounds[client]) : int(self.bounds[client + 1])]


def _partition(client_N: Ints, clients: int) -> Partition:
    """Build the partition in which row n belongs to client `client_N[n]`."""
    rows_per_client = np.bincount(client_N, minlength=clients)
    bounds = np.concatenate([[0], np.cumsum(rows_per_client)])
    order = np.argsort(client_N, kind="stable")
    return Partition(torch.from_numpy(order), torch.from_numpy(bounds))


def _check(field: str, value: int, most: int, things: str) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidValue(
            f"{field} must be a whole number between 1 and the number of {things}, {most}; "
            f"got {value!r}"
        )


# ── independent of labels ────────────────────────────────────────────────────────────────────────


def iid(dataset: Dataset, clients: int, seed: int) -> Partition:
    """Assign rows at random; the clients' numbers of rows differ by at most one."""
    _check("clients", clients, len(dataset.train), "training samples")
    round_robin_N = np.arange(len(dataset.train)) % clients
    return _partition(numpy_generator(seed, "partition").permutation(round_robin_N), clients)


def owner(dataset: Dataset, clients: int, seed: int) -> Partition:
    """Assign every row to its owner in the data set: client c is the c-th owner."""
    if dataset.owner is None:
        raise InvalidValue(
            f"partition owner needs a dataset with an owner for each row; got {dataset.name}"
        )
    owners, client_N = np.unique(dataset.owner.numpy(force=True), return_inverse=True)
    if len(client_N) != len(dataset.train):
        raise InvalidValue(
            f"owner must be as long as train, {len(dataset.train)}; got {len(client_N)}"
        )
    if len(owners) != clients:
        raise InvalidValue(f"clients must be the number of owners, {len(owners)}; got {clients}")
    return _partition(client_N.astype(np.int64), clients)


def node_partition(owner: Tensor, node_clients: Sequence[int], clients: int) -> Partition:
    """Assign the rows of one node, which holds a few of all clients.

    The k-th owner of the node's rows is the k-th of its clients. Other clients have no rows.

    >>> node_partition(torch.tensor([9, 7, 9]), [2, 3], 4).indices(3).tolist()
    [0, 2]
    """
    _, owner_index_N = np.unique(owner.numpy(force=True), return_inverse=True)
    return _partition(np.array(node_clients, dtype=np.int64)[owner_index_N], clients)


# ── label skew by Dirichlet proportions ──────────────────────────────────────────────────────────


def dirichlet(dataset: Dataset, clients: int, seed: int, *, alpha: float) -> Partition:
    """Divide each label's rows in proportions drawn from a Dirichlet distribution.

    The smaller alpha, the more uneven the proportions. A client that would have no rows takes one
    from the client that has the most at that moment.
    """
    _check("clients", clients, len(dataset.train), "training samples")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise InvalidValue(f"alpha must be a finite number greater than 0; got {alpha!r}")
    random = numpy_generator(seed, "partition")
    # Beyond 1e9 the proportions are equal to nine digits; far beyond, NumPy's sum overflows.
    alpha_C = np.full(clients, min(alpha, 1e9))
    client_N = np.empty(len(dataset.train), dtype=np.int64)
    for rows in _rows_by_label(dataset, random):
        cumulative_shares = np.cumsum(random.dirichlet(alpha_C))[:-1]
        boundaries = np.rint(cumulative_shares * len(rows)).astype(np.int64)
        client_N[rows] = np.searchsorted(boundaries, np.arange(len(rows)), side="right")
    _fill_empty_clients(client_N, clients)
    return _partition(client_N, clients)


def _rows_by_label(dataset: Dataset, random: np.random.Generator) -> list[Ints]:
    """Return the rows of each label that occurs, in random order."""
    label_N = dataset.train.y.numpy(force=True)
    shuffled_N: Ints = random.permutation(len(label_N))
    by_label_N = shuffled_N[np.argsort(label_N[shuffled_N], kind="stable")]
    starts = np.flatnonzero(np.diff(label_N[by_label_N])) + 1
    return np.split(by_label_N, starts)


def _fill_empty_clients(client_N: Ints, clients: int) -> None:
    """Give every client without rows one row of the largest client, in place."""
    size_C = np.bincount(client_N, minlength=clients)
    empty_clients = np.flatnonzero(size_C == 0)
    if len(empty_clients) == 0:
        return
    rows = np.argsort(client_N, kind="stable")
    end_C = np.cumsum(size_C)
    by_size = [(-int(size), client) for client, size in enumerate(size_C)]
    heapq.heapify(by_size)
    for empty_client in empty_clients:
        negative_size, largest_client = by_size[0]
        end_C[largest_client] -= 1
        client_N[rows[end_C[largest_client]]] = empty_client
        heapq.heapreplace(by_size, (negative_size + 1, largest_client))


# ── label skew by a limit ────────────────────────────────────────────────────────────────────────


def labels(dataset: Dataset, clients: int, seed: int, *, limit: int) -> Partition:
    """Assign at most `limit` labels to each client, with numbers of rows as equal as possible.

    The algorithm has four steps:

    1. Choose how many clients share each label, in proportion to its rows: `clients * limit` in
       all, at least one per label, at most one per row and per client.
    2. Assign labels to clients round-robin. No client gets a label twice, and the numbers of labels
       per client differ by at most one.
    3. Swap labels between random pairs of clients to randomize the assignment.
    4. Divide the rows of one label after another so that its clients' totals become as equal as
       possible, with at least one row each. Repeat until the totals are equal or stop improving.
    """
    _check("clients", clients, len(dataset.train), "training samples")
    _check("limit", limit, dataset.classes, "labels")
    random = numpy_generator(seed, "partition")
    rows_by_label = _rows_by_label(dataset, random)
    if clients * limit < len(rows_by_label):
        raise InvalidValue(
            f"limit must be at least {math.ceil(len(rows_by_label) / clients)} so that {clients} "
            f"clients take all {len(rows_by_label)} labels; got {limit}"
        )
    random.shuffle(rows_by_label)  # so that ties between labels are broken at random
    num_rows_K = np.array([len(rows) for rows in rows_by_label])
    labels_CS = _assign_labels(_clients_per_label(num_rows_K, clients, limit), clients)
    _swap_labels(random, labels_CS)
    row_clients = _distribute_rows(random, num_rows_K, random.permutation(labels_CS))
    client_N = np.empty(len(dataset.train), dtype=np.int64)
    for rows, clients_of_rows in zip(rows_by_label, row_clients, strict=True):
        client_N[rows] = clients_of_rows
    return _partition(client_N, clients)


def _clients_per_label(num_rows_K: Ints, clients: int, limit: int) -> Ints:
    """Choose how many clients share each label, in proportion to its rows.

    A bisection finds the proportion whose rounded numbers add up to the number of assignments.
    """
    most_K = np.minimum(num_rows_K, clients)
    total = min(clients * limit, int(most_K.sum()))

    def rounded(proportion: float) -> Ints:
        rounded_K: Ints = np.rint(proportion * num_rows_K).astype(np.int64).clip(1, most_K)
        return rounded_K

    low, high = 0.0, 2.0  # rounded(low) is 1 everywhere, rounded(high) is the maximum
    for _ in range(100):
        middle = (low + high) / 2
        if rounded(middle).sum() <= total:
            low = middle
        else:
            high = middle
    num_clients_K = rounded(low)
    tied_labels = np.flatnonzero(rounded(high) > num_clients_K)
    num_missing = total - num_clients_K.sum()
    num_clients_K[tied_labels[:num_missing]] += 1
    return num_clients_K


def _assign_labels(num_clients_K: Ints, clients: int) -> Ints:
    """Assign labels to clients round-robin.

    No label is assigned more often than there are clients, so no client gets a label twice.
    """
    num_slots = -(-int(num_clients_K.sum()) // clients)
    labels_CS = np.full((clients, num_slots), _NO_LABEL)
    label_A = np.repeat(np.arange(len(num_clients_K)), num_clients_K)
    position_A = np.arange(len(label_A))
    labels_CS[position_A % clients, position_A // clients] = label_A
    return labels_CS


def _swap_labels(random: np.random.Generator, labels_CS: Ints) -> None:
    """Swap one label each between random pairs of clients, in place.

    A pair does not swap if one of the two already has the other's label.
    """
    clients, num_slots = labels_CS.shape
    for _ in range(20 * num_slots):
        left, right = random.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        left_slot, right_slot = random.integers(num_slots, size=(2, len(left)))
        left_label, right_label = labels_CS[left, left_slot], labels_CS[right, right_slot]
        left_has_it = (labels_CS[left] == right_label[:, None]).any(1)
        right_has_it = (labels_CS[right] == left_label[:, None]).any(1)
        both_filled = (left_label != _NO_LABEL) & (right_label != _NO_LABEL)
        swap = ~left_has_it & ~right_has_it & both_filled
        labels_CS[left[swap], left_slot[swap]] = right_label[swap]
        labels_CS[right[swap], right_slot[swap]] = left_label[swap]


def _distribute_rows(random: np.random.Generator, num_rows_K: Ints, labels_CS: Ints) -> list[Ints]:
    """Return for each label the client of each of its rows."""
    num_empty_slots = np.count_nonzero(labels_CS == _NO_LABEL)
    slots_by_label = np.argsort(labels_CS, axis=None, kind="stable")[num_empty_slots:]
    num_clients_K = np.bincount(labels_CS.flat[slots_by_label], minlength=len(num_rows_K))
    clients_by_slot = slots_by_label // labels_CS.shape[1]
    clients_of_label = np.split(clients_by_slot, np.cumsum(num_clients_K)[:-1])
    rows_of_label = [
        _equalize_totals(np.zeros(num_clients, dtype=np.int64), int(num_rows))
        for num_clients, num_rows in zip(num_clients_K, num_rows_K, strict=True)
    ]
    total_C = np.zeros(len(labels_CS), dtype=np.int64)
    for label_clients, rows in zip(clients_of_label, rows_of_label, strict=True):
        total_C[label_clients] += rows
    # The other labels can be divided in one way only.
    divisible_labels = np.flatnonzero((num_clients_K > 1) & (num_rows_K > num_clients_K))
    imbalances = [_sum_of_squares(total_C)]
    while np.ptp(total_C) > 1 and _may_improve(imbalances):
        for label in divisible_labels:
            # The order is random, so that a surplus row moves on until a client lacks one.
            order = random.permutation(len(clients_of_label[label]))
            label_clients = clients_of_label[label][order]
            other_rows = total_C[label_clients] - rows_of_label[label][order]
            clients_of_label[label] = label_clients
            rows_of_label[label] = _equalize_totals(other_rows, int(num_rows_K[label]))
            total_C[label_clients] = other_rows + rows_of_label[label]
        imbalances.append(_sum_of_squares(total_C))
    return [
        np.repeat(label_clients, rows)
        for label_clients, rows in zip(clients_of_label, rows_of_label, strict=True)
    ]


def _may_improve(imbalances: list[int]) -> bool:
    """Return whether more sweeps may help, judged by the imbalance after each sweep so far."""
    is_stuck = imbalances[-1] in imbalances[:-_PATIENCE]
    return len(imbalances) < _MAX_SWEEPS and not is_stuck


def _sum_of_squares(total_C: Ints) -> int:
    return int((total_C**2).sum())


def _equalize_totals(totals: Ints, rows: int) -> Ints:
    """Distribute rows so that the totals become as equal as possible, at least one row each.

    >>> _equalize_totals(np.array([5, 0, 2, 9]), 9).tolist()
    [1, 5, 2, 1]
    """
    ascending = np.argsort(totals, kind="stable")
    sorted_totals = totals[ascending] + 1
    cumulative = np.cumsum(sorted_totals)
    rows_left = rows - len(totals)
    # Raising the n lowest totals to the n-th one must not take more rows than there are.
    rows_to_level = np.arange(1, len(totals) + 1) * sorted_totals - cumulative
    num_raised = int(np.count_nonzero(rows_to_level <= rows_left))
    raised = ascending[:num_raised]
    level, remainder = divmod(int(cumulative[num_raised - 1]) + rows_left, num_raised)
    added = np.ones_like(totals)
    added[raised] = level - totals[raised]
    added[np.sort(raised)[:remainder]] += 1
    return added


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "labels": labels,
    "dirichlet": dirichlet,
    "owner": owner,
}
