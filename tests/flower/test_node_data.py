"""Clients' rows that stay on their nodes: what is said of them, and what is refused; without
Flower.
"""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcover as fc
from fedcover.cli.local_nodes import node_data_configs
from fedcover.data.client_data import ClientInfo, RemoteData
from fedcover.data.datasets import rows_from_file
from fedcover.data.partition import node_partition
from fedcover.errors import InvalidValue
from fedcover.flower.node_data import (
    MAX_LABELS,
    MAX_SAMPLES,
    describe_client_info,
    load_node_data,
    parse_client_info,
)
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import DataRequirements, NodeInfo, clients_of, partition_of
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare
from fedcover.training.engines.sequential import sequential
from fedcover.types import Engine
from tests.helpers.command_line import refused
from tests.helpers.own_rows import NODES, written

WANTED = DataRequirements(5, 10, (1, 8, 8))


@given(st.integers(1, 200), st.integers(1, 20))
def test_clients_of_a_partition_are_those_assigned_to_it(clients, num_partitions):
    for partition_id in range(num_partitions):
        partition_clients = clients_of(partition_id, clients, num_partitions)
        assert list(partition_clients) == [
            client
            for client in range(clients)
            if partition_of(client, clients, num_partitions) == partition_id
        ]


def test_node_rows_equal_the_rows_in_one_file(tmp_path):
    files = written(tmp_path)
    experiment = files.experiment()
    together = prepare(
        files.in_one_process(experiment), Machine(device="cpu").resolved()
    ).task.source
    for partition_id, path in enumerate(files.nodes):
        here = load_node_data(str(path), experiment, clients_of(partition_id, 5, 2), WANTED)
        for client in range(5):
            if client not in NODES[partition_id]:
                assert here.count(client) == 0
                continue
            node_shard, same = here.shard(client), together.shard(client)
            assert node_shard.samples.x[node_shard.index].equal(same.samples.x[same.index])
            assert node_shard.samples.y[node_shard.index].equal(same.samples.y[same.index])


def test_node_describes_the_data_that_it_has(tmp_path):
    files = written(tmp_path)
    together = prepare(
        files.in_one_process(files.experiment()), Machine(device="cpu").resolved()
    ).task.source
    holdings = [
        info for path in files.nodes for info in parse_client_info(describe_client_info(str(path)))
    ]
    assert holdings == [
        ClientInfo(together.count(c), together.labels(c), (1, 8, 8)) for c in range(5)
    ]
    assert len({info.samples for info in holdings}) > 1
    assert len({info.labels for info in holdings}) > 1


@given(
    st.dictionaries(
        st.integers(0, 4), st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1
    )
)
def test_labels_survive_the_encoding(tmp_path_factory, known):
    path = tmp_path_factory.mktemp("rows") / "mine.npz"
    owner, y = (
        np.array(column)
        for column in zip(*[(o, label) for o in known for label in known[o]], strict=True)
    )
    np.savez(path, train_x=np.zeros((len(y), 2), np.float32), train_y=y, train_owner=owner)
    expected = [
        ClientInfo(len(known[o]), tuple(sorted(set(known[o]))), (2,)) for o in sorted(known)
    ]
    assert list(parse_client_info(describe_client_info(str(path)))) == expected


