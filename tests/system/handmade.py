"""A node without Flower's program: it speaks to the SuperLink itself, so it can send what no
SuperNode would.
"""

import threading

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedcover.flower.client import experiment_app
from fedcover.flower.messages import PAYLOAD_STYPE


class HandMade(threading.Thread):
    """Introduces itself like any node; answers the tasks of a round with that round's attack."""

    def __init__(self, address: str, config: dict, attacks: list) -> None:
        super().__init__(daemon=True)
        self.address, self.config, self.attacks = address, config, attacks
        self.over = threading.Event()

    def run(self) -> None:
        TaskIdentity._task_id, TaskIdentity._run_id = 1, 1  # messages are made inside tasks only
        with http_request_response(self.address, True) as (
            me,
            receive,
            send,
            _,
            _,
            pull,
            push,
            confirm,
        ):
            TaskIdentity._node_id = me
            while not self.over.wait(0.2):
                if (request := receive()) is None:
                    continue
                message = _inflated(*request, pull)
                confirm(message.metadata.run_id, message.metadata.message_id)
                context = Context(message.metadata.run_id, me, self.config, RecordDict(), {})
                attack = (
                    self.attacks[int(message.metadata.group_id)]
                    if message.metadata.group_id
                    else _whole
                )
                reply, tree, left_out = attack(message, context)
                reply.metadata.__dict__["_message_id"] = tree.object_id
                experiment, session = send(reply, tree, 0.1)
                for id, piece in get_all_nested_objects(reply).items():
                    if id in experiment - left_out:
                        push(message.metadata.run_id, session, id, piece.deflate())

    def stop(self) -> None:
        self.over.set()
        self.join(60)


def _inflated(envelope: Message, tree: ObjectTree, pull) -> Message:
    ids = [piece.object_id for piece in iterate_object_tree(tree)]
    contents = pull_objects(ids, lambda id: pull(envelope.metadata.run_id, id))
    message = inflate_object_from_contents(tree.object_id, contents)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _whole(message, context):
    reply = experiment_app()(message, context)
    return reply, get_object_tree(reply), set()


def half_sent(message, context):
    """A reply whose last piece never comes."""
    reply = Message(RecordDict({"report": ConfigRecord({"x": 1})}), reply_to=message)
    tree = get_object_tree(reply)
    return reply, tree, {tree.children[0].object_id}


def long_list(message, context):
    """A reply that is said to have so many pieces that their list alone is too long."""
    reply = Message(RecordDict({}), reply_to=message)
    tree = get_object_tree(reply)
    tree.children.extend(ObjectTree(object_id=f"{n:064x}") for n in range(70_000))
    return reply, tree, set()


def all_report(message, context):
    """A reply of numbers in the report where tensors should be, of which Python would make many
    times as much.
    """
    reply = Message(RecordDict({"report": ConfigRecord({"x": [1] * 100_000})}), reply_to=message)
    return reply, get_object_tree(reply), set()


def oversized(message, context):
    """A reply of a hundred megabytes, where a few kilobytes were asked for."""
    content = bytes(range(256)) * 400_000
    report = ConfigRecord(
        {"clients": [1], "nonces": ["x"], "losses": [0.5], "samples": [1], "errors": [""]}
    )
    answers = ArrayRecord({"1": Array("uint8", (len(content),), PAYLOAD_STYPE, content)})
    reply = Message(RecordDict({"report": report, "answers": answers}), reply_to=message)
    return reply, get_object_tree(reply), set()
