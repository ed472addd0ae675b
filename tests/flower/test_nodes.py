"""Which node holds which clients: introductions, places, capacities, and how inputs are scaled."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.cli.flower import node_configs
from fedcover.data.datasets import load
from fedcover.errors import InvalidValue
from fedcover.flower import nodes as node_places
from fedcover.flower.input_scales import Scale
from fedcover.flower.node_data import scale_of
from fedcover.flower.nodes import Introduction, Roster, declared_fleet, introduction, place_of
from fedcover.runs.experiment import Experiment


@given(st.integers(1, 200), st.integers(1, 20))
def test_every_place_holds_neighbours_and_nearly_the_same_number(clients, places):
    held = [place_of(client, clients, places) for client in range(clients)]
    assert held == sorted(held)
    counts = np.bincount(held, minlength=places)
    assert max(held) < places
    assert counts.max() - counts.min() <= 1 or places > clients


def test_nodes_say_who_they_are_or_what_is_wrong():
    assert introduction(7, {"partition-id": 1, "num-partitions": 2, "capacity": 1}, "v").capacity == 1.0
    assert introduction(7, {}, "v").partition == "no partition"
    for wrong in (
        {"num-partitions": 2},
        {"partition-id": 0},
        {"partition-id": 2, "num-partitions": 2},
        {"partition-id": "0", "num-partitions": 2},
    ):
        with pytest.raises(InvalidValue, match="partition-id=K"):
            introduction(7, wrong, "v")
    with pytest.raises(InvalidValue, match="capacity"):
        introduction(7, {"partition-id": 0, "num-partitions": 2, "capacity": 1.5}, "v")


def test_a_scale_is_told_in_one_digit_or_makes_no_sense():
    assert Scale.read([0.0, 254.7, 33.31, 78.6]) == Scale(0.0, 300.0, 30.0, 80.0)
    assert Scale.read(None) is None
    for wrong in (
        "0123",
        [0.0],
        [0, 1, 2, 3],
        [0.0, float("nan"), 0.0, 1.0],
        [2.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, -1.0],
    ):
        with pytest.raises(ValueError, match="no scale"):
            Scale.read(wrong)
    assert scale_of(torch.zeros(0, 3)) is None


@pytest.mark.parametrize(
    "change", [lambda x: x * 255, lambda x: x * 0, lambda x: x + 9, lambda x: (x - x.mean()) / 0.1]
)
def test_another_scale_is_noticed_and_other_rows_are_not(change):
    x = load("digits").train.x
    mine = scale_of(x)
    assert scale_of(change(x)).differs(mine)
    for label in range(10):
        assert not scale_of(x[load("digits").train.y == label]).differs(mine)


def test_a_place_belongs_to_the_first_that_answers_for_it():
    roster = Roster()
    roster.add(Introduction(7, 0, 2, None, "v"))
    roster.add(Introduction(8, 1, 2, None, "v"))
    roster.add(Introduction(9, 1, 2, None, "v"))
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8}  # a second claim takes nothing from a node that works
    roster.silent.add(8)
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 9}
    assert roster.holders({8}) == {1: 8}  # better silent than nobody
    with pytest.raises(InvalidValue, match="num-partitions"):
        roster.add(Introduction(10, 0, 3, None, "v"))


def test_a_node_that_holds_too_little_for_a_run_that_has_begun_is_refused():
    roster = Roster(capacities=[0.25, 0.25, 0.25, 1.0, 0.5])
    roster.add(Introduction(7, 0, 2, 0.25, "v"))
    roster.add(Introduction(8, 1, 2, None, "v"))  # it does not say what it holds
    roster.add(Introduction(9, 1, 2, 1.0, "v"))
    with pytest.raises(InvalidValue, match=r"at least 1, as the clients of partition 1 .* got 0\.5"):
        roster.add(Introduction(10, 1, 2, 0.5, "v"))
    assert set(roster.known) == {7, 8, 9}


def anywhere(node, capacity=None):
    """A node that names no place."""
    return introduction(node, {} if capacity is None else {"capacity": capacity}, "v")


def test_a_node_that_names_no_place_gets_one_that_nobody_has():
    roster = Roster(places=3)
    roster.add(anywhere(7), {7, 8, 9})
    roster.add(Introduction(8, 1, 3, None, "v"), {7, 8, 9})
    roster.add(anywhere(9), {7, 8, 9})
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    roster.add(anywhere(7), {7, 8, 9})  # it is asked again, and keeps its place
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert roster.known[9].partition == "partition 2 of 3"


def test_a_spare_node_takes_the_place_of_one_that_is_gone_or_silent():
    roster = Roster(places=2)
    for node in (7, 8, 9, 10):
        roster.add(anywhere(node), {7, 8, 9, 10})
    assert roster.holders({7, 8, 9, 10}) == {0: 7, 1: 8}
    roster.fill({8, 9, 10})
    assert roster.holders({8, 9, 10}) == {0: 9, 1: 8}
    roster.silent.add(8)
    roster.fill({8, 9, 10})
    assert roster.holders({8, 9, 10}) == {0: 9, 1: 10}
    roster.add(Introduction(11, 0, 2, None, "v"), {8, 9, 10, 11})  # one that names a place is never moved
    roster.fill({8, 11})
    assert roster.holders({8, 11}) == {0: 11, 1: 8}


def test_a_node_that_names_no_place_gets_one_that_it_can_hold():
    roster = Roster(places=2, capacities=[1.0, 1.0, 0.25, 0.25])
    roster.add(anywhere(7, 0.5), {7})
    assert roster.holders({7}) == {1: 7}
    with pytest.raises(InvalidValue, match=r"capacity must be at least .* got 0\.1"):
        roster.add(anywhere(8, 0.1), {7, 8})
    roster.fill({7})
    assert roster.holders({7}) == {1: 7}  # too small for the other


def test_where_nodes_must_name_their_place():
    with pytest.raises(InvalidValue, match="how many nodes share the clients"):
        Roster().add(anywhere(7))
    with pytest.raises(InvalidValue, match="its clients are the same whenever it comes"):
        Roster(places=2, wanted=node_places.Wanted(4, 2, (3,))).add(anywhere(7))
    unlimited = Roster(unlimited=True)
    for node in (7, 8, 9):
        unlimited.add(anywhere(node), {7, 8, 9})
    assert unlimited.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert unlimited.known[9].partition == "partition 2"


def test_the_fleet_is_what_the_nodes_declare():
    wanted = Experiment(clients=8, active=4, fleet="1x1.0 + 1x0.5")
    configs = node_configs(wanted, 2)
    assert [config["capacity"] for config in configs] == [1.0, 0.5]
    known = [wanted.scaled_fleet.capacity(client) for client in range(8)]
    said_so = [Introduction(n, n, 2, config["capacity"], "v") for n, config in enumerate(configs)]
    assert declared_fleet(said_so, 8, known) == "4x1.0 + 4x0.5"
    assert all("capacity" not in config for config in node_configs(wanted, 1))  # one node with two kinds


def test_of_two_nodes_that_claim_one_place_the_first_counts_for_everything():
    claims = [Introduction(7, 0, 2, 1.0, "v"), Introduction(8, 1, 2, 0.5, "v"), Introduction(9, 0, 2, 0.25, "v")]
    roster = Roster()
    for claim in claims:
        roster.add(claim)
    assert roster.holders([9, 8, 7]) == {0: 7, 1: 8}
    assert declared_fleet(roster.known.values(), 4, [1.0] * 4) == "2x1.0 + 2x0.5"
