"""What a node answers when its work fails: a reason for each client, never a traceback for all."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedcover as fc
from fedcover.flower import client_training, engine, events, transport
from fedcover.flower.messages import ClientTask, TaskRequest
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import NodeInfo, partition_of
from fedcover.flower.payloads import encode_reduction, gather_kept, prefix_names
from fedcover.flower.reply_download import FailedReply
from fedcover.server.cohort import cohort_of
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.reductions import Masks
from tests.helpers.worlds import world


def model(hidden):
    module = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    return fc.Model(module, fc.trace(module, torch.zeros(1, 4)))


def failing(*_):
    raise ZeroDivisionError("no rows")


@pytest.mark.parametrize(
    ("there", "train", "reason"),
    [
        (8, lambda *_: {"num-examples": 1, "loss": 0.0}, "wrong shape"),
        (16, failing, "ZeroDivisionError('no rows')"),
    ],
)
def test_node_names_why_it_cannot_train(monkeypatch, there, train, reason):
    server = model(16)
    params = {name: p.detach() for name, p in server.module.named_parameters()}
    encoded, wire = encode_reduction(Masks({}), server)
    payload = pack_arrays(prefix_names({"params": gather_kept(wire, wire.extract(params))}))
    orders = TaskRequest(
        0,
        0.1,
        1,
        "",
        tuple(ClientTask(n, 1.0, 0, encoded, 0, f"nonce{n}") for n in range(2)),
        (payload,),
    )
    monkeypatch.setattr(client_training, "read_request", lambda message: orders)
    monkeypatch.setattr(client_training, "result_message", lambda message, answers: answers)
    answers = client_training.train_module(
        SimpleNamespace(content={}), SimpleNamespace(node_config={}), train, lambda: model(there)
    )
    assert [answer.client for answer in answers] == [0, 1]
    assert all(reason in answer.error for answer in answers)


class Scripted:
    """A federation in which every node is there all the time, and some never answer."""

    def __init__(self, silent):
        self.silent, self.asked = set(silent), []

    def connected_nodes(self):
        return {7, 8, 9}

    def query_node_info(self, nodes, *, timeout, client_info):
        places = {7: 0, 8: 1, 9: 1}
        return {node: NodeInfo(node, places[node], 2, None, fc.__version__) for node in nodes}

    def send_and_wait(self, messages, *, timeout, max_bytes):
        self.asked.append(sorted(messages))
        late = FailedReply("late", "no answer in 1 s")
        return {node: late if node in self.silent else "unreadable" for node in messages}


class Restarting:
    """A grid of three nodes: one answers late, one was restarted and answers only what came after,
    one is slow.
    """

    _runtime_client = None

    def __init__(self):
        self.sent, self.replies = [], {}

    def get_node_ids(self):
        return [7, 8, 9]

    def push_messages(self, messages):
        (message,) = messages
        node, id = message.metadata.dst_node_id, f"m{len(self.sent)}"
        self.sent.append((node, message.metadata.message_type))
        tasks = [kind for to, kind in self.sent if to == node]
        if node == 8 and tasks == ["train", "query"]:
            self.replies[id] = message
        if node == 7 and tasks == [
            "train",
            "query",
        ]:  # its answer to the task comes before that to what came later
            self.replies |= {"m0": message, id: message}
        return [id]


def test_restarted_node_does_not_delay_the_round(monkeypatch):
    monkeypatch.setattr(transport, "PROBE", 0.05)
    monkeypatch.setattr(transport, "POLL", 0.02)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(
        transport.Transport, "_receive_reply", lambda self, nodes, *_: self._grid.replies.get(nodes)
    )
    grid = Restarting()
    messages = {
        node: Message(RecordDict(), dst_node_id=node, message_type="train", ttl=60.0)
        for node in (7, 8, 9)
    }
    result = transport.Transport(grid).send_and_wait(
        messages, timeout=1.0, max_bytes=dict.fromkeys(messages, 0)
    )
    assert isinstance(result[7], Message)
    assert result[8] == FailedReply("lost", transport.RESTARTED)
    assert result[9] == FailedReply("late", "no answer in 1 s")
    assert Counter(grid.sent) == Counter(
        [(node, kind) for node in (7, 8, 9) for kind in ("train", "query")]
    )


def test_silent_node_loses_its_partition(monkeypatch):
    """While it is silent the next one that claims the place gets the work; one that answers keeps
    its place.
    """
    monkeypatch.setattr(engine, "request_message", lambda node, orders, ttl: orders)
    monkeypatch.setattr(engine, "read_results", lambda reply: [])
    setup, state = world("mlp")
    work = [(client, Masks({})) for client in cohort_of(setup, 0)]
    scripted = Scripted(silent=[8])
    options = engine.RoundOptions("", setup.experiment.clients, deadline=1.0)
    train = engine.NodeTraining(scripted, NodeRegistry(), options, events.EventLog(None))
    assert {partition_of(client.id, setup.experiment.clients, 2) for client, _ in work} == {0, 1}
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    assert scripted.asked == [[7, 8], [7, 9], [7, 9]]
    scripted.silent = {9}
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    assert scripted.asked[3:] == [[7, 9], [7, 8]]
