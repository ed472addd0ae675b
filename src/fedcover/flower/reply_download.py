"""Fetch a reply piece by piece, and never more bytes of it than were asked for.

Flower reads whatever a node sends. The functions here check the size of a reply before its content.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from flwr.app import Message

from fedcover.errors import InvalidValue, printable
from fedcover.flower.private_api import (
    SuperLink,
    build_object,
    is_tensor_piece,
    piece_kind,
    tensor_pieces,
)
from fedcover.log import log

MAX_LISTING_BYTES = 4 * 2**20
"""The most bytes of the list of a reply's pieces, which holds no tensors."""
MAX_ENVELOPE_BYTES = 64 * 2**10
"""Bytes around a reply's tensors: its report, names and Flower's envelope."""
_PIECE_OVERHEAD = 1024
"""Bytes that Flower sends along with every piece."""


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
    superlink: SuperLink, message_id: str, max_bytes: int, max_record_bytes: int
) -> PartialReply | None:
    """Return the reply that a node has begun to send, with its pieces but without content."""
    with limit_response_size(superlink, MAX_LISTING_BYTES):
        listing = superlink.list_pieces(message_id)
    if listing is None:
        return None
    reply_id, pieces = listing
    return PartialReply(reply_id, pieces, max_bytes, max_record_bytes)


def pull_piece(superlink: SuperLink, reply: PartialReply) -> None:
    """Fetch the last missing piece of a reply."""
    with limit_response_size(superlink, reply.bytes_left):
        reply.add(superlink.pull_piece(reply.missing[-1]))


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
    message = build_object(reply.id, reply.contents)
    if not isinstance(message, Message):
        raise InvalidValue("the reply is not a message")
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
        kind, _ = piece_kind(content)
        if kind == "Array":
            array_bytes += sum(len(reply.contents[piece]) for piece in tensor_pieces(content))
    max_bytes = reply.max_bytes + MAX_ENVELOPE_BYTES
    if array_bytes > max_bytes:
        raise TooLarge(
            f"{array_bytes} bytes when put together, where at most {max_bytes} were expected"
        )


def _records(reply: PartialReply) -> Iterator[bytes]:
    """Yield the pieces that are not parts of tensors."""
    for content in reply.contents.values():
        if not is_tensor_piece(content):
            yield content


@contextmanager
def limit_response_size(superlink: SuperLink, limit: int) -> Iterator[None]:
    """Refuse larger responses by their header, before the body is read."""
    this_thread = threading.get_ident()  # Flower sends heartbeats through the same client

    def check_size(response: httpx.Response) -> None:
        if threading.get_ident() != this_thread:
            return
        size = response.headers.get("content-length")
        if size is None or int(size) > limit + _PIECE_OVERHEAD:
            response.close()
            raise TooLarge(f"{size or 'unknown'} bytes where at most {limit} were left")

    with superlink.check_responses(check_size):
        yield
