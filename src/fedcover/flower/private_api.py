"""All that fedcover uses of Flower beyond its public modules.

Such parts may change with every version of Flower. So with a version that was not tested, this
module cannot be imported, and what needs it ends with a message. `client_app` does not need it.

- `SuperLink`, and the functions that read pieces: refuse a reply by its size, before it is read.
  Without them any node could fill the server's memory, so without them there is no run.
- `SuperLinkAddress`: report that a server was killed. Without it Flower notices within a minute.
- `NodeConnection` and what belongs to it: let a node reconnect at once after a kill. Without it
  Flower refuses the node for 40 to 45 s; `flower/supernode.py` says so, and goes on.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from fedcover.errors import InvalidValue
from fedcover.flower import unsupported_version

if reason := unsupported_version():  # asked first: another version may lack the modules below
    raise InvalidValue(reason)

from flwr.app import Array
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE, SubStatus
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.log_pb2 import PushLogsRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushTaskOutputRequest
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
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.fleet_http_client import FleetHttpClient

# ── the server's connection ─────────────────────────────────────────────────────────────────────

PullFailed = ObjectPullError
"""A piece of a reply did not arrive."""
PieceUnavailable = ObjectUnavailableError
"""The node has not sent this piece yet."""


@dataclass(frozen=True)
class SuperLink:
    """The SuperLink that a server's grid is connected to."""

    grid: Any

    @property
    def _client(self) -> Any:
        return self.grid._runtime_client

    def list_pieces(self, message_id: str) -> tuple[str, list[str]] | None:
        """Return the id of the reply to a message, and those of its pieces; None if there is none.

        Flower lists each reply only once.
        """
        listing = self._client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        for envelope, tree in zip(listing.messages_list, listing.message_object_trees, strict=True):
            if envelope.metadata.reply_to_message_id == message_id:
                pieces = dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree))
                return envelope.metadata.message_id, list(pieces)
        return None

    def pull_piece(self, piece: str) -> bytes:
        """Fetch a piece of a reply.

        Raises:
            PieceUnavailable: If the node has not sent it yet.
            PullFailed: If it does not arrive.
        """
        pull = make_pull_object_fn_protobuf(
            self._client.PullObject, self.grid.node, self.grid.run.run_id
        )
        return bytes(pull(piece))

    def confirm_received(self, reply_id: str) -> None:
        """Let Flower forget a reply."""
        request = ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=reply_id
        )
        self._client.ConfirmMessageReceived(request)

    @contextmanager
    def check_responses(self, check: Callable[[httpx.Response], None]) -> Iterator[None]:
        """Within the block, call `check` with every response before its body is read."""
        http_client = self._client._client
        hooks = http_client.event_hooks
        http_client.event_hooks = {**hooks, "response": [*hooks["response"], check]}
        try:
            yield
        finally:
            http_client.event_hooks = hooks


def superlink_of(grid: Grid) -> SuperLink | None:
    """Return the SuperLink of a grid; None in Flower's simulation, which has none."""
    return SuperLink(grid) if hasattr(grid, "_runtime_client") else None


@dataclass(frozen=True)
class SuperLinkAddress:
    """What another process needs in order to speak for the server of a run."""

    address: str
    insecure: bool
    token: str
    run: int
    certificates: str | None

    @classmethod
    def of(cls, superlink: SuperLink) -> "SuperLinkAddress":
        """Return the address that a server uses."""
        grid = superlink.grid
        certificates = None if grid._cert is None else grid._cert.decode()
        return cls(grid._addr, grid._insecure, grid._token, grid.run.run_id, certificates)

    def mark_failed(self, reason: str, log_lines: list[str]) -> None:
        """Mark the run as failed, and add lines to its log; raise httpx.HTTPError if that fails."""
        client = RuntimeHttpClient.from_server_address(
            self.address,
            self.insecure,
            None if self.certificates is None else self.certificates.encode(),
            [
                RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
                RuntimeTokenHttpInterceptor(token=self.token),
            ],
        )
        node = Node(node_id=0)
        outcome = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason)
        try:
            client.PushLogs(PushLogsRequest(node=node, run_id=self.run, logs=log_lines))
            client.PushTaskOutput(outcome)
        finally:
            client.close()


# ── the pieces of a message ─────────────────────────────────────────────────────────────────────


_TENSOR_PIECE = re.compile(rb"ArrayChunk  \d{1,12}\0")
"""The beginning of a piece that only holds a part of a tensor."""


def is_tensor_piece(content: bytes) -> bool:
    """Return whether a piece only holds a part of a tensor."""
    return _TENSOR_PIECE.match(content) is not None


def piece_kind(content: bytes) -> tuple[str, list[str]]:
    """Return the type of the object in a piece, and the pieces that it refers to."""
    kind, pieces, _ = get_object_head_values_from_object_content(content)
    return kind, pieces


def tensor_pieces(content: bytes) -> list[str]:
    """Return the pieces with the bytes of an array, each as often as the array holds it."""
    _, pieces = piece_kind(content)
    indices = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return [pieces[index] for index in indices]


def build_object(object_id: str, contents: dict[str, bytes]) -> Any:
    """Build an object of Flower's, such as a message, from the contents of its pieces."""
    return inflate_object_from_contents(object_id, contents)


# ── a node's connection ─────────────────────────────────────────────────────────────────────────

NodeConnection: TypeAlias = FleetHttpClient
"""A SuperNode's connection to its SuperLink."""
MAX_SILENCE: float = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL
"""Seconds without a heartbeat after which Flower takes a node for disconnected."""


def deactivate_request(node: int) -> Any:
    """Return the request that reports that a node has gone."""
    return DeactivateNodeRequest(node_id=node)


def superlink_url(connection: NodeConnection) -> str:
    """Return the address that a node is connected to."""
    return str(connection._base_url)


def flower_home() -> Path:
    """Return the folder in which Flower keeps its files."""
    return Path(get_flwr_home())


def replace_node_connection(connection: type[NodeConnection]) -> None:
    """Let a SuperNode of this process use another class for its connection."""
    from flwr.supernode import fleet_http_connection  # large, and the server does not need it

    vars(fleet_http_connection)["FleetHttpClient"] = connection
