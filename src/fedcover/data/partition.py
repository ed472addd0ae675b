"""Labels -> who gets which rows: every training row goes to exactly one client, and no client goes empty.

Shapes: N rows, C clients, K labels that occur, D tickets in a client's hand.
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
_SWEEPS, _PATIENCE = 50, 5


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Training rows client after client: client c has the rows order[bounds[c]:bounds[c + 1]]."""

    order: Tensor
    bounds: Tensor

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.bounds) - 1

    def indices(self, client: int) -> Tensor:
        """The rows of one client, in ascending order.

        >>> Partition(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])).indices(0).tolist()
        [0, 2]
        """
        if not 0 <= client < self.clients:
            raise InvalidValue(f"client must be between 0 and {self.clients - 1}; got {client}")
        return self.order[int(self.bounds[client]) : int(self.bounds[client + 1])]


def _partition(client_N: Ints, clients: int) -> Partition:
    """The partition in which row n belongs to client client_N[n]."""
    bounds = np.concatenate([[0], np.cumsum(np.bincount(client_N, minlength=clients))])
    return Partition(
        torch.from_numpy(np.argsort(client_N, kind="stable")), torch.from_numpy(bounds)
    )


def _check(field: str, value: int, most: int, things: str) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidValue(
            f"{field} must be a whole number between 1 and the number of {things}, {most}; got {value!r}"
        )


# ── without regard to labels ────────────────────────────────────────────────────────────────────────────


def iid(dataset: Dataset, clients: int, seed: int) -> Partition:
    """Rows at random, in shares that differ by one row at most."""
    _check("clients", clients, len(dataset.train), "training samples")
    turn_N = np.arange(len(dataset.train)) % clients
    return _partition(numpy_generator(seed, "partition").permutation(turn_N), clients)


def owner(dataset: Dataset, clients: int, seed: int) -> Partition:
    """Every row to its owner, as the data set names them: client c is the c-th owner."""
    if dataset.owner is None:
        raise InvalidValue(
            f"partition owner needs a dataset that says whose each row is; got {dataset.name}"
        )
    owners, client_N = np.unique(dataset.owner.numpy(force=True), return_inverse=True)
    if len(client_N) != len(dataset.train):
        raise InvalidValue(
            f"owner must be as long as train, {len(dataset.train)}; got {len(client_N)}"
        )
    if len(owners) != clients:
        raise InvalidValue(f"clients must be the number of owners, {len(owners)}; got {clients}")
    return _partition(client_N.astype(np.int64), clients)


def node_partition(owner: Tensor, mine: Sequence[int], clients: int) -> Partition:
    """The rows of one node, which holds a few of all clients: its k-th owner is the k-th of them, others have no rows.

    >>> node_partition(torch.tensor([9, 7, 9]), [2, 3], 4).indices(3).tolist()
    [0, 2]
    """
    _, place_N = np.unique(owner.numpy(force=True), return_inverse=True)
    return _partition(np.array(mine, dtype=np.int64)[place_N], clients)


# ── label skew by Dirichlet proportions ─────────────────────────────────────────────────────────────────


def dirichlet(dataset: Dataset, clients: int, seed: int, *, alpha: float) -> Partition:
    """Each label's rows in proportions drawn from a Dirichlet distribution: small alpha, uneven shares.

    A client that would go empty takes one row from the client that has the most at that moment.
    """
    _check("clients", clients, len(dataset.train), "training samples")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise InvalidValue(f"alpha must be a finite number greater than 0; got {alpha!r}")
    random = numpy_generator(seed, "partition")
    # Beyond 1e9 the proportions are equal to nine digits, and far beyond it NumPy's sum of them overflows.
    alpha_C = np.full(clients, min(alpha, 1e9))
    client_N = np.empty(len(dataset.train), dtype=np.int64)
    for rows in _rows_by_label(dataset, random):
        cuts = np.rint(np.cumsum(random.dirichlet(alpha_C))[:-1] * len(rows)).astype(np.int64)
        client_N[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    _fill_empty_clients(client_N, clients)
    return _partition(client_N, clients)


def _rows_by_label(dataset: Dataset, random: np.random.Generator) -> list[Ints]:
    """For each label that occurs, its rows in random order."""
    label_N = dataset.train.y.numpy(force=True)
    shuffled_N: Ints = random.permutation(len(label_N))
    by_label_N = shuffled_N[np.argsort(label_N[shuffled_N], kind="stable")]
    starts = np.flatnonzero(np.diff(label_N[by_label_N])) + 1
    return np.split(by_label_N, starts)


def _fill_empty_clients(client_N: Ints, clients: int) -> None:
    size_C = np.bincount(client_N, minlength=clients)
    hungry = np.flatnonzero(size_C == 0)
    if len(hungry) == 0:
        return
    rows = np.argsort(client_N, kind="stable")
    end_C = np.cumsum(size_C)
    fullest = [(-int(size), client) for client, size in enumerate(size_C)]
    heapq.heapify(fullest)
    for client in hungry:
        size, giver = fullest[0]
        end_C[giver] -= 1
        client_N[rows[end_C[giver]]] = client
        heapq.heapreplace(fullest, (size + 1, giver))


# ── label skew by a limit ───────────────────────────────────────────────────────────────────────────────


def labels(dataset: Dataset, clients: int, seed: int, *, limit: int) -> Partition:
    """At most `limit` labels for each client, never one more, in shares as equal as the labels allow.

    Every label prints tickets in proportion to its rows: `clients * limit` in all, at least one for each
    label, at most one for each of its rows and for each client. The tickets are dealt label after label,
    round and round the table: nobody gets two of a label, and hands differ by one ticket at most. Random
    pairs of clients then swap tickets that the other lacks, until who holds what is chance. At last each
    label in turn pours its rows over its holders as water finds its level, one row for each at least, again
    and again until the shares are level or stop getting better.
    """
    _check("clients", clients, len(dataset.train), "training samples")
    _check("limit", limit, dataset.classes, "labels")
    random = numpy_generator(seed, "partition")
    rows = _rows_by_label(dataset, random)
    if clients * limit < len(rows):
        raise InvalidValue(
            f"limit must be at least {math.ceil(len(rows) / clients)} so that {clients} clients take all "
            f"{len(rows)} labels; got {limit}"
        )
    random.shuffle(rows)  # where labels tie for a ticket, chance decides
    count_K = np.array([len(some) for some in rows])
    hand_CD = _deal_labels(_clients_per_label(count_K, clients, limit), clients)
    _swap_labels(random, hand_CD)
    client_N = np.empty(len(dataset.train), dtype=np.int64)
    for some, holders in zip(
        rows, _distribute_rows(random, count_K, random.permutation(hand_CD)), strict=True
    ):
        client_N[some] = holders
    return _partition(client_N, clients)


def _clients_per_label(count_K: Ints, clients: int, limit: int) -> Ints:
    """How many clients share each label: one rate times its rows, from 1 to the fewer of rows and clients."""
    most_K = np.minimum(count_K, clients)
    total = min(clients * limit, int(most_K.sum()))

    def at(rate: float) -> Ints:
        near_K: Ints = np.rint(rate * count_K).astype(np.int64).clip(1, most_K)
        return near_K

    low, high = 0.0, 2.0  # at(low) is one each, at(high) the most there can be
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).sum() <= total else (low, middle)
    tickets_K = at(low)
    more_K = at(high) > tickets_K  # the labels that tie for what is left
    tickets_K[np.flatnonzero(more_K)[: total - tickets_K.sum()]] += 1
    return tickets_K


