"""Ask nodes and wait no longer than a deadline; never take in more bytes of a reply than were asked for.

Flower's own `send_and_receive` sleeps three seconds at a time and reads whatever comes. What follows looks at a reply's
size before its content, for which it needs parts of Flower 1.41 that are not public; all of that is in this file.
"""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Array, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)

from fedcover.errors import InvalidValue, printable
from fedcover.flower.input_scales import InputScale
from fedcover.flower.messages import DATA_INFO, DATA_INFO_ARRAYS, QUERY
from fedcover.flower.node_data import parse_data_info
from fedcover.flower.nodes import NO_PARTITION, NodeInfo
from fedcover.log import log

LISTING = 4 * 2**20
"""Most bytes of the list of a reply's pieces, which holds no tensors."""
MAX_ENVELOPE_BYTES = 64 * 2**10
"""Bytes around the tensors of a reply: its report, its names and Flower's envelope; large answers may have more."""
MAX_DATA_INFO_BYTES = 16 * 2**20
"""Bytes of what an introduction tells of clients' rows."""
GRACE = 10.0
"""Seconds that Flower keeps a message beyond our deadline, so that it is ours that ends a round and says `late`."""
HEARING = 60.0
"""Seconds for which a node can hear why it was refused."""
POLL, TURN, LOOK_AROUND = 0.25, 1.0, 3.0
"""Seconds between two looks for replies, for one reply before it is the next one's turn, and between two looks for who
is still there."""
PROBE = 20.0
"""Seconds after which a node that has not answered is asked whether it still works on its task."""
RESTARTED = "the node has been started again, and knows nothing of its task"
_TENSOR = re.compile(rb"ArrayChunk  \d{1,12}\0")
"""How Flower begins a piece that is nothing but a part of a tensor."""


@dataclass(frozen=True, slots=True)
class FailedReply:
    """Why a node gave no usable reply: `late`, `lost` or `rejected`, and what is known of it."""

    event: str
    why: str


@dataclass
class _Probes:
    """Who has been asked whether it works, when the others are, and until when an answer is of use."""

    due: float
    end: float
    out: dict[int, str] = field(default_factory=dict)
    arriving: dict[str, "_PartialReply"] = field(default_factory=dict)


class TooLarge(Exception):
    """A response that is larger than what was asked for; nothing of it has been read."""


