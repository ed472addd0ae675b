"""Fetch a reply piece by piece, and never more bytes of it than were asked for.

Flower reads whatever a node sends. The functions here check the size of a reply before its
content. For that they need parts of Flower 1.41 that are not public.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedcover.errors import InvalidValue, printable
from fedcover.log import log

MAX_LISTING_BYTES = 4 * 2**20
"""The most bytes of the list of a reply's pieces, which holds no tensors."""
MAX_ENVELOPE_BYTES = 64 * 2**10
"""Bytes around a reply's tensors: its report, names and Flower's envelope."""
_PIECE_OVERHEAD = 1024
"""Bytes that Flower sends along with every piece."""
_TENSOR_PIECE = re.compile(rb"ArrayChunk  \d{1,12}\0")
"""The beginning of a piece that only holds a part of a tensor."""


@dataclass(frozen=True, slots=True)
class FailedReply:
    """Why a node gave no usable reply; the event is `late`, `lost` or `rejected`."""

    event: str
    why: str


class TooLarge(Exception):
    """A response is larger than what was asked for; nothing of it has been read."""


@dataclass
class PartialReply:
    """A reply that is being downloaded: its missing pieces, and the contents that have arrived.

    Large replies may have `max_record_bytes` more that are not tensors than small ones.
    """

    id: str
    missing: list[str]
    max_bytes: int
    max_record_bytes: int
    contents: dict[str, bytes] = field(default_factory=dict)
    bytes_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes_left = self.max_bytes + MAX_ENVELOPE_BYTES

    def add(self, content: bytes) -> None:
        """Add the last missing piece."""
        self.contents[self.missing.pop()] = content
        self.bytes_left -= len(content)


def list_pieces(
    client: Any, message_id: str, max_bytes: int, max_record_bytes: int
) -> PartialReply | None:
    """Return the reply that a node has begun to send, with its pieces but without content."""
    with limit_response_size(client, MAX_LISTING_BYTES):
        listing = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
    for envelope, tree in zip(listing.messages_list, listing.message_object_trees, strict=True):
        if envelope.metadata.reply_to_message_id == message_id:
            pieces = dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree))
            reply_id = envelope.metadata.message_id
            return PartialReply(reply_id, list(pieces), max_bytes, max_record_bytes)
    return None


def confirm_received(grid: Any, reply_id: str) -> None:
    """Let Flower forget a reply."""
    request = ConfirmMessageReceivedRequest(
        node=grid.node, run_id=grid.run.run_id, message_object_id=reply_id
    )
    grid._runtime_client.ConfirmMessageReceived(request)


def decode_reply(reply: PartialReply) -> Message | FailedReply:
    """Build the message of a complete reply; reject one that Flower cannot read."""
    try:
        return reply_or_failure(_inflate(reply))
    except TooLarge:
        raise
    except Exception as error:  # Flower may raise anything on bytes that a stranger wrote
        log.debug("unreadable reply", exc_info=True)
        return FailedReply("rejected", f"the reply cannot be read: {type(error).__name__}")


def reply_or_failure(reply: Message) -> Message | FailedReply:
    """Return a reply, or the failure that Flower reports in its place."""
    if not reply.has_error():
        return reply
    reason = printable(str(reply.error.reason)[:300])
    return FailedReply("lost", f"error {reply.error.code}: '{reason}'")


def _inflate(reply: PartialReply) -> Message:
    """Build the message from its pieces, if it takes no more memory than an honest one.

    Only tensors may be large: as Python objects, a record takes many times its bytes.
    And a few bytes could name the same tensor a million times.
    """
    _check_record_bytes(reply)
    _check_tensor_bytes(reply)
    message: Any = inflate_object_from_contents(reply.id, reply.contents)
    if not isinstance(message, Message):
        raise InvalidValue("the reply is no message")
    return message


def _check_record_bytes(reply: PartialReply) -> None:
    """Check that few enough bytes are not tensors."""
    max_record_bytes = MAX_ENVELOPE_BYTES + reply.max_record_bytes
    record_bytes = sum(map(len, _records(reply)))
    if record_bytes > max_record_bytes:
        raise TooLarge(f"more than {max_record_bytes} bytes that are not tensors")


def _check_tensor_bytes(reply: PartialReply) -> None:
    """Check the bytes of all arrays, which may share pieces."""
    array_bytes = 0
    for content in _records(reply):
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            indices = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            array_bytes += sum(len(reply.contents[pieces[index]]) for index in indices)
    max_bytes = reply.max_bytes + MAX_ENVELOPE_BYTES
    if array_bytes > max_bytes:
        raise TooLarge(
            f"{array_bytes} bytes when put together, where at most {max_bytes} were expected"
        )


def _records(reply: PartialReply) -> Iterator[bytes]:
    """Yield the pieces that are not parts of tensors."""
    for content in reply.contents.values():
        if not _TENSOR_PIECE.match(content):
            yield content


@contextmanager
def limit_response_size(client: Any, limit: int) -> Iterator[None]:
    """Refuse larger responses by their header, before the body is read."""
    this_thread = threading.get_ident()  # Flower sends heartbeats through the same client

    def check_size(response: httpx.Response) -> None:
        if threading.get_ident() != this_thread:
            return
        size = response.headers.get("content-length")
        if size is None or int(size) > limit + _PIECE_OVERHEAD:
            response.close()
            raise TooLarge(f"{size or 'unknown'} bytes where at most {limit} were left")

    hooks = client._client.event_hooks
    response_hooks = hooks["response"]
    client._client.event_hooks = {**hooks, "response": [*response_hooks, check_size]}
    try:
        yield
    finally:
        client._client.event_hooks = {**hooks, "response": response_hooks}