def _deal_labels(tickets_K: Ints, clients: int) -> Ints:
    """Round and round the table: a label has no more tickets than there are clients, so no one gets two."""
    hand_CD = np.full((clients, -(-int(tickets_K.sum()) // clients)), _NO_LABEL)
    label_T = np.repeat(np.arange(len(tickets_K)), tickets_K)
    seat_T = np.arange(len(label_T))
    hand_CD[seat_T % clients, seat_T // clients] = label_T
    return hand_CD


def _swap_labels(random: np.random.Generator, hand_CD: Ints) -> None:
    """Random pairs of clients swap one ticket each, unless one of them has that label already."""
    clients, width = hand_CD.shape
    for _ in range(20 * width):
        left, right = random.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        at_left, at_right = random.integers(width, size=(2, len(left)))
        gives, takes = hand_CD[left, at_left], hand_CD[right, at_right]
        known = (hand_CD[left] == takes[:, None]).any(1) | (hand_CD[right] == gives[:, None]).any(1)
        fair = ~known & (gives != _NO_LABEL) & (takes != _NO_LABEL)
        hand_CD[left[fair], at_left[fair]] = takes[fair]
        hand_CD[right[fair], at_right[fair]] = gives[fair]


def _distribute_rows(random: np.random.Generator, count_K: Ints, hand_CD: Ints) -> list[Ints]:
    """For each label, the client of each of its rows."""
    seat_T = np.argsort(hand_CD, axis=None, kind="stable")[np.count_nonzero(hand_CD == _NO_LABEL) :]
    tickets_K = np.bincount(hand_CD.flat[seat_T], minlength=len(count_K))
    holders = np.split(seat_T // hand_CD.shape[1], np.cumsum(tickets_K)[:-1])
    poured = [
        _water_fill(np.zeros(t, dtype=np.int64), int(c))
        for t, c in zip(tickets_K, count_K, strict=True)
    ]
    total_C = np.zeros(len(hand_CD), dtype=np.int64)
    for who, amount in zip(holders, poured, strict=True):
        total_C[who] += amount
    free = np.flatnonzero(
        (tickets_K > 1) & (count_K > tickets_K)
    )  # the other labels have no choice
    unevenness = [int((total_C**2).sum())]
    while (
        np.ptp(total_C) > 1
        and len(unevenness) < _SWEEPS
        and unevenness[-1] not in unevenness[:-_PATIENCE]
    ):
        for label in free:
            # In a new order each time: a surplus row then wanders until it meets a client that lacks one.
            turn = random.permutation(len(holders[label]))
            holders[label] = holders[label][turn]
            others = total_C[holders[label]] - poured[label][turn]
            poured[label] = _water_fill(others, int(count_K[label]))
            total_C[holders[label]] = others + poured[label]
        unevenness.append(int((total_C**2).sum()))
    return [np.repeat(who, amount) for who, amount in zip(holders, poured, strict=True)]


def _water_fill(ground: Ints, rows: int) -> Ints:
    """Pour rows where the ground is lowest: one for each place first, the rest until it stands level.

    >>> _water_fill(np.array([5, 0, 2, 9]), 9).tolist()
    [1, 5, 2, 1]
    """
    order = np.argsort(ground, kind="stable")
    height = ground[order] + 1
    below = np.cumsum(height)
    rows_left = rows - len(ground)
    wet = int(np.count_nonzero(np.arange(1, len(ground) + 1) * height - below <= rows_left))
    level, extra = divmod(int(below[wet - 1]) + rows_left, wet)
    poured = np.ones_like(ground)
    poured[order[:wet]] = level - ground[order[:wet]]
    poured[np.sort(order[:wet])[:extra]] += 1
    return poured


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "labels": labels,
    "dirichlet": dirichlet,
    "owner": owner,
}
