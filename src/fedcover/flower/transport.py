"""Send messages to nodes, and wait for their replies until a deadline.

Flower's own `send_and_receive` sleeps three seconds at a time and has no limit on replies.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcover.flower.input_scales import InputScale
from fedcover.flower.messages import CLIENT_INFO, CLIENT_INFO_ARRAYS, QUERY
from fedcover.flower.node_data import parse_client_info
from fedcover.flower.nodes import NO_PARTITION, NodeInfo
from fedcover.flower.private_api import PieceUnavailable, PullFailed, SuperLink, superlink_of
from fedcover.flower.reply_download import (
    FailedReply,
    PartialReply,
    TooLarge,
    decode_reply,
    list_pieces,
    pull_piece,
    reply_or_failure,
)

MAX_CLIENT_INFO_BYTES = 16 * 2**20
"""The most bytes with which a node may describe its clients' rows."""
GRACE = 10.0
"""Seconds that Flower keeps a message beyond our deadline, so that ours ends the round."""
REJECTION_TTL = 60.0
"""Seconds in which a node can learn why it was rejected."""
POLL = 0.25
"""Seconds between two looks for replies."""
DOWNLOAD_TURN = 1.0
"""Seconds for one reply before it is the turn of the next."""
CONNECTION_CHECK = 3.0
"""Seconds between two checks of which nodes are still connected."""
PROBE = 20.0
"""Seconds after which a node that has not answered is asked whether it still works."""
BYTES_PER_RECORD_BYTE = 16
"""A large reply may have one byte that is not a tensor's for so many bytes of its limit.

The report grows with the clients of a node, but Python needs much more memory for it than for
tensors.
"""
RESTARTED = "the node was restarted and has lost its task"


@dataclass
class _Probes:
    """The queries that find out whether nodes still work on their messages."""

    next_time: float
    deadline: float
    message_ids: dict[int, str] = field(default_factory=dict)
    partial_replies: dict[str, PartialReply] = field(default_factory=dict)


class Transport:
    """The server's connection to its nodes."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._superlink = superlink_of(grid)

    def connected_nodes(self) -> set[int]:
        """Return the nodes that Flower takes for connected; it notices a loss within a minute."""
        return set(self._grid.get_node_ids())

    def notify_rejected(self, node: int, why: str) -> None:
        """Let a node log why it was rejected, without waiting for it."""
        content = RecordDict({"refused": ConfigRecord({"why": why})})
        message = Message(content, dst_node_id=node, message_type=QUERY, ttl=REJECTION_TTL)
        self._grid.push_messages([message])

    def query_node_info(
        self, nodes: Sequence[int], *, timeout: float, client_info: bool
    ) -> dict[int, NodeInfo | FailedReply]:
        """Ask nodes for their configuration, and for their clients' rows if these are on nodes."""
        queries = {node: _query(node, timeout) for node in nodes}
        max_bytes = dict.fromkeys(nodes, MAX_CLIENT_INFO_BYTES if client_info else 0)
        replies = self.send_and_wait(queries, timeout=timeout, max_bytes=max_bytes)
        return {
            node: reply if isinstance(reply, FailedReply) else _parse_node_info(node, reply)
            for node, reply in replies.items()
        }

    def send_and_wait(
        self, messages: Mapping[int, Message], *, timeout: float, max_bytes: Mapping[int, int]
    ) -> dict[int, Message | FailedReply]:
        """Send each node its message, and wait for the replies.

        Args:
            messages: The message for each node.
            timeout: The seconds that nodes have to answer.
            max_bytes: The most bytes of tensors in each node's reply.

        Returns:
            For each node its reply, or why there is none.
        """
        deadline = time.monotonic() + timeout
        pending, replies = self._send(messages)
        partial_replies: dict[str, PartialReply] = {}
        next_check = time.monotonic() + CONNECTION_CHECK
        probes = _Probes(time.monotonic() + PROBE, deadline)
        while pending and time.monotonic() < deadline:
            idle_nodes = self._find_idle_nodes(probes, pending.values())
            for message_id, node in list(pending.items()):
                is_query = messages[node].metadata.message_type == QUERY
                max_record_bytes = 0 if is_query else max_bytes[node] // BYTES_PER_RECORD_BYTE
                reply = self._receive_reply(
                    message_id, partial_replies, max_bytes[node], deadline, max_record_bytes
                )
                if reply is None and node in idle_nodes and message_id not in partial_replies:
                    reply = FailedReply("lost", RESTARTED)
                if reply is not None:
                    replies[pending.pop(message_id)] = reply
            if pending and time.monotonic() > next_check:
                connected = self.connected_nodes()
                next_check = time.monotonic() + CONNECTION_CHECK
                for message_id, node in list(pending.items()):
                    if node not in connected:
                        replies[pending.pop(message_id)] = FailedReply("lost", "the node has gone")
            if pending:
                time.sleep(POLL)
        for message_id, node in pending.items():
            detail = ": a part of its reply has arrived" if message_id in partial_replies else ""
            replies[node] = FailedReply("late", f"no answer in {timeout:g} s{detail}")
        return replies

    def _send(
        self, messages: Mapping[int, Message]
    ) -> tuple[dict[str, int], dict[int, Message | FailedReply]]:
        """Send messages; return the node of each message id, and failures by node."""
        pending: dict[str, int] = {}
        failures: dict[int, Message | FailedReply] = {}
        for node, message in messages.items():  # together they may be too large for one request
            message_ids = [id for id in self._grid.push_messages([message]) if id]
            if message_ids:
                pending[message_ids[0]] = node
            else:
                failures[node] = FailedReply(
                    "lost", "the SuperLink did not accept the message: the node has gone"
                )
        return pending, failures

    def _find_idle_nodes(self, probes: _Probes, nodes: Collection[int]) -> set[int]:
        """Return the nodes that do not work on their message.

        A SuperNode handles messages one after another. So a node that answers a later query has
        lost the earlier message: it was killed, and has reconnected with its key.
        """
        if self._superlink is None:  # the simulation handles messages in any order
            return set()
        if time.monotonic() > probes.next_time:
            probes.next_time = time.monotonic() + PROBE
            seconds_left = max(1.0, probes.deadline - time.monotonic())
            for node in set(nodes) - probes.message_ids.keys():
                for message_id in self._grid.push_messages([_query(node, seconds_left)]):
                    if message_id:
                        probes.message_ids[node] = message_id
        idle_nodes = set()
        for node, message_id in list(probes.message_ids.items()):
            reply = self._receive_reply(message_id, probes.partial_replies, 0, probes.deadline, 0)
            if reply is None:
                continue
            del probes.message_ids[node]
            if isinstance(reply, Message) or reply.event == "rejected":
                idle_nodes.add(node)
        return idle_nodes

    def _receive_reply(
        self,
        message_id: str,
        partial_replies: dict[str, PartialReply],
        max_bytes: int,
        deadline: float,
        max_record_bytes: int,
    ) -> Message | FailedReply | None:
        """Return the reply to a message if it is complete; keep what has arrived of it so far.

        Replies are listed one by one: Flower lists each reply only once, so refusing a list that
        one node has made too long would lose the replies of the others. And they are fetched in
        turns: a node that sends slowly, or only a half, must not delay the rest.
        """
        if self._superlink is None:  # the simulation is one process
            replies = self._grid.pull_messages([message_id])
            return next((reply_or_failure(reply) for reply in replies), None)
        reply: Message | FailedReply
        try:
            if message_id not in partial_replies:
                partial = list_pieces(self._superlink, message_id, max_bytes, max_record_bytes)
                if partial is None:
                    return None
                partial_replies[message_id] = partial
            turn_end = min(deadline, time.monotonic() + DOWNLOAD_TURN)
            if not _download(self._superlink, partial_replies[message_id], turn_end):
                return None
            reply = decode_reply(partial_replies[message_id])
        except TooLarge as error:
            reply = FailedReply("rejected", f"too large: {error}")
        except PullFailed:
            reply = FailedReply("late", "its reply did not arrive as a whole")
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            why = f"the SuperLink does not deliver its reply: HTTP {status}"
            reply = FailedReply("lost", why)
        if message_id in partial_replies:
            self._superlink.confirm_received(partial_replies.pop(message_id).id)
        return reply


