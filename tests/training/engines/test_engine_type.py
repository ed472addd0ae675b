"""A plain function is an engine; one that reaches other machines also says whom, and what became of
them.
"""

import pytest

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.training.engines import as_engine
from fedcover.training.engines.sequential import sequential
from fedcover.types import ClientInfo, Engine

HERE = fc.Machine("sequential", "cpu")


def experiment(**fields):
    small = {
        "dataset": "synthetic(shape=(1, 3, 4), classes=3, samples=7, test_size=20)",
        "model": "mlp(hidden=[8])",
        "clients": 6,
        "active": 4,
        "rounds": 1,
        "epochs": 1,
        "calibration": 20,
    }
    return fc.Experiment(**{**small, **fields})


def test_plain_function_trains_as_the_engine_that_it_calls():
    def function(task, state, work, lr):
        return sequential(task, state, work, lr)

    plain = fc.run(experiment(), machine=HERE, engine=function)
    usual = fc.run(experiment(), machine=HERE)
    assert all(
        tensor.equal(usual.state.params[name]) for name, tensor in plain.state.params.items()
    )
    assert plain.metrics[0].keys() == usual.metrics[0].keys()


def test_engine_stays_what_it_is():
    engine = Engine(sequential, round_metrics=lambda: {"late": 0})
    assert as_engine(engine) is engine
    assert as_engine(sequential) == Engine(sequential)


def test_only_members_are_asked_with_the_capacity_that_they_declare():
    engine = Engine(sequential, members=lambda round: {1: 0.25, 4: None, 5: None})
    fields = {"policy": "prefix", "fleet": "5x1.0 + 1x0.5"}
    (line,) = fc.run(experiment(**fields), machine=HERE, engine=engine).metrics
    capacities = {client: entry["capacity"] for client, entry in line["clients"].items()}
    assert capacities == {"1": 0.25, "4": 1.0, "5": 0.5}


def test_metrics_of_an_engine_are_those_of_the_round():
    engine = Engine(sequential, round_metrics=lambda: {"late": 3})
    assert fc.run(experiment(), machine=HERE, engine=engine).metrics[0]["late"] == 3


def test_rows_on_nodes_need_an_engine_that_knows_of_them():
    remote = experiment(dataset="digits", partition="nodes", clients=2, active=2)
    with pytest.raises(InvalidValue, match="partition 'nodes'"):
        fc.run(remote, machine=HERE, engine=sequential)

    info = {client: ClientInfo(7, (0, 3), (1, 8, 8)) for client in range(2)}
    engine = Engine(lambda task, state, work, lr: [], client_info=info)
    source = fc.run(remote, machine=HERE, engine=engine).setup.task.source
    assert [(source.count(client), source.labels(client)) for client in range(2)] == [
        (7, (0, 3))
    ] * 2
