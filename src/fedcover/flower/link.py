"""Ask nodes and wait no longer than a deadline; never take in more bytes of a reply than were asked for.

Flower's own `send_and_receive` sleeps three seconds at a time and reads whatever comes. What follows looks at a reply's
size before its content, for which it needs parts of Flower 1.41 that are not public; all of that is in this file.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from fedcover.errors import InvalidValue
from fedcover.flower.messages import QUERY
from fedcover.flower.places import Introduction

log = logging.getLogger("fedcover")
LISTING = 4 * 2**20
"""Most bytes of a list of replies, which holds no tensors."""
AROUND = 64 * 2**10
"""Bytes around the tensors of a reply: its report, its names and Flower's envelope."""
GRACE = 10.0
"""Seconds that Flower keeps a message beyond our deadline, so that it is ours that ends a round and says `late`."""
POLL, LOOK_AROUND = 0.25, 3.0
"""Seconds between two looks for replies, and between two looks for who is still there."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a node gave no usable reply: `late`, `lost` or `rejected`, and what is known of it."""

    event: str
    why: str


class TooLarge(Exception):
    """A response that is larger than what was asked for; nothing of it has been read."""


class Link:
    """The nodes of a federation, as the server sees them."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._inner: Any = grid  # for what is not public

    def present(self) -> set[int]:
        """The nodes that are there, as far as Flower knows; it notices a death after up to a minute."""
        return set(self._grid.get_node_ids())

    def introductions(self, nodes: Sequence[int], *, patience: float) -> dict[int, Introduction | Failed]:
        """Ask nodes to introduce themselves."""
        messages = {
            node: Message(
                RecordDict({"hello": ConfigRecord()}), dst_node_id=node, message_type=QUERY, ttl=patience + GRACE
            )
            for node in nodes
        }
        replies = self.exchange(messages, patience=patience, allowed=dict.fromkeys(nodes, 0))
        return {
            node: reply if isinstance(reply, Failed) else _introduced(node, reply) for node, reply in replies.items()
        }

    def exchange(
        self, messages: Mapping[int, Message], *, patience: float, allowed: Mapping[int, int]
    ) -> dict[int, Message | Failed]:
        """Send each node its message; whoever has not answered in time, or has gone, is marked as failed.

        `allowed` says how many bytes of tensors may come back from each node.
        """
        end = time.monotonic() + patience
        waiting: dict[str, int] = {}
        found: dict[int, Message | Failed] = {}
        for node, message in messages.items():  # one by one: together they may be too much for one request
            taken = [id for id in self._grid.push_messages([message]) if id]
            if taken:
                waiting[taken[0]] = node
            else:
                found[node] = Failed("lost", "the SuperLink did not take the message: the node has gone")
        look_around = time.monotonic() + LOOK_AROUND
        while waiting and time.monotonic() < end:
            for asked, reply in self._replies(waiting, allowed, end):
                found[waiting.pop(asked)] = reply
            if waiting and time.monotonic() > look_around:
                here, look_around = self.present(), time.monotonic() + LOOK_AROUND
                for asked in [asked for asked, node in waiting.items() if node not in here]:
                    found[waiting.pop(asked)] = Failed("lost", "the node has gone")
            if waiting:
                time.sleep(POLL)
        return found | {node: Failed("late", f"no answer in {patience:g} s") for node in waiting.values()}

    def _replies(
        self, waiting: Mapping[str, int], allowed: Mapping[int, int], end: float
    ) -> Iterator[tuple[str, Message | Failed]]:
        """The replies that have come, each with the id of the message that it answers."""
        if not hasattr(self._inner, "_runtime_client"):  # Flower's simulation, where all is one process
            for message in self._grid.pull_messages(list(waiting)):
                yield message.metadata.reply_to_message_id, _usable(message)
            return
        for asked, envelope, tree in self._listed(list(waiting)):
            if asked not in waiting:
                continue
            if envelope is None:
                yield asked, Failed("rejected", "too large: the list of its pieces alone")
                continue
            try:
                limit = allowed[waiting[asked]] + AROUND
                reply = self._fetched(envelope.metadata.message_id, tree, limit, end)
            except TooLarge as error:
                yield asked, Failed("rejected", f"too large: {error}")
            except ObjectPullError as error:
                yield asked, Failed("late", f"its reply did not arrive as a whole: {error}")
            except Exception as error:  # Flower reads what a stranger wrote: whatever it stumbles over is refused
                log.debug("unreadable reply", exc_info=True)
                yield asked, Failed("rejected", f"the reply cannot be read: {type(error).__name__}")
            else:
                yield asked, _usable(reply)
            self._confirm(envelope.metadata.message_id)  # Flower may forget it now

    def _listed(self, ids: list[str]) -> Iterator[tuple[str, Any, Any]]:
        """The replies to messages: which it answers, its envelope and the tree of its pieces, no content yet."""
        client = self._inner._runtime_client
        try:
            with _at_most(client, LISTING):
                listed = client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        except TooLarge:
            if len(ids) == 1:
                yield ids[0], None, None
            else:  # one node must not hide the answers of the others
                for id in ids:
                    yield from self._listed([id])
            return
        for envelope, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
            yield envelope.metadata.reply_to_message_id, envelope, tree

    def _fetched(self, id: str, tree: Any, limit: int, end: float) -> Message:
        """One reply, piece by piece, as long as its pieces together stay within the limit."""
        client, grid = self._inner._runtime_client, self._inner
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)
        contents: dict[str, bytes] = {}
        left = limit
        for piece in iterate_object_tree(tree):
            if piece.object_id in contents:
                continue
            with _at_most(client, left):
                contents[piece.object_id] = _patiently(pull, piece.object_id, end)
            left -= len(contents[piece.object_id])
        _refuse_repeats(contents, limit)
        message: Any = inflate_object_from_contents(id, contents)
        if not isinstance(message, Message):
            raise InvalidValue("the reply is no message")
        return message

    def _confirm(self, id: str) -> None:
        grid = self._inner
        request = ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=id)
        grid._runtime_client.ConfirmMessageReceived(request)


def _patiently(pull: Any, id: str, end: float) -> bytes:
    """A piece of a reply, which its node may still be sending."""
    while True:
        try:
            return bytes(pull(id))
        except ObjectUnavailableError:
            if time.monotonic() > end:
                raise ObjectPullError(id, "it is not complete at the deadline") from None
            time.sleep(POLL)


def _refuse_repeats(contents: Mapping[str, bytes], limit: int) -> None:
    """A few bytes can name the same piece a million times: count what arrays would grow to before they do."""
    grown = 0
    for content in contents.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            grown += sum(len(contents[pieces[place]]) for place in named)
    if grown > limit:
        raise TooLarge(f"{grown} bytes when put together, where at most {limit} were asked for")


@contextmanager
def _at_most(client: Any, limit: int) -> Iterator[None]:
    """Refuse any response of more bytes than this, by its header, before its body is read."""

    def look(response: httpx.Response) -> None:
        size = response.headers.get("content-length")
        if size is None or int(size) > limit + 1024:  # an envelope of its own comes with every piece
            response.close()
            raise TooLarge(f"{size or 'unknown'} bytes where at most {limit} were left")

    hooks = client._client.event_hooks
    before = hooks["response"]
    client._client.event_hooks = {**hooks, "response": [*before, look]}
    try:
        yield
    finally:
        client._client.event_hooks = {**hooks, "response": before}


def _usable(reply: Message) -> Message | Failed:
    if not reply.has_error():
        return reply
    return Failed("lost", f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}")


def _introduced(node: int, reply: Message) -> Introduction | Failed:
    try:
        said: Any = reply.content.config_records["hello"]
        if said["error"]:
            return Failed("rejected", f"{said['error'][:300]!a}")
        place, places, capacity, version = (said[key] for key in ("place", "places", "capacity", "version"))
        wrong = type(place) is not int or type(places) is not int or not 0 <= place < places
        if wrong or type(capacity) is not float or not 0 <= capacity <= 1 or type(version) is not str:
            return Failed("rejected", "its introduction makes no sense")
    except (KeyError, TypeError, ValueError):
        return Failed("rejected", "its introduction lacks what one must have")
    return Introduction(node, place, places, capacity or None, version)