def counts(*numbers):
    return np.array(numbers, "<u4").tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"samples": counts(count)} for count in (0, MAX_SAMPLES + 1, 2**32 - 1)),
        {"samples": counts(1, 2)},
        {"samples": b""},
        {"samples": b"123"},
        {"samples": [3]},
        {"samples": "3333"},
        {"shape": [0]},
        {"shape": [2.0]},
        *({"labels": bits} for bits in (b"", bytes(MAX_LABELS // 8 + 1), "\x80", [b"\x80"])),
        {"shape": [1] * 100},
    ],
)
def test_invalid_node_data_info_is_refused(wrong):
    honest = {"samples": counts(3), "labels": b"\x80", "shape": [2]}
    assert list(parse_client_info(honest)) == [ClientInfo(3, (0,), (2,))]
    assert not parse_client_info({})
    with pytest.raises(ValueError, match=r"rows|labels|shape"):
        parse_client_info({**honest, **wrong})


@pytest.mark.parametrize("clients", [134, 100_000])
def test_oversized_node_data_info_is_refused_in_little_memory(clients):
    """Few clients with all the labels that there can be, or very many, where two are wanted."""
    record = {
        "samples": counts(*[1] * clients),
        "labels": b"\xff" * (2**20 // clients * clients),
        "shape": [4],
    }
    node_registry = NodeRegistry(requirements=DataRequirements(3, 2, (4,)))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValue, match="rows must be of 2 owners"):
            node_registry.add(NodeInfo(7, 0, 2, None, "v", parse_client_info(record)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * (len(record["samples"]) + len(record["labels"]))


def test_rows_without_owner_belong_to_one_client(tmp_path):
    np.savez(
        tmp_path / "mine.npz", train_x=np.zeros((3, 4), np.float32), train_y=np.array([2, 0, 2])
    )
    samples, owner = rows_from_file(tmp_path / "mine.npz")
    assert samples.x.shape == (3, 4)
    assert owner.tolist() == [0, 0, 0]
    assert node_partition(owner, [1], 2).indices(1).tolist() == [0, 1, 2]


def test_unsuitable_row_file_is_refused(tmp_path):
    path, x = tmp_path / "mine.npz", np.zeros((3, 4), np.float32)
    with pytest.raises(InvalidValue, match="rows must be a file that exists"):
        rows_from_file(path)
    np.savez(path, train_x=x)
    with pytest.raises(InvalidValue, match=r"rows .* must have an array train_y; got train_x"):
        rows_from_file(path)
    np.savez(path, train_x=x, train_y=np.arange(3), train_owner=np.arange(2))
    with pytest.raises(InvalidValue, match="train_owner must be as long as train_x, 3 rows; got 2"):
        rows_from_file(path)
    np.savez(path, train_x=x, train_y=np.array([0, 1, MAX_LABELS]))
    with pytest.raises(InvalidValue, match=f"labels below {MAX_LABELS}; got {MAX_LABELS}"):
        describe_client_info(str(path))
    np.savez(path, train_x=x, train_y=np.arange(3), train_owner=np.arange(3))
    experiment = Experiment(partition="nodes", clients=4, active=4)
    for clients, requirements, why in (
        (
            range(3),
            DataRequirements(4, 2, (4,)),
            r"mine\.npz: train_y must be labels 0 to 1, as the server has; got 2",
        ),
        (
            range(3),
            DataRequirements(4, 3, (2, 2)),
            r"mine\.npz: train_x must have rows of shape \(2, 2\), .* got \(4,\)",
        ),
        (
            range(2),
            DataRequirements(4, 3, (4,)),
            r"mine\.npz: rows must be of 2 owners, .* of the 4 clients .* got 3",
        ),
    ):
        with pytest.raises(InvalidValue, match=why):
            load_node_data(str(path), experiment, clients, requirements)
    assert (
        load_node_data(str(path), experiment, range(3), DataRequirements(4, 3, (4,))).count(2) == 1
    )


def test_node_must_describe_the_rows_of_each_client():
    node_registry, some, other = (
        NodeRegistry(requirements=DataRequirements(3, 2, (4,))),
        ClientInfo(5, (0,), (4,)),
        ClientInfo(6, (1,), (4,)),
    )
    for holdings, why in (
        ((), r"rows=.*train_x, train_y"),
        ((some,), r"rows must be of 2 owners, as many as this node has of the 3 clients .* got 1"),
        (
            (ClientInfo(5, (0,), (5,)),) * 2,
            r"train_x must have rows of shape \(4,\), as the server has; got \(5,\)",
        ),
        (
            (some, ClientInfo(5, (0, 2), (4,))),
            r"train_y must be labels 0 to 1, as the server has; got 2",
        ),
    ):
        with pytest.raises(InvalidValue, match=why):
            node_registry.add(NodeInfo(7, 0, 2, None, "v", holdings))
    assert not node_registry.node_info
    node_registry.add(NodeInfo(7, 0, 2, None, "v", (some, other)))
    assert node_registry.client_info == {0: some, 1: other}
    node_registry.add(
        NodeInfo(8, 0, 2, None, "v", (other, other))
    )  # another one for a place that is held
    assert node_registry.client_info == {0: some, 1: other}
    node_registry.unresponsive_nodes |= {7, 8}
    node_registry.add(
        NodeInfo(9, 0, 2, None, "v", (other, some))
    )  # it has come in the place of one that is silent
    node_registry.add(NodeInfo(10, 1, 2, None, "v", (some,)))
    assert node_registry.client_info == {0: other, 1: some, 2: some}
    NodeRegistry().add(
        NodeInfo(7, 0, 2, None, "v")
    )  # where rows are not on nodes, none need be told of


def test_server_knows_remote_rows_by_their_description(tmp_path):
    files, info_by_client = written(tmp_path), {}
    engine = Engine(sequential, client_info=info_by_client)
    setup = prepare(
        files.experiment(), Machine(device="cpu").resolved(), overrides=Overrides(engine=engine)
    )
    source = setup.task.source
    assert isinstance(source, RemoteData)
    assert (source.count(1), source.labels(1)) == (0, ())
    info_by_client[1] = ClientInfo(7, (0, 3, 99), (1, 8, 8))  # a node has come since
    assert (source.count(1), source.labels(1)) == (7, (0, 3))  # there is no label 99
    assert len(source.test) == 360
    assert len(source.calibration) == 10


def test_rows_on_nodes_are_refused_in_one_process(tmp_path):
    """By everything that would train on them, before it begins."""
    files = written(tmp_path)
    experiment, machine = files.experiment(rounds=1, keep_rounds=(0,)), Machine("sequential", "cpu")
    (tmp_path / "done").mkdir()
    fc.run(files.in_one_process(experiment), tmp_path / "done", machine=machine)
    (tmp_path / "done" / "experiment.toml").write_text(
        experiment.to_toml()
    )  # as a run on nodes leaves it
    for refused_here in (
        lambda: fc.run(experiment, tmp_path / "run", machine=machine),
        lambda: list(fc.sweep([experiment], tmp_path / "runs", machine=machine)),
        lambda: fc.replay(tmp_path / "done", 0),
        lambda: fc.certify(tmp_path / "done"),
    ):
        with pytest.raises(InvalidValue, match=r"so this needs Flower .* use partition 'owner'"):
            refused_here()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_up_checks_the_rows_of_its_nodes_first(tmp_path):
    files = written(tmp_path)
    experiment, pattern = files.experiment(), str(tmp_path / "node-{}.npz")
    source = prepare(experiment, Machine(device="cpu").resolved()).task.source
    assert node_data_configs(experiment, pattern, 2, source) == [
        {"rows": str(path)} for path in files.nodes
    ]
    assert node_data_configs(files.in_one_process(experiment), "", 2, source) == [{}, {}]
    with pytest.raises(
        InvalidValue, match="rows are for partition 'nodes'; this experiment has 'owner'"
    ):
        node_data_configs(files.in_one_process(experiment), pattern, 2, source)
    for wrong in ("", str(files.nodes[0])):
        with pytest.raises(InvalidValue, match=r"rows must name each node's file, with \{\}"):
            node_data_configs(experiment, wrong, 2, source)
    with pytest.raises(InvalidValue, match=r"node-0\.npz: rows must be of 5 owners"):
        node_data_configs(experiment, pattern, 1, source)


def test_node_measures_its_capacity_on_its_own_rows(fedcover, tmp_path):
    files = written(tmp_path)
    (tmp_path / "mine.toml").write_text(files.experiment(dataset="nowhere.npz").to_toml())
    measure = "capacity", tmp_path / "mine.toml", "--device", "cpu"
    code, output, noted = fedcover(*measure, "--rows", files.nodes[0])
    assert code == 0
    assert "proposed capacity: 1 " in output
    assert "rows of shape (1, 8, 8), and a model for 6 labels, as these rows have" in noted
    assert "1,710" in output  # parameters: 64 inputs, 24 hidden units, 6 labels
    code, output, noted = fedcover(*measure, "--rows", files.nodes[0], "--classes", 10)
    assert "1,810" in output
    assert "a model for 10 labels\n" in noted
    refused(fedcover(*measure), 2, "--rows FILE is needed: the experiment has partition 'nodes'")
    refused(
        fedcover(*measure, "--classes", 3, "--set", "partition=iid"),
        2,
        "--classes goes with --rows",
    )
    wrong = fedcover(*measure, "--rows", files.nodes[0], "--set", "partition=iid")
    refused(wrong, 2, "--rows is for partition 'nodes'; this experiment has 'iid'")
    refused(
        fedcover(*measure, "--rows", files.nodes[0], "--classes", 0),
        2,
        "--classes must be in 1..65536; got 0",
    )
    refused(
        fedcover(*measure, "--rows", files.nodes[0], "--classes", 3),
        2,
        "labels 0 to 2, as the server has; got 5",
    )


def test_node_does_not_need_the_servers_data(tmp_path):
    """The model is built for the rows of the node, as it is on the server for those of its test
    set.
    """
    files = written(tmp_path)
    rows = load_node_data(str(files.nodes[1]), files.experiment(), clients_of(1, 5, 2), WANTED)
    machine = Machine(device="cpu").resolved()
    setup = prepare(
        files.experiment(dataset="nowhere.npz"), machine, overrides=Overrides(source=rows)
    )
    shapes = {name: tuple(p.shape) for name, p in setup.task.model.module.named_parameters()}
    there = prepare(files.experiment(), machine).task.model.module
    assert shapes == {name: tuple(p.shape) for name, p in there.named_parameters()}
    assert torch.equal(
        next(iter(setup.task.model.module.parameters())), next(iter(there.parameters()))
    )