class Transport:
    """The nodes of a federation, as the server sees them."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._inner: Any = grid  # for what is not public

    def connected_nodes(self) -> set[int]:
        """The nodes that are there, as far as Flower knows; it notices a death after up to a minute."""
        return set(self._grid.get_node_ids())

    def notify_rejected(self, node: int, why: str) -> None:
        """Let a node say in its own log why it is not taken; whether it does is not waited for."""
        told = RecordDict({"refused": ConfigRecord({"why": why})})
        self._grid.push_messages([Message(told, dst_node_id=node, message_type=QUERY, ttl=HEARING)])

    def query_node_info(
        self, nodes: Sequence[int], *, timeout: float, rows: bool
    ) -> dict[int, NodeInfo | FailedReply]:
        """Ask nodes to introduce themselves, and to tell of their clients' rows where these are on nodes."""
        messages = {
            node: Message(
                RecordDict({"hello": ConfigRecord()}),
                dst_node_id=node,
                message_type=QUERY,
                ttl=timeout + GRACE,
            )
            for node in nodes
        }
        replies = self.send_and_wait(
            messages,
            timeout=timeout,
            max_bytes=dict.fromkeys(nodes, MAX_DATA_INFO_BYTES if rows else 0),
        )
        return {
            node: reply if isinstance(reply, FailedReply) else _parse_node_info(node, reply)
            for node, reply in replies.items()
        }

    def send_and_wait(
        self, messages: Mapping[int, Message], *, timeout: float, max_bytes: Mapping[int, int]
    ) -> dict[int, Message | FailedReply]:
        """Send each node its message; whoever has not answered in time, or has gone, is marked as failed.

        `max_bytes` says how many bytes of tensors may come back from each node.
        """
        end = time.monotonic() + timeout
        waiting: dict[str, int] = {}
        arriving: dict[str, _PartialReply] = {}
        found: dict[int, Message | FailedReply] = {}
        for (
            node,
            message,
        ) in messages.items():  # one by one: together they may be too much for one request
            taken = [id for id in self._grid.push_messages([message]) if id]
            if taken:
                waiting[taken[0]] = node
            else:
                found[node] = FailedReply(
                    "lost", "the SuperLink did not take the message: the node has gone"
                )
        look_around = time.monotonic() + LOOK_AROUND
        probes = _Probes(time.monotonic() + PROBE, end)
        while waiting and time.monotonic() < end:
            idle = self._idle(probes, waiting.values())
            for asked, node in list(waiting.items()):
                bare = messages[node].metadata.message_type == QUERY
                reply = self._reply(
                    asked, arriving, max_bytes[node], end, 0 if bare else max_bytes[node] // 16
                )
                if reply is None and node in idle and asked not in arriving:
                    reply = FailedReply("lost", RESTARTED)
                if reply is not None:
                    found[waiting.pop(asked)] = reply
            if waiting and time.monotonic() > look_around:
                here, look_around = self.connected_nodes(), time.monotonic() + LOOK_AROUND
                for asked in [asked for asked, node in waiting.items() if node not in here]:
                    found[waiting.pop(asked)] = FailedReply("lost", "the node has gone")
            if waiting:
                time.sleep(POLL)
        in_part = ": a part of its reply has come"
        late = {
            node: FailedReply(
                "late", f"no answer in {timeout:g} s{in_part if asked in arriving else ''}"
            )
            for asked, node in waiting.items()
        }
        return found | late

    def _idle(self, probes: "_Probes", nodes: Iterable[int]) -> set[int]:
        """The nodes that do not work on what they were sent.

        A SuperNode takes its messages one after another, and gives its answer to one before it takes the next. So who
        answers a later message has lost the earlier one: it was killed, and has come back under its key.
        """
        if not hasattr(
            self._inner, "_runtime_client"
        ):  # Flower's simulation takes messages as they come
            return set()
        if time.monotonic() > probes.due:
            probes.due = time.monotonic() + PROBE
            for node in set(nodes) - probes.out.keys():
                ask = Message(
                    RecordDict({"hello": ConfigRecord()}), dst_node_id=node, message_type=QUERY,
                    ttl=max(1.0, probes.end - time.monotonic()) + GRACE,
                )  # fmt: skip
                for taken in self._grid.push_messages([ask]):
                    if taken:
                        probes.out[node] = taken
        idle = set()
        for node, asked in list(probes.out.items()):
            reply = self._reply(asked, probes.arriving, 0, probes.end, 0)
            if reply is not None:
                del probes.out[node]
            if isinstance(reply, Message) or (
                isinstance(reply, FailedReply) and reply.event == "rejected"
            ):
                idle.add(node)
        return idle

    def _reply(
        self,
        asked: str,
        arriving: dict[str, "_PartialReply"],
        max_bytes: int,
        end: float,
        records: int,
    ) -> Message | FailedReply | None:
        """The reply to a message, if it is complete; what has come of it so far is kept in `arriving`.

        Asked for one by one: Flower tells of a reply only once, so a list that is refused for the length of one node's
        part would lose the others'. And in turns: a node that sends slowly, or only half, must not hold up the rest.
        """
        if not hasattr(
            self._inner, "_runtime_client"
        ):  # Flower's simulation, where all is one process
            return next(
                (_reply_or_failure(message) for message in self._grid.pull_messages([asked])), None
            )
        try:
            if asked not in arriving and (begun := self._poll(asked, max_bytes, records)):
                arriving[asked] = begun
            if asked not in arriving or not self._download(
                arriving[asked], min(end, time.monotonic() + TURN)
            ):
                return None
            reply = _decode(arriving[asked])
        except TooLarge as error:
            reply = FailedReply("rejected", f"too large: {error}")
        except ObjectPullError:
            reply = FailedReply("late", "its reply did not arrive as a whole")
        except httpx.HTTPStatusError as error:
            reply = FailedReply(
                "lost",
                f"the SuperLink does not hand out its reply: HTTP {error.response.status_code}",
            )
        if asked in arriving:
            self._confirm(arriving.pop(asked).id)  # Flower may forget it now
        return reply

    def _poll(self, asked: str, max_bytes: int, records: int) -> "_PartialReply | None":
        """The reply that a node has begun to send: the ids of its pieces, no content yet."""
        client = self._inner._runtime_client
        with _limit_response_size(client, LISTING):
            listed = client.PullMessages(PullAppMessagesRequest(message_ids=[asked]))
        for envelope, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
            if envelope.metadata.reply_to_message_id == asked:
                return _PartialReply(envelope.metadata.message_id, _ids(tree), max_bytes, records)
        return None

    def _download(self, arriving: "_PartialReply", end: float) -> bool:
        """Fetch pieces of a reply until it is complete, or a piece has not come yet, or it is the next one's turn."""
        client, grid = self._inner._runtime_client, self._inner
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)
        while arriving.missing:
            if time.monotonic() > end:
                return False
            try:
                with _limit_response_size(client, arriving.left):
                    arriving.take(bytes(pull(arriving.missing[-1])))
            except ObjectUnavailableError:
                return False
        return True

    def _confirm(self, id: str) -> None:
        grid = self._inner
        request = ConfirmMessageReceivedRequest(
            node=grid.node, run_id=grid.run.run_id, message_object_id=id
        )
        grid._runtime_client.ConfirmMessageReceived(request)


