"""Flower's grid for an app of one's own, which takes in no more of a reply than was asked for."""

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
    """A grid whose replies to our orders are fetched as those of an experiment: by size first, and in turns."""

    grid: Grid
    max_bytes: Mapping[int, int]
    silent: set[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send each node its message; a node without a usable reply is told of by an error."""
        sent = {message.metadata.dst_node_id: message for message in messages}
        if any(TASK not in message.content.config_records for message in sent.values()):
            return self.grid.send_and_receive(
                sent.values(), timeout=timeout
            )  # of an app of one's own
        replies = Transport(self.grid).send_and_wait(
            sent, timeout=timeout or DAY, max_bytes=self.max_bytes
        )
        failed = {node for node, reply in replies.items() if isinstance(reply, FailedReply)}
        self.silent.update(failed)
        self.silent.difference_update(replies.keys() - failed)
        return [
            Message(Error(0, f"{reply.event}: {reply.why}"), reply_to=sent[node])
            if isinstance(reply, FailedReply)
            else reply
            for node, reply in replies.items()
        ]
