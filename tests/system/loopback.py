"""Nodes in this process: the same client app, called directly instead of over the network."""

from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Context, Message, RecordDict

import fedcover as fc
from fedcover.flower.client import experiment_app
from fedcover.flower.engine import NodeTraining, RoundOptions
from fedcover.flower.events import EventLog
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.transport import _parse_node_info

SMALL = "synthetic(shape=(3, 8, 8), classes=3, samples=12, test_size=50)"


@dataclass
class Loopback:
    """Nodes in this process: the same client app, called directly."""

    nodes: dict[int, dict]
    spoil: object = None
    states: dict[int, RecordDict] = field(default_factory=dict)

    def connected_nodes(self):
        return set(self.nodes)

    def _call(self, node, message):
        message.metadata.__dict__["_message_id"] = f"{node}"
        state = self.states.setdefault(node, RecordDict())
        return experiment_app()(message, Context(1, node, self.nodes[node], state, {}))

    def query_node_info(self, nodes, *, timeout, client_info):
        hello = RecordDict({"hello": ConfigRecord()})
        return {
            n: _parse_node_info(
                n, self._call(n, Message(hello, dst_node_id=n, message_type="query"))
            )
            for n in nodes
        }

    def notify_rejected(self, node, why):
        recorded_events = RecordDict({"refused": ConfigRecord({"why": why})})
        self._call(node, Message(recorded_events, dst_node_id=node, message_type="query"))

    def send_and_wait(self, messages, *, timeout, max_bytes):
        result = {}
        for node, message in messages.items():
            reply = self._call(node, message)
            size = sum(len(array.data) for array in reply.content.array_records["answers"].values())
            assert size <= max_bytes[node]
            result[node] = self.spoil(node, message, reply) if self.spoil else reply
        return result


def training(wanted: fc.Experiment, folder, spoil=None) -> NodeTraining:
    """The training of an experiment on two nodes of this process, numbers 7 and 8."""
    nodes = {7 + place: {"partition-id": place, "num-partitions": 2} for place in range(2)}
    events = EventLog(folder / "events.jsonl")
    options = RoundOptions(wanted.to_toml(), wanted.clients, 60.0, private=wanted.privacy != "none")
    return NodeTraining(Loopback(nodes, spoil), NodeRegistry(), options, events)
