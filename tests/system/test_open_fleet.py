"""Nodes come, leave and change their capacity during a run."""

from dataclasses import replace

import pytest

import fedcover as fc
from fedcover.errors import RunError
from fedcover.flower.server import has_open_fleet, required_capacities
from fedcover.runs.metrics_log import read_lines
from fedcover.runs.setup import prepare
from fedcover.theory.certificate.measure import _check_same_cohort
from tests.system.harness import checkpoints, experiment, reference
from tests.system.loopback import SMALL, training

pytestmark = pytest.mark.usefixtures("inside_a_task")


def in_open_fleet(wanted, folder, nodes, changes):
    """A run on nodes some of which come, leave, or come back with another capacity after rounds."""
    app = training(wanted, folder)
    app.transport.nodes = dict(nodes)
    app.options = replace(app.options, open_fleet=True)

    def watch(report):
        for node, config in changes.get(report.round, {}).items():
            app.transport.nodes.pop(node, None)
            if config:
                app.transport.nodes[node] = config

    return fc.run(
        wanted, folder, machine=fc.Machine("flower", "cpu"), engine=app.engine(), watch=watch
    )


def place(number, **config):
    return {"partition-id": number, "num-partitions": 2, **config}


@pytest.mark.parametrize(
    "own", [{}, {"norm": "per-width", "model": "wide_resnet(depth=10, widen=1)", "dataset": SMALL}]
)
def test_open_fleet_draws_cohorts_among_connected_nodes(tmp_path, own):
    settings = experiment(
        **{**own, "policy": "prefix", "rounds": 6, "clients": 8, "active": 3, "fleet": "1x1.0"}
    )
    changes = {1: {8: place(1, capacity=0.25)}, 3: {7: None}, 4: {7: place(0)}}
    folder = tmp_path / "run"
    lines = in_open_fleet(settings, folder, {7: place(0)}, changes).metrics
    assert all(
        len(line["clients"]) == 3 and line["lost"] == 0 for line in lines
    )  # nobody is asked who is not there
    assert all(int(client) < 4 for line in lines[:2] for client in line["clients"])
    assert all(int(client) >= 4 for client in lines[4]["clients"])
    recorded_events = {
        (int(client) >= 4, of["capacity"])
        for line in lines
        for client, of in line["clients"].items()
    }
    assert recorded_events == {(False, 1.0), (True, 0.25)}
    moved = [
        (e["round"], e["event"], e["node"], e["why"])
        for e in read_lines(folder / "events.jsonl")
        if e["event"] in ("came", "left")
    ]
    late = "partition 1 of 2, capacity 0.25"
    first = "partition 0 of 2"
    assert moved == [
        (0, "came", 7, first),
        (2, "came", 8, late),
        (4, "left", 7, first),
        (5, "came", 7, first),
    ]
    alone = fc.run(settings, machine=fc.Machine("sequential", "cpu")).metrics
    assert set(lines[5]["clients"]) == set(
        alone[5]["clients"]
    )  # all are there: who is drawn is as ever
    with pytest.raises(RunError, match=r"round 1 cannot be replayed: nodes were missing"):
        _check_same_cohort(prepare(settings, fc.Machine("sequential", "cpu")), lines[0], 0)


def test_open_fleet_of_all_nodes_gives_the_same_bits(tmp_path):
    settings = experiment(policy="rolling", rounds=3)
    in_open_fleet(settings, tmp_path / "run", {7: place(0), 8: place(1)}, {})
    assert checkpoints(tmp_path / "run") == reference(settings, tmp_path / "here")


def test_open_fleet_asks_a_returned_node_for_its_capacity(tmp_path):
    """Between two looks, so that nobody saw it leave: its refusal is what tells."""
    settings = experiment(policy="homogeneous", rounds=3, clients=4, active=4, fleet="1x1.0")
    changes = {0: {8: place(1, capacity=0.5)}}
    lines = in_open_fleet(
        settings, tmp_path / "run", {7: place(0), 8: place(1, capacity=1.0)}, changes
    ).metrics
    assert [line["rejected"] for line in lines] == [0, 2, 0]
    assert {of["capacity"] for of in lines[2]["clients"].values()} == {1.0, 0.5}


def test_fleet_is_closed_where_turns_are_counted_beforehand():
    assert has_open_fleet(fc.Experiment())
    assert not has_open_fleet(fc.Experiment(assignment="slot"))
    private = {
        "privacy": "gaussian(noise=4.0, delta=1e-5)",
        "clip_updates": 0.5,
        "norm": "group",
        "model": "mlp",
    }
    assert not has_open_fleet(fc.Experiment(**private))
    assert not has_open_fleet(fc.Experiment(policy='regions(codename="1122")', active=4))


def test_late_node_with_too_little_capacity_is_refused(tmp_path, caplog):
    settings = experiment(policy="prefix", rounds=2, clients=4, active=4, fleet="1x1.0")
    result = training(settings, tmp_path / "run")
    result.node_registry.capacities = required_capacities(settings)
    result.transport.nodes[8]["capacity"] = 0.25
    run = fc.run(
        settings, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=result.engine()
    )
    assert [(line["lost"], sorted(line["dropped"])) for line in run.metrics] == [(2, [2, 3])] * 2
    (recorded_events,) = [
        e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "rejected"
    ]
    assert "capacity must be at least 1, as the clients of partition 1" in recorded_events["why"]
    assert "the server does not accept this node: capacity must be at least 1" in caplog.text


@pytest.mark.parametrize(
    "policy", ["planned", "planned(tolerate=1)", "rolling", "magnitude", "random", "exclude"]
)
def test_policies_work_with_half_of_the_fleet(tmp_path, policy):
    settings = experiment(
        policy=policy, rounds=3, clients=4, active=4, fleet="1x1.0 + 1x0.75 + 2x0.5"
    )
    changes = {0: {7: None}, 1: {7: place(0, capacity=0.25)}}
    lines = in_open_fleet(settings, tmp_path / "run", {7: place(0), 8: place(1)}, changes).metrics
    few = (
        4 if "tolerate" in policy else 2
    )  # two cannot hold everything twice, so that round is of all four
    assert [len(line["clients"]) + len(line["dropped"]) for line in lines] == [4, few, 4]
    assert [line["lost"] for line in lines] == [0, few - 2, 0]
    assert [line["rejected"] for line in lines] == [0, 0, 2 if "tolerate" in policy else 0]
