"""Which node holds which clients: introductions, places, capacities, and how inputs are scaled."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.cli.local_nodes import node_configs
from fedcover.data.datasets import load
from fedcover.errors import InvalidValue
from fedcover.flower import nodes as node_places
from fedcover.flower.input_scales import InputScale
from fedcover.flower.node_data import scale_of
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import NodeInfo, declared_fleet, partition_of, read_node_config
from fedcover.runs.experiment import Experiment


@given(st.integers(1, 200), st.integers(1, 20))
def test_partitions_are_contiguous_and_of_equal_size(clients, num_partitions):
    partitions = [partition_of(client, clients, num_partitions) for client in range(clients)]
    assert partitions == sorted(partitions)
    counts = np.bincount(partitions, minlength=num_partitions)
    assert max(partitions) < num_partitions
    assert counts.max() - counts.min() <= 1 or num_partitions > clients


def test_node_config_is_read_or_refused():
    assert (
        read_node_config(7, {"partition-id": 1, "num-partitions": 2, "capacity": 1}, "v").capacity
        == 1.0
    )
    assert read_node_config(7, {}, "v").partition == "no partition"
    for wrong in (
        {"num-partitions": 2},
        {"partition-id": 0},
        {"partition-id": 2, "num-partitions": 2},
        {"partition-id": "0", "num-partitions": 2},
    ):
        with pytest.raises(InvalidValue, match="partition-id=K"):
            read_node_config(7, wrong, "v")
    with pytest.raises(InvalidValue, match="capacity"):
        read_node_config(7, {"partition-id": 0, "num-partitions": 2, "capacity": 1.5}, "v")


def test_input_scale_has_one_digit_or_is_refused():
    assert InputScale.read([0.0, 254.7, 33.31, 78.6]) == InputScale(0.0, 300.0, 30.0, 80.0)
    assert InputScale.read(None) is None
    for wrong in (
        "0123",
        [0.0],
        [0, 1, 2, 3],
        [0.0, float("nan"), 0.0, 1.0],
        [2.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, -1.0],
    ):
        with pytest.raises(ValueError, match="no scale"):
            InputScale.read(wrong)
    assert scale_of(torch.zeros(0, 3)) is None


@pytest.mark.parametrize(
    "change", [lambda x: x * 255, lambda x: x * 0, lambda x: x + 9, lambda x: (x - x.mean()) / 0.1]
)
def test_input_scale_differs_only_for_scaled_rows(change):
    x = load("digits").train.x
    scale = scale_of(x)
    assert scale_of(change(x)).differs(scale)
    for label in range(10):
        assert not scale_of(x[load("digits").train.y == label]).differs(scale)


def test_partition_belongs_to_its_first_node():
    node_registry = NodeRegistry()
    node_registry.add(NodeInfo(7, 0, 2, None, "v"))
    node_registry.add(NodeInfo(8, 1, 2, None, "v"))
    node_registry.add(NodeInfo(9, 1, 2, None, "v"))
    assert node_registry.node_of_partition({7, 8, 9}) == {
        0: 7,
        1: 8,
    }  # a second claim takes nothing from a node that works
    node_registry.unresponsive_nodes.add(8)
    assert node_registry.node_of_partition({7, 8, 9}) == {0: 7, 1: 9}
    assert node_registry.node_of_partition({8}) == {1: 8}  # better silent than nobody
    with pytest.raises(InvalidValue, match="num-partitions"):
        node_registry.add(NodeInfo(10, 0, 3, None, "v"))


def test_node_with_too_little_capacity_is_refused_in_a_running_run():
    node_registry = NodeRegistry(capacities=[0.25, 0.25, 0.25, 1.0, 0.5])
    node_registry.add(NodeInfo(7, 0, 2, 0.25, "v"))
    node_registry.add(NodeInfo(8, 1, 2, None, "v"))  # it does not say what it holds
    node_registry.add(NodeInfo(9, 1, 2, 1.0, "v"))
    with pytest.raises(
        InvalidValue, match=r"at least 1, as the clients of partition 1 .* got 0\.5"
    ):
        node_registry.add(NodeInfo(10, 1, 2, 0.5, "v"))
    assert set(node_registry.node_info) == {7, 8, 9}


def anywhere(node, capacity=None):
    """A node that names no place."""
    return read_node_config(node, {} if capacity is None else {"capacity": capacity}, "v")


def test_node_without_partition_gets_a_vacant_one():
    node_registry = NodeRegistry(num_partitions=3)
    node_registry.add(anywhere(7), {7, 8, 9})
    node_registry.add(NodeInfo(8, 1, 3, None, "v"), {7, 8, 9})
    node_registry.add(anywhere(9), {7, 8, 9})
    assert node_registry.node_of_partition({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    node_registry.add(anywhere(7), {7, 8, 9})  # it is asked again, and keeps its place
    assert node_registry.node_of_partition({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert node_registry.node_info[9].partition == "partition 2 of 3"


def test_spare_node_replaces_a_missing_or_silent_one():
    node_registry = NodeRegistry(num_partitions=2)
    for node in (7, 8, 9, 10):
        node_registry.add(anywhere(node), {7, 8, 9, 10})
    assert node_registry.node_of_partition({7, 8, 9, 10}) == {0: 7, 1: 8}
    node_registry.reassign_vacant_partitions({8, 9, 10})
    assert node_registry.node_of_partition({8, 9, 10}) == {0: 9, 1: 8}
    node_registry.unresponsive_nodes.add(8)
    node_registry.reassign_vacant_partitions({8, 9, 10})
    assert node_registry.node_of_partition({8, 9, 10}) == {0: 9, 1: 10}
    node_registry.add(
        NodeInfo(11, 0, 2, None, "v"), {8, 9, 10, 11}
    )  # one that names a place is never moved
    node_registry.reassign_vacant_partitions({8, 11})
    assert node_registry.node_of_partition({8, 11}) == {0: 11, 1: 8}


def test_node_without_partition_gets_one_that_fits_its_capacity():
    node_registry = NodeRegistry(num_partitions=2, capacities=[1.0, 1.0, 0.25, 0.25])
    node_registry.add(anywhere(7, 0.5), {7})
    assert node_registry.node_of_partition({7}) == {1: 7}
    with pytest.raises(InvalidValue, match=r"capacity must be at least .* got 0\.1"):
        node_registry.add(anywhere(8, 0.1), {7, 8})
    node_registry.reassign_vacant_partitions({7})
    assert node_registry.node_of_partition({7}) == {1: 7}  # too small for the other


def test_partition_must_be_named_where_it_cannot_be_assigned():
    with pytest.raises(InvalidValue, match="how many nodes share the clients"):
        NodeRegistry().add(anywhere(7))
    with pytest.raises(InvalidValue, match="its clients are the same whenever it comes"):
        NodeRegistry(num_partitions=2, requirements=node_places.DataRequirements(4, 2, (3,))).add(
            anywhere(7)
        )
    unlimited = NodeRegistry(unlimited=True)
    for node in (7, 8, 9):
        unlimited.add(anywhere(node), {7, 8, 9})
    assert unlimited.node_of_partition({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert unlimited.node_info[9].partition == "partition 2"


def test_fleet_is_declared_by_the_nodes():
    experiment = Experiment(clients=8, active=4, fleet="1x1.0 + 1x0.5")
    configs = node_configs(experiment, 2)
    assert [config["capacity"] for config in configs] == [1.0, 0.5]
    capacities = [experiment.scaled_fleet.capacity(client) for client in range(8)]
    said_so = [NodeInfo(n, n, 2, config["capacity"], "v") for n, config in enumerate(configs)]
    assert declared_fleet(said_so, 8, capacities) == "4x1.0 + 4x0.5"
    assert all(
        "capacity" not in config for config in node_configs(experiment, 1)
    )  # one node with two kinds


def test_first_of_two_nodes_claiming_a_partition_counts():
    claims = [
        NodeInfo(7, 0, 2, 1.0, "v"),
        NodeInfo(8, 1, 2, 0.5, "v"),
        NodeInfo(9, 0, 2, 0.25, "v"),
    ]
    node_registry = NodeRegistry()
    for claim in claims:
        node_registry.add(claim)
    assert node_registry.node_of_partition([9, 8, 7]) == {0: 7, 1: 8}
    assert declared_fleet(node_registry.node_info.values(), 4, [1.0] * 4) == "2x1.0 + 2x0.5"
