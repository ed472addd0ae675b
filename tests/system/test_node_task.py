"""A node prepares an experiment once for each run of its process, not once for each message."""

import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.flower import node_data, node_task
from fedcover.flower.client import experiment_app
from fedcover.flower.messages import ClientTask, TaskRequest, read_results, request_message
from fedcover.flower.node_task import LastTask, TaskInputs
from fedcover.flower.payloads import encode_reduction
from fedcover.flower.state_payload import build_payload
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare, prepare_workload
from fedcover.server.round import initial_state, start_round
from fedcover.submodels.unit_groups import groups_to_json
from tests.helpers.own_rows import written

HERE = "tests.system.test_node_task"


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr("fedcover.flower.client_training.LAST_TASK", LastTask())


@pytest.fixture
def calls(monkeypatch):
    """How often a node has prepared an experiment, and read its rows."""
    counts = Counter()

    def counted(name, function):
        def call(*arguments, **named):
            counts[name] += 1
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(node_task, "prepare_workload", counted("prepare", prepare_workload))
    rows_from_file = counted("rows", node_data.rows_from_file)
    monkeypatch.setattr(node_data, "rows_from_file", rows_from_file)
    return counts


def experiment(**fields):
    small = {"model": "mlp(hidden=[8])", "policy": "rolling", "fleet": "2x1.0 + 2x0.5"}
    return fc.Experiment(**{**small, "clients": 4, "active": 4, "epochs": 1, **fields})


def request(wanted):
    """The work of all clients of an experiment in its first round."""
    setup = prepare(wanted, Machine("sequential", "cpu").resolved())
    state, tasks, payloads = initial_state(setup), [], []
    for client, reduction in start_round(setup, state).work:
        encoded, wire = encode_reduction(reduction, setup.task.model)
        payloads.append(build_payload(setup.task, state, client, wire))
        tasks.append(ClientTask(client.id, client.capacity, client.slot, encoded, len(tasks), "n"))
    shape = list(setup.task.source.test.x.shape[1:])
    return TaskRequest(
        round=0,
        lr=0.1,
        threads=1,
        experiment=wanted.to_toml(),
        client_tasks=tuple(tasks),
        payloads=tuple(payloads),
        extra_config={"classes": setup.task.source.classes, "shape": shape},
        groups=groups_to_json(setup.task.model.groups) if ":" in wanted.model else "",
    )


def answers(work, run_id=1, **config):
    """What a node in this process answers to one message."""
    message = request_message(7, work, ttl=60.0)
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id, 7, config, RecordDict(), {})
    return read_results(experiment_app()(message, context))


def test_messages_of_a_run_prepare_once(calls):
    work = request(experiment())
    first = answers(work)
    assert [result.error for result in first] == [""] * 4
    assert calls["prepare"] == 1  # for four clients
    assert [answers(work) for _ in range(3)] == [first] * 3
    assert calls["prepare"] == 1


@pytest.mark.parametrize("change", ["run", "experiment", "threads", "data"])
def test_other_work_is_prepared_anew(calls, tmp_path, change):
    work = request(experiment())
    answers(work)
    if change == "run":
        answers(work, run_id=2)
    elif change == "experiment":
        answers(request(experiment(seed=1)))
    elif change == "threads":
        answers(replace(work, threads=2))
    else:
        answers(work, data=str(tmp_path))
    assert calls["prepare"] == 2
    answers(work)
    assert calls["prepare"] == 3  # only the last one is kept


def build_one(shape, classes, norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


def build_other(shape, classes, norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))


build = build_one


def test_functions_of_one_run_do_not_serve_another(monkeypatch):
    settings = experiment(model=f"{HERE}:build")
    work = request(settings)
    losses = [result.loss for result in answers(work)]
    monkeypatch.setattr(f"{HERE}.build", build_other)
    assert [result.loss for result in answers(work)] == losses
    others = [result.loss for result in answers(work, run_id=2)]
    assert np.isfinite(others).all()
    assert others != losses


def request_of_first_node(files):
    """The work of the three clients whose rows the first node has."""
    full = request(files.experiment())
    return replace(full, client_tasks=tuple(t for t in full.client_tasks if t.client < 3))


def test_rows_of_a_node_are_read_once_for_each_run(calls, tmp_path):
    files = written(tmp_path)
    path = files.nodes[0]
    config = {"partition-id": 0, "num-partitions": 2, "rows": str(path)}
    work = request_of_first_node(files)
    first = answers(work, **config)
    assert [result.error for result in first] == [""] * 3
    assert answers(work, **config) == first
    assert calls == {"prepare": 1, "rows": 1}
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "train_x": 2 * arrays["train_x"]})
    assert answers(work, **config) == first
    changed = answers(work, run_id=2, **config)
    assert calls == {"prepare": 2, "rows": 2}
    assert [result.loss for result in changed] != [result.loss for result in first]


def test_what_could_not_be_prepared_is_tried_again(calls, tmp_path):
    files = written(tmp_path)
    work = request_of_first_node(files)
    config = {"partition-id": 0, "num-partitions": 2, "rows": str(tmp_path / "later.npz")}
    assert all("must be a file that exists" in result.error for result in answers(work, **config))
    files.nodes[0].rename(tmp_path / "later.npz")
    assert [result.error for result in answers(work, **config)] == [""] * 3


def inputs(run_id):
    machine = Machine("sequential", "cpu", 1).resolved()
    return TaskInputs(run_id, experiment(), "", machine, None, None)


def test_task_of_a_run_is_released_before_the_next_is_prepared(monkeypatch):
    last_task = LastTask()
    task = last_task.take(inputs(1))
    source = weakref.ref(task.source)
    last_task.put(inputs(1), task)
    del task
    sources = []
    monkeypatch.setattr(node_task, "prepare_task", lambda arguments: sources.append(source()))
    last_task.take(inputs(2))
    assert sources == [None]


def test_two_messages_at_once_have_a_task_each():
    last_task = LastTask()
    last_task.put(inputs(1), last_task.take(inputs(1)))
    first, second = last_task.take(inputs(1)), last_task.take(inputs(1))
    assert first is not second
    last_task.put(inputs(1), first)
    last_task.put(inputs(1), second)
    assert last_task.take(inputs(1)) is second


def test_task_that_cannot_be_prepared_is_not_kept():
    last_task = LastTask()
    wrong = replace(inputs(1), data="/nowhere")
    for _ in range(2):
        with pytest.raises(InvalidValue, match="data must be a folder that exists"):
            last_task.take(wrong)
