"""Introductions as Flower carries them: what a node tells comes through, and what is too much is
refused unread.
"""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fedcover.data.client_data import ClientInfo
from fedcover.errors import InvalidValue
from fedcover.flower.client import _answer_query
from fedcover.flower.events import EventLog
from fedcover.flower.messages import QUERY, TaskRequest, read_request, request_message
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.registration import register_new_nodes
from fedcover.flower.reply_download import PartialReply, TooLarge, decode_reply
from fedcover.flower.transport import MAX_CLIENT_INFO_BYTES, _parse_node_info
from fedcover.version import __version__


@pytest.fixture
def asked(monkeypatch):
    """The question of who a node is."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)
    return Message(
        RecordDict({"hello": ConfigRecord()}), dst_node_id=7, message_type=QUERY, ttl=60.0
    )


def arriving(reply):
    contents = {id: piece.deflate() for id, piece in get_all_nested_objects(reply).items()}
    return PartialReply(reply.object_id, [], MAX_CLIENT_INFO_BYTES, 0, contents)


def test_introduction_carries_the_node_data_info(asked, tmp_path):
    rows = {"train_x": np.zeros((5, 4), np.float32), "train_y": np.array([0, 9, 9, 2, 0])}
    np.savez(tmp_path / "mine.npz", **rows, train_owner=np.array([1, 1, 1, 2, 2]))
    config = {"partition-id": 0, "num-partitions": 2, "rows": str(tmp_path / "mine.npz")}
    reply = _answer_query(asked, SimpleNamespace(node_id=7, node_config=config))
    result = _parse_node_info(7, decode_reply(arriving(reply)))
    assert list(result.client_info) == [
        ClientInfo(3, (0, 9), (4,)),
        ClientInfo(2, (0, 2), (4,)),
    ]


class OneNode:
    """A node that reports who it is, and hears why it is refused."""

    def __init__(self, info):
        self.info, self.heard = info, []

    def connected_nodes(self):
        return {self.info.node}

    def query_node_info(self, nodes, *, timeout, client_info):
        return dict.fromkeys(nodes, self.info)

    def notify_rejected(self, node, why):
        self.heard.append(why)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, None),
        ({"version": "0.0.1"}, f"the node has fedcover '0.0.1', the server {__version__}"),
        ({"format": 1}, "writes messages of format 1, the server's of format 2: install the serv"),
        (
            {"format": None},
            "writes messages of format 1, the server's of format 2: install the serv",
        ),
        ({"format": 3}, "writes messages of format 3, the server's of format 2: install the serv"),
    ],
)
def test_node_with_another_fedcover_is_refused_with_a_reason(asked, tmp_path, told, why):
    config = {"partition-id": 0, "num-partitions": 2}
    reply = _answer_query(asked, SimpleNamespace(node_id=7, node_config=config))
    hello = {**reply.content["hello"], **told}
    reply.content["hello"] = ConfigRecord(
        {name: value for name, value in hello.items() if value is not None}  # None: not reported
    )
    node = OneNode(_parse_node_info(7, decode_reply(arriving(reply))))
    registry, events = NodeRegistry(), EventLog(tmp_path / "events.jsonl")
    register_new_nodes(node, registry, events, round=0)
    assert (7 in registry.node_info) == (why is None)
    assert len(node.heard) == (why is not None)
    assert all(why in heard for heard in node.heard)


def test_request_of_another_format_is_refused_with_a_reason(asked):
    message = request_message(7, TaskRequest(0, 0.1, 1, "", (), (b"payload",)), ttl=60.0)
    assert read_request(message).payloads == (b"payload",)
    old = Array("uint8", (2,), "fedcover.bundle", b"[]")
    message.content["parts"] = ArrayRecord({"0": old})
    with pytest.raises(
        InvalidValue,
        match=r"as fedcover\.safetensors; got 'fedcover\.bundle': server and nodes need",
    ):
        read_request(message)


FLOODS = {
    "numbers": {"samples": [1] * 1_100_000, "labels": [b"\x80"], "shape": [4]},
    "labels": {"samples": [1] * 134, "labels": [b"\xff" * 8192] * 134, "shape": [4]},
    "a text": {"more": "x" * 1_100_000},
}


@pytest.mark.parametrize("kind", FLOODS)
def test_oversized_introduction_is_refused_in_little_memory(asked, kind):
    hello = {
        "error": "",
        "version": __version__,
        "place": 0,
        "places": 2,
        "capacity": 1.0,
        **FLOODS[kind],
    }
    arrived = arriving(Message(RecordDict({"hello": ConfigRecord(hello)}), reply_to=asked))
    size = sum(map(len, arrived.contents.values()))
    assert size > 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="bytes that are not tensors"):
            decode_reply(arrived)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size
