"""Let a SuperNode with a registered key reconnect at once after it was killed.

Flower takes it for the node that was killed, and rejects it until that one has been silent for a
minute. So a node keeps a file with its node id, and touches it with every heartbeat.
If it is rejected, and the file was touched within that minute, it deactivates the killed node.

A second node with the same key is still rejected. On the same machine, the first one keeps the
file locked. On another machine, the SuperLink accepts none within a minute of a heartbeat from
here, unless the node here has ended regularly, which empties the file.
"""

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from fedcover.flower.private_api import (
    MAX_SILENCE,
    NodeConnection,
    deactivate_request,
    flower_home,
    superlink_url,
)
from fedcover.log import log


class NodeFile:
    """The locked file with a node's id; its time of change is that of the last heartbeat."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        # the lock lasts until this process ends, even if it is killed
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read_recent(self) -> int | None:
        """Return the id of the node that was alive within the last minute."""
        if time.time() - os.fstat(self._file.fileno()).st_mtime > MAX_SILENCE:
            return None
        self._file.seek(0)
        content = self._file.read().strip()
        return int(content) if content.isdecimal() else None

    def write(self, node: int | None) -> None:
        """Write the id of a node that is alive, or nothing for one that has ended regularly."""
        self._file.truncate(0)
        self._file.write("" if node is None else f"{node}\n")
        self._file.flush()

    def touch(self) -> None:
        """Record that the node is alive."""
        os.utime(self._file.fileno())


class ReconnectingClient(NodeConnection):
    """A SuperNode's connection to its SuperLink that can replace a node that was killed."""

    has_own_key = True
    node_file: NodeFile | None = None

    def RegisterNode(self, request: Any) -> Any:  # noqa: N802
        """Register a key that was made for this process alone; such a node is always new."""
        self.has_own_key = False
        return super().RegisterNode(request)

    def ActivateNode(self, request: Any) -> Any:  # noqa: N802
        """Connect, if necessary after deactivating the node that was killed."""
        if self.node_file is None and self.has_own_key:
            self.node_file = self._open_node_file(request.public_key)
        try:
            response = super().ActivateNode(request)
        except httpx.HTTPStatusError:
            killed_node = self.node_file.read_recent() if self.node_file else None
            if killed_node is None:
                raise
            with suppress(httpx.HTTPStatusError):
                super().DeactivateNode(deactivate_request(killed_node))
            response = super().ActivateNode(request)
        if self.node_file:
            self.node_file.write(response.node_id)
        return response

    def DeactivateNode(self, request: Any) -> Any:  # noqa: N802
        """Disconnect regularly."""
        if self.node_file:
            self.node_file.write(None)
        return super().DeactivateNode(request)

    def SendNodeHeartbeat(self, request: Any) -> Any:  # noqa: N802
        """Send a heartbeat, and record it."""
        response = super().SendNodeHeartbeat(request)
        if self.node_file:
            self.node_file.touch()
        return response

    def _open_node_file(self, public_key: bytes) -> NodeFile | None:
        """Open the file; None if another node holds it, or it cannot be written."""
        name = hashlib.sha256(superlink_url(self).encode() + public_key).hexdigest()[:16]
        try:
            flower_home().mkdir(parents=True, exist_ok=True)
            return NodeFile(flower_home() / f"fedcover-node-{name}.txt")
        except OSError as error:
            log.debug("no file for the node's id: %s", error)
            return None