def _download(superlink: SuperLink, reply: PartialReply, turn_end: float) -> bool:
    """Fetch pieces until the reply is complete; return False if that has to wait."""
    while reply.missing:
        if time.monotonic() > turn_end:
            return False
        try:
            pull_piece(superlink, reply)
        except PieceUnavailable:
            return False
    return True


def _query(node: int, timeout: float) -> Message:
    """Return the message that asks a node who it is."""
    content = RecordDict({"hello": ConfigRecord()})
    return Message(content, dst_node_id=node, message_type=QUERY, ttl=timeout + GRACE)


def _parse_node_info(node: int, reply: Message) -> NodeInfo | FailedReply:
    """Read what a node reports about itself."""
    try:
        hello: Any = reply.content.config_records["hello"]
        if hello["error"]:
            return FailedReply("rejected", f"its node says: {str(hello['error'])[:300]!a}")
        partition_id, num_partitions = hello["place"], hello["places"]
        capacity, version = hello["capacity"], hello["version"]
        message_format = hello.get("format", 1)
        if (
            not _is_partition(partition_id, num_partitions)
            or type(capacity) is not float
            or not 0 <= capacity <= 1
            or type(version) is not str
            or type(message_format) is not int
        ):
            return FailedReply("rejected", "its answer to the query is invalid")
        arrays: Any = reply.content.array_records.get(CLIENT_INFO, {})
        description: dict[str, Any] = {}
        if arrays:
            description = {name: arrays[name].data for name in CLIENT_INFO_ARRAYS}
            description["shape"] = hello["shape"]
        client_info = parse_client_info(description)
        scale = InputScale.read(hello.get("scale"))
    except (KeyError, TypeError, ValueError):
        return FailedReply("rejected", "its answer to the query lacks a required field")
    return NodeInfo(
        node,
        partition_id,
        num_partitions,
        capacity or None,
        version,
        client_info,
        scale,
        message_format,
    )


def _is_partition(partition_id: object, num_partitions: object) -> bool:
    if type(partition_id) is not int or type(num_partitions) is not int:
        return False
    if (partition_id, num_partitions) == NO_PARTITION:
        return True
    return 0 <= partition_id < num_partitions
