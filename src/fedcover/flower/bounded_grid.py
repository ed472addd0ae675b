"""Flower's grid for a user's own app, with a limit on the size of replies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedcover.flower.messages import TASK
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.transport import Transport

DAY = 86_400.0


@dataclass(frozen=True)
class BoundedGrid:
    """A grid that fetches the replies to our requests as `Transport` does.

    Attributes:
        grid: Flower's grid.
        max_bytes: The most bytes of tensors in each node's reply.
        unresponsive_nodes: The nodes that did not answer last time.
    """

    grid: Grid
    max_bytes: Mapping[int, int]
    unresponsive_nodes: set[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send each node its message; a node without a usable reply is reported as an error."""
        requests = {message.metadata.dst_node_id: message for message in messages}
        if any(TASK not in request.content.config_records for request in requests.values()):
            # messages of the user's own
            return self.grid.send_and_receive(requests.values(), timeout=timeout)
        replies = Transport(self.grid).send_and_wait(
            requests, timeout=timeout or DAY, max_bytes=self.max_bytes
        )
        received = []
        for node, reply in replies.items():
            if isinstance(reply, FailedReply):
                self.unresponsive_nodes.add(node)
                error = Error(0, f"{reply.event}: {reply.why}")
                received.append(Message(error, reply_to=requests[node]))
            else:
                self.unresponsive_nodes.discard(node)
                received.append(reply)
        return received