@dataclass
class _PartialReply:
    """A reply on its way: the pieces that are still missing, and the bytes of those that have come.

    `records` are the bytes, beside those around any reply, that need not be tensors.
    """

    id: str
    missing: list[str]
    max_bytes: int
    records: int
    contents: dict[str, bytes] = field(default_factory=dict)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.max_bytes + MAX_ENVELOPE_BYTES

    def take(self, content: bytes) -> None:
        """Keep the piece that was asked for."""
        self.contents[self.missing.pop()] = content
        self.left -= len(content)


def _ids(tree: Any) -> list[str]:
    """The pieces that a reply is made of, each once."""
    return list(dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree)))


def _decode(arrived: _PartialReply) -> Message | FailedReply:
    """What a reply says: Flower reads what a stranger wrote, so whatever it stumbles over is refused."""
    try:
        return _reply_or_failure(_inflate(arrived))
    except TooLarge:
        raise
    except Exception as error:
        log.debug("unreadable reply", exc_info=True)
        return FailedReply("rejected", f"the reply cannot be read: {type(error).__name__}")


def _inflate(arrived: _PartialReply) -> Message:
    """The message in the pieces of a reply, once it is known that it takes no more memory than an honest one.

    Only tensors may be large: Python makes of a record's few bytes many times as much. And a few bytes can name the
    same tensor a million times.
    """
    around = grown = 0
    for content in arrived.contents.values():
        if _TENSOR.match(content):
            continue
        around += len(content)
        if around > MAX_ENVELOPE_BYTES + arrived.records:
            raise TooLarge(
                f"more than {MAX_ENVELOPE_BYTES + arrived.records} bytes that are not tensors"
            )
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            grown += sum(len(arrived.contents[pieces[index]]) for index in named)
    if grown > arrived.max_bytes + MAX_ENVELOPE_BYTES:
        raise TooLarge(
            f"{grown} bytes when put together, where at most {arrived.max_bytes + MAX_ENVELOPE_BYTES} were asked for"
        )
    message: Any = inflate_object_from_contents(arrived.id, arrived.contents)
    if not isinstance(message, Message):
        raise InvalidValue("the reply is no message")
    return message


@contextmanager
def _limit_response_size(client: Any, limit: int) -> Iterator[None]:
    """Refuse any response of more bytes than this, by its header, before its body is read."""
    mine = threading.get_ident()  # Flower's own threads send signs of life through the same client

    def look(response: httpx.Response) -> None:
        if threading.get_ident() != mine:
            return
        size = response.headers.get("content-length")
        if (
            size is None or int(size) > limit + 1024
        ):  # an envelope of its own comes with every piece
            response.close()
            raise TooLarge(f"{size or 'unknown'} bytes where at most {limit} were left")

    hooks = client._client.event_hooks
    before = hooks["response"]
    client._client.event_hooks = {**hooks, "response": [*before, look]}
    try:
        yield
    finally:
        client._client.event_hooks = {**hooks, "response": before}


def _reply_or_failure(reply: Message) -> Message | FailedReply:
    if not reply.has_error():
        return reply
    return FailedReply(
        "lost", f"error {reply.error.code}: '{printable(str(reply.error.reason)[:300])}'"
    )


def _parse_node_info(node: int, reply: Message) -> NodeInfo | FailedReply:
    try:
        said: Any = reply.content.config_records["hello"]
        if said["error"]:
            return FailedReply("rejected", f"it says: {str(said['error'])[:300]!a}")
        partition_id, num_partitions, capacity, version = (
            said[key] for key in ("place", "places", "capacity", "version")
        )
        wrong = (
            type(partition_id) is not int
            or type(num_partitions) is not int
            or not (
                0 <= partition_id < num_partitions or (partition_id, num_partitions) == NO_PARTITION
            )
        )
        if (
            wrong
            or type(capacity) is not float
            or not 0 <= capacity <= 1
            or type(version) is not str
        ):
            return FailedReply("rejected", "its introduction makes no sense")
        rows: Any = reply.content.array_records.get(DATA_INFO, {})
        told = {name: rows[name].data for name in DATA_INFO_ARRAYS if rows}
        holdings, scale = (
            parse_data_info({**told, "shape": said["shape"]} if told else {}),
            InputScale.read(said.get("scale")),
        )
    except (KeyError, TypeError, ValueError):
        return FailedReply("rejected", "its introduction lacks what one must have")
    return NodeInfo(node, partition_id, num_partitions, capacity or None, version, holdings, scale)
