"""Sources: the same small interface over a shared-out data set and over clients made on demand."""

import tracemalloc

import pytest
import torch
from torch import nn

from fedcover.data.client_data import PartitionedData, SyntheticData
from fedcover.data.datasets import hold_out, load
from fedcover.data.partition import iid, labels
from fedcover.errors import InvalidValue
from fedcover.rng import key


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def partitioned(digits):
    return PartitionedData(digits, labels(digits, 20, 0, limit=2), seed=0)


def synthetic(_digits):
    return SyntheticData(20, seed=0, skew=0.5)


@pytest.mark.parametrize("build", [partitioned, synthetic])
def test_source_is_deterministic(build, digits):
    source, again = build(digits), build(digits)
    assert source.classes == 10
    assert torch.equal(source.calibration, again.calibration)
    assert source.calibration.shape == (1000, 1, 8, 8)
    assert torch.equal(source.test.x, again.test.x)
    for client in (0, 19):
        shard, twin = source.shard(client), again.shard(client)
        assert torch.equal(shard.samples.x[shard.index], twin.samples.x[twin.index])
        own = shard.samples.y[shard.index]
        assert source.count(client) == len(shard.index)
        assert source.labels(client) == tuple(own.unique().tolist())
        assert all(isinstance(label, int) for label in source.labels(client))


@pytest.mark.parametrize("build", [partitioned, synthetic])
@pytest.mark.parametrize("client", [-1, 20])
def test_unknown_client_is_refused(build, client, digits):
    source = build(digits)
    for ask in (source.count, source.shard, source.labels):
        with pytest.raises(InvalidValue, match=f"client must be between 0 and 19; got {client}"):
            ask(client)


def test_partitioned_source_shares_one_copy_of_the_rows(digits):
    source = partitioned(digits)
    assert source.shard(0).samples.x is source.shard(1).samples.x
    assert all(len(source.labels(client)) <= 2 for client in range(source.clients))


def test_validation_rows_are_not_training_rows(digits):
    rest, validation = hold_out(digits, 0.2, seed=3)
    source = PartitionedData(
        rest, iid(rest, 7, 0), seed=0, validation=validation, calibration_size=5
    )
    assert len(source.validation) + sum(len(source.shard(c).index) for c in range(7)) == len(
        digits.train
    )
    assert len(source.calibration) == 5


def test_calibration_is_at_most_all_rows(digits):
    source = PartitionedData(digits, iid(digits, 2, 0), seed=0, calibration_size=10_000)
    assert len(source.calibration) == len(digits.train)


def test_partition_of_other_rows_is_refused(digits):
    rest, _ = hold_out(digits, 0.5, seed=0)
    with pytest.raises(
        InvalidValue, match="partition must be of the 1437 training rows of digits; got 719"
    ):
        PartitionedData(digits, iid(rest, 2, 0), seed=0)


def test_source_of_a_million_clients_makes_only_those_asked_for():
    tracemalloc.start()
    try:
        source = SyntheticData(1_000_000, seed=0)
        shards = [source.shard(client) for client in range(0, 1_000_000, 100_000)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # not a byte for each client
    assert len({float(shard.samples.x.sum()) for shard in shards}) == len(shards)


def test_clients_with_equal_32_bit_addresses_differ():
    """Of a million clients, 112 pairs had the same noise."""
    seeds, pairs = {}, []
    for client in range(200_000):
        first = seeds.setdefault(key(0, "synthetic", "noise", "client", client) % 2**32, client)
        pairs += [(first, client)] if first != client else []
    assert pairs
    source = SyntheticData(200_000, seed=0)
    for first, second in pairs:
        one, other = source.shard(first).samples, source.shard(second).samples
        noise = [each.x - source._prototypes[each.y] / 5**0.5 for each in (one, other)]
        assert not torch.allclose(*noise, atol=1e-4)


def test_skew_ranges_from_all_labels_to_one():
    even, one = SyntheticData(50, seed=0), SyntheticData(50, seed=0, skew=1.0)
    assert all(len(even.labels(client)) > 5 for client in range(50))
    assert all(len(one.labels(client)) == 1 for client in range(50))
    assert len({one.labels(client) for client in range(50)}) == 10


def test_synthetic_sets_are_disjoint_and_normalised():
    source = SyntheticData(5, seed=0, shape=(3, 4, 4), validation_size=50, test_size=400)
    assert len(source.validation) == 50
    assert source.shard(0).samples.x.shape == (60, 3, 4, 4)
    assert not torch.equal(source.test.x[:50], source.validation.x)
    assert abs(float(source.test.x.std()) - 1) < 0.1
    assert SyntheticData(5, seed=0).validation is None
    assert not torch.equal(
        source.test.x, SyntheticData(5, seed=1, shape=(3, 4, 4), test_size=400).test.x
    )


def test_synthetic_data_can_be_learned():
    source = SyntheticData(40, seed=0)
    x = torch.cat([source.shard(client).samples.x for client in range(40)])
    y = torch.cat([source.shard(client).samples.y for client in range(40)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for _ in range(100):
        steps = torch.autograd.grad(
            nn.functional.cross_entropy(model(x), y), list(model.parameters())
        )
        for weight, step in zip(model.parameters(), steps, strict=True):
            weight.data -= 0.5 * step
    accuracy = (model(source.test.x).argmax(1) == source.test.y).float().mean()
    assert accuracy > 0.85


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clients": 0}, "clients must be at least 1; got 0"),
        ({"samples": 0}, "samples must be at least 1; got 0"),
        ({"classes": 0}, "classes must be at least 1; got 0"),
        ({"shape": (1, 0)}, "shape must be at least 1; got 0"),
        ({"shape": ()}, "shape must be at least 1; got 0"),
        ({"skew": 1.1}, "skew must be between 0 and 1; got 1.1"),
        ({"skew": float("nan")}, "skew must be at least 0; got nan"),
        ({"noise": -1.0}, "noise must be at least 0; got -1.0"),
        ({"validation_size": -1}, "validation_size must be at least 0; got -1"),
        ({"calibration_size": 0}, "calibration_size must be at least 1; got 0"),
    ],
)
def test_synthetic_options_that_are_wrong_are_refused(options, says):
    with pytest.raises(InvalidValue, match=says):
        SyntheticData(**{"clients": 5, "seed": 0, **options})
