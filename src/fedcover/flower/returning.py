"""Let a SuperNode with a registered key in again at once after it was killed.

Flower takes it for the node that was killed, and refuses it until that one has been silent for a minute.
So a node keeps, in a file of its own, which number the SuperLink has given it and when it was last alive.
If it is refused, and the file says that it was here within that minute, it tells the SuperLink that the
killed one has gone. A second node with the same key is refused as ever: one that lives on this machine
holds the file locked, and the SuperLink lets in none on another machine within a minute of a sign of life
from here, unless the node here has ended in order, which empties the file.
"""

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedcover.log import log

SILENCE = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL
"""Seconds without a sign of life after which Flower takes a node for gone."""


class LastSign:
    """The file in which a node keeps its number; it was last alive when the file was last changed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        fcntl.flock(
            self._file, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # until this process ends, however it does

    def node(self) -> int | None:
        """The number of the node that was here within the last minute."""
        if time.time() - os.fstat(self._file.fileno()).st_mtime > SILENCE:
            return None
        self._file.seek(0)
        said = self._file.read().strip()
        return int(said) if said.isdecimal() else None

    def write(self, node: int | None) -> None:
        """Note the number under which a node is alive, or that it has ended in order."""
        self._file.truncate(0)
        self._file.write("" if node is None else f"{node}\n")
        self._file.flush()

    def renew(self) -> None:
        """Note that the node is alive."""
        os.utime(self._file.fileno())


class ReturningClient(FleetHttpClient):
    """What a SuperNode says to its SuperLink; it also says of the node that was killed that it has gone."""

    has_own_key = True
    last_sign: LastSign | None = None

    def RegisterNode(self, request: Any) -> Any:  # noqa: N802
        """Register a key that was made for this process alone: such a node is let in as a new one."""
        self.has_own_key = False
        return super().RegisterNode(request)

    def ActivateNode(self, request: Any) -> Any:  # noqa: N802
        """Be let in, if need be in the place of the node that was killed."""
        if self.last_sign is None and self.has_own_key:
            self.last_sign = self._found(request.public_key)
        try:
            response = super().ActivateNode(request)
        except httpx.HTTPStatusError:
            before = self.last_sign.node() if self.last_sign else None
            if before is None:
                raise
            with suppress(httpx.HTTPStatusError):
                super().DeactivateNode(DeactivateNodeRequest(node_id=before))
            response = super().ActivateNode(request)
        if self.last_sign:
            self.last_sign.write(response.node_id)
        return response

    def DeactivateNode(self, request: Any) -> Any:  # noqa: N802
        """Leave in order."""
        if self.last_sign:
            self.last_sign.write(None)
        return super().DeactivateNode(request)

    def SendNodeHeartbeat(self, request: Any) -> Any:  # noqa: N802
        """Give the SuperLink a sign of life, and note it."""
        response = super().SendNodeHeartbeat(request)
        if self.last_sign:
            self.last_sign.renew()
        return response

    def _found(self, public_key: bytes) -> LastSign | None:
        name = hashlib.sha256(self._base_url.encode() + public_key).hexdigest()[:16]
        try:
            get_flwr_home().mkdir(parents=True, exist_ok=True)
            return LastSign(get_flwr_home() / f"fedcover-node-{name}.txt")
        except (
            OSError
        ) as error:  # another node with this key is alive, or nothing can be written there
            log.debug("no last sign of life: %s", error)
            return None
