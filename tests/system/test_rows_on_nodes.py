"""Rows that stay on the nodes: the same bits, and what nodes say of their rows."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import fedcover as fc
from fedcover.cli.live_view import read_run_view, render
from fedcover.flower.engine import NodeTraining, RoundOptions
from fedcover.flower.events import EventLog
from fedcover.flower.node_data import data_requirements
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import DataRequirements
from fedcover.runs.metrics_log import read_lines
from fedcover.runs.setup import build_source
from tests.helpers.own_rows import written
from tests.system.loopback import Loopback

pytestmark = pytest.mark.usefixtures("inside_a_task")


def on_nodes(nodes, wanted, folder):
    """The training of an experiment whose rows are on these nodes."""
    options, node_registry = (
        RoundOptions(wanted.to_toml(), wanted.clients, 60.0),
        NodeRegistry(num_partitions=2, requirements=DataRequirements(5, 10, (1, 8, 8))),
    )
    return NodeTraining(Loopback(nodes), node_registry, options, EventLog(folder / "events.jsonl"))


def test_rows_on_nodes_give_the_same_bits(tmp_path):
    """The server has none of the clients' rows; a node that comes late trains from then on, and
    counts.
    """
    files = written(tmp_path)
    settings = files.experiment(label_rows=True)
    nodes = {
        7 + place: {"partition-id": place, "num-partitions": 2, "rows": str(path)}
        for place, path in enumerate(files.nodes)
    }
    machine = fc.Machine("flower", "cpu")
    there = fc.run(
        settings,
        tmp_path / "run",
        machine=machine,
        engine=on_nodes(nodes, settings, tmp_path / "run").engine(),
    )
    here = fc.run(files.in_one_process(settings), machine=fc.Machine("sequential", "cpu"))
    assert there.state.params.keys() == here.state.params.keys()
    assert all(tensor.equal(here.state.params[name]) for name, tensor in there.state.params.items())
    assert there.metrics[-1]["accuracy_local"] == here.metrics[-1]["accuracy_local"]

    late = on_nodes({7: nodes[7]}, settings, tmp_path / "late")
    weighed = []

    def watch(report):
        late.transport.nodes.update(nodes)
        weighed.append(
            {client: info.samples for client, info in late.node_registry.client_info.items()}
        )

    lines = fc.run(
        settings, tmp_path / "late", machine=machine, engine=late.engine(), watch=watch
    ).metrics
    assert [line["lost"] for line in lines] == [2, 0, 0]
    assert list(weighed[0]) == [0, 1, 2]
    assert weighed[1] == {client: here.setup.task.source.count(client) for client in range(5)}


def test_client_of_a_late_node_counts_from_its_first_round(tmp_path):
    """A cohort is chosen before its nodes are met, when nothing is known of their rows."""
    files = written(tmp_path)
    settings = files.experiment(rounds=1, policy="full", fleet="1x1.0")
    node = {"partition-id": 1, "num-partitions": 2, "rows": str(files.nodes[1])}
    app = on_nodes({8: node}, settings, tmp_path / "run")
    updates = []

    def watched(task, state, work, lr):
        updates.extend(app(task, state, work, lr))
        return updates

    engine = replace(app.engine(), train=watched)
    fc.run(settings, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=engine)
    assert [update.client.id for update in updates] == [3, 4]
    assert [update.client.samples for update in updates] == [
        app.node_registry.client_info[client].samples for client in (3, 4)
    ]
    assert all(update.client.samples > 0 for update in updates)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (None, "each needs its own, --node-config"),
        ("none.npz", "rows must be a file that exists"),
        (
            "node-1.npz",
            "partition 0 of 2: rows must be of 3 owners, as many as this node has of the 5 clients",
        ),
    ],
)
def test_node_without_its_rows_is_told_why(tmp_path, rows, why):
    settings = written(tmp_path).experiment(rounds=1)
    node_config = {"rows": str(tmp_path / rows)} if rows else {}
    app = on_nodes(
        {7: {"partition-id": 0, "num-partitions": 2, **node_config}}, settings, tmp_path / "run"
    )
    fc.run(settings, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=app.engine())
    assert [
        why in line["why"] for line in read_lines(app.event_log.path) if line["client"] is None
    ] == [True]


def scaled_nodes(tmp_path, factors, **config):
    """Nodes whose rows are each multiplied by a number, and what the server wants rows to
    be like.
    """
    files = written(tmp_path)
    nodes = {}
    for place, (path, factor) in enumerate(zip(files.nodes, factors, strict=True)):
        arrays = dict(np.load(path))
        np.savez(path, **{**arrays, "train_x": arrays["train_x"] * np.float32(factor)})
        nodes[7 + place] = {"partition-id": place, "num-partitions": 2, "rows": str(path), **config}
    settings = files.experiment(rounds=1)
    app = on_nodes(nodes, settings, tmp_path / "run")
    app.node_registry.requirements = data_requirements(
        build_source(settings, "cpu", None), settings.clients
    )
    return settings, app


def test_node_with_scaled_inputs_is_accepted_with_a_warning(tmp_path, caplog):
    settings, app = scaled_nodes(tmp_path, (1, 255))
    (line,) = fc.run(
        settings, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=app.engine()
    ).metrics
    assert len(line["clients"]) == 5  # never refused for it
    (recorded_events,) = [
        e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "warned"
    ]
    assert (recorded_events["node"], recorded_events["client"]) == (8, None)
    why = (
        "partition 1 of 2: its inputs seem to be scaled differently: about "
        "-200 to 500, mean 0, spread 300; "
    )
    assert recorded_events["why"].startswith(
        why + "the server's are about -0.8 to 2, mean 0, spread 1."
    )
    assert "node 8) warned" in caplog.text
    calls = read_run_view(tmp_path / "run")
    assert [event["node"] for event in calls.warnings] == [8]
    assert not calls.failures
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(calls))
    assert "warnings" in console.export_text()


def test_node_may_withhold_its_input_scale(tmp_path):
    settings, app = scaled_nodes(tmp_path, (255, 255), **{"tell-scale": False})
    fc.run(settings, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=app.engine())
    assert {e["event"] for e in read_lines(tmp_path / "run" / "events.jsonl")} == {
        "came",
        "answered",
    }
    assert all(info.scale is None for info in app.node_registry.node_info.values())
    settings, app = scaled_nodes(tmp_path, (1, 1), **{"tell-scale": "no"})
    fc.run(settings, tmp_path / "other", machine=fc.Machine("flower", "cpu"), engine=app.engine())
    (first, *_) = [
        e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "rejected"
    ]
    assert "tell-scale in --node-config must be true or false; got 'no'" in first["why"]


def place(number, **config):
    return {"partition-id": number, "num-partitions": 2, **config}
