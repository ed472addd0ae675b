"""Partitions: every row to exactly one client, nobody empty, the limit kept, the impossible
refused.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.data.partition import PARTITIONS, Partition, dirichlet, iid, labels, owner
from fedcover.errors import InvalidValue
from fedcover.types import Dataset, Samples

quick = settings(max_examples=60)


def data(histogram, classes=None, owners=None):
    """A data set with so many rows of each label, mixed, and inputs that do not matter."""
    y = torch.repeat_interleave(torch.arange(len(histogram)), torch.tensor(histogram))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    rows = Samples(torch.zeros(len(y), 1), y)
    return Dataset("made up", rows, rows, classes or len(histogram), owners)


def sizes(partition: Partition):
    return [len(partition.indices(client)) for client in range(partition.clients)]


def held(dataset, partition):
    return [set(dataset.train.y[partition.indices(c)].tolist()) for c in range(partition.clients)]


def assert_whole(dataset, partition, clients):
    assert partition.clients == clients
    rows = torch.cat([partition.indices(client) for client in range(clients)])
    assert rows.dtype == torch.int64
    assert sorted(rows.tolist()) == list(range(len(dataset.train)))
    assert min(sizes(partition)) > 0


def same(a: Partition, b: Partition):
    return torch.equal(a.order, b.order) and torch.equal(a.bounds, b.bounds)


histograms = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda h: sum(h) > 0)


@st.composite
def possible(draw):
    """A histogram (labels may be rare, frequent or absent), clients and a limit that can be met."""
    histogram = draw(histograms)
    present = sum(count > 0 for count in histogram)
    clients = draw(st.integers(1, sum(histogram)))
    limit = draw(st.integers(min(-(-present // clients), len(histogram)), len(histogram)))
    return histogram, clients, limit, draw(st.integers(0, 2**32))


@quick
@given(possible())
def test_label_limit_is_never_exceeded_whatever_the_histogram(case):
    histogram, clients, limit, seed = case
    dataset = data(histogram)
    partition = labels(dataset, clients, seed, limit=limit)
    assert_whole(dataset, partition, clients)
    assert max(map(len, held(dataset, partition))) <= limit


@quick
@given(possible(), st.sampled_from([1e-300, 1e-3, 0.3, 1.0, 1e4, 1e308]))
def test_dirichlet_leaves_no_client_empty(case, alpha):
    histogram, clients, _, seed = case
    dataset = data(histogram)
    assert_whole(dataset, dirichlet(dataset, clients, seed, alpha=alpha), clients)


@quick
@given(possible())
def test_iid_shares_differ_by_one_row_at_most(case):
    histogram, clients, _, seed = case
    dataset = data(histogram)
    partition = iid(dataset, clients, seed)
    assert_whole(dataset, partition, clients)
    assert max(sizes(partition)) - min(sizes(partition)) <= 1


@quick
@given(
    st.integers(2, 10), st.integers(1, 10), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99)
)
def test_balanced_labels_give_equal_shares(classes, limit, laps, per_ticket, seed):
    """Where every label can print the same number of tickets, shares differ by one row at most."""
    limit = min(limit, classes)
    clients = classes * laps
    dataset = data([limit * laps * per_ticket] * classes)
    partition = labels(dataset, clients, seed, limit=limit)
    assert max(sizes(partition)) - min(sizes(partition)) <= 1
    assert all(len(some) == limit for some in held(dataset, partition))


@pytest.mark.parametrize("limit", [2, 5])
def test_mnist_setting_of_the_paper_gives_equal_shares(limit):
    mnist = data([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    assert set(sizes(labels(mnist, 100, 0, limit=limit))) == {600}


@pytest.mark.parametrize("limit", [20, 50])
def test_cifar100_setting_of_the_paper_gives_equal_shares(limit):
    assert set(sizes(labels(data([500] * 100), 100, 0, limit=limit))) == {500}


def test_client_number_is_independent_of_its_labels():
    """Over many seeds, the first client holds every label about equally often, and every pair of
    labels.
    """
    dataset = data([20] * 10)
    hands = [held(dataset, labels(dataset, 20, seed, limit=2))[0] for seed in range(300)]
    often = np.bincount([label for hand in hands for label in hand], minlength=10)
    assert often.min() > 30
    assert often.max() < 95
    assert len({frozenset(hand) for hand in hands}) == 45


OPTIONS = {"iid": {}, "labels": {"limit": 3}, "dirichlet": {"alpha": 0.5}, "owner": {}}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_depends_on_the_seed_alone(name):
    dataset = data([30] * 10, owners=torch.arange(300) % 15)
    first, again, other = (
        PARTITIONS[name](dataset, 15, seed, **OPTIONS[name]) for seed in (0, 0, 1)
    )
    assert_whole(dataset, first, 15)
    assert same(first, again)
    assert same(first, other) == (name == "owner")


def test_dirichlet_with_small_alpha_is_more_uneven():
    dataset = data([200] * 10)
    rough, smooth = (np.std(sizes(dirichlet(dataset, 20, 0, alpha=alpha))) for alpha in (0.05, 50))
    assert rough > 5 * smooth


def test_owners_keep_their_rows():
    dataset = data([4, 4], owners=torch.tensor([7, 3, 7, 9, 3, 9, 7, 7]))
    partition = owner(dataset, 3, 0)
    assert [partition.indices(c).tolist() for c in range(3)] == [[1, 4], [0, 2, 6, 7], [3, 5]]


@pytest.mark.parametrize(
    ("partition", "clients", "options", "says"),
    [
        ("iid", 0, {}, "clients must be .* between 1 and .* 40; got 0"),
        ("iid", 41, {}, "clients must be .* between 1 and .* 40; got 41"),
        ("labels", 41, {"limit": 2}, "clients must be .* got 41"),
        ("labels", 5, {"limit": 0}, "limit must be .* between 1 and .* 4; got 0"),
        ("labels", 5, {"limit": 5}, "limit must be .* between 1 and .* 4; got 5"),
        ("labels", 5, {"limit": 1.5}, "limit must be a whole number .* got 1.5"),
        (
            "labels",
            3,
            {"limit": 1},
            "limit must be at least 2 so that 3 clients take all 4 labels; got 1",
        ),
        ("dirichlet", 41, {"alpha": 1.0}, "clients must be .* got 41"),
        ("dirichlet", 5, {"alpha": 0.0}, "alpha must be a finite number greater than 0; got 0.0"),
        ("dirichlet", 5, {"alpha": float("inf")}, "alpha must be .* got inf"),
        ("dirichlet", 5, {"alpha": float("nan")}, "alpha must be .* got nan"),
        ("dirichlet", 5, {"alpha": "small"}, "alpha must be .* got 'small'"),
        (
            "owner",
            5,
            {},
            "partition owner needs a dataset with an owner for each row; got made up",
        ),
    ],
)
def test_impossible_partitions_are_refused(partition, clients, options, says):
    with pytest.raises(InvalidValue, match=says):
        PARTITIONS[partition](data([10] * 4), clients, 0, **options)


def test_owner_partition_needs_as_many_clients_as_owners():
    with pytest.raises(InvalidValue, match="clients must be the number of owners, 2; got 3"):
        owner(data([2, 2], owners=torch.tensor([0, 1, 0, 1])), 3, 0)
    with pytest.raises(InvalidValue, match="owner must be as long as train, 4; got 2"):
        owner(data([2, 2], owners=torch.tensor([0, 1])), 2, 0)


@pytest.mark.parametrize("client", [-1, 4])
def test_partition_refuses_a_client_beyond_the_last(client):
    with pytest.raises(InvalidValue, match="client must be between 0 and 3"):
        iid(data([8]), 4, 0).indices(client)


@pytest.mark.parametrize("name", ["iid", "labels", "dirichlet"])
def test_partition_over_as_many_clients_as_rows(name):
    dataset = data([6000] * 10)
    partition = PARTITIONS[name](dataset, 60_000, 0, **OPTIONS[name])
    assert partition.bounds.diff().tolist() == [1] * 60_000
