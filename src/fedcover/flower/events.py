"""What happens to nodes and clients, as lines of a run folder and of the log."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fedcover.flower.status import LOG_PREFIX
from fedcover.host.disk import append
from fedcover.log import log
from fedcover.runs.metrics_log import MEMBERSHIP_EVENTS, read_raw_lines
from fedcover.runs.run_folder import Folder


@dataclass(frozen=True)
class EventLog:
    """The events of a run, one line each in `events.jsonl` of its folder.

    Events from before there is a folder are collected in `pending_lines`, if given. They are
    written together with the first event after that.
    """

    path: Path | None
    pending_lines: list[str] | None = None

    def __post_init__(self) -> None:
        """Finish a line that a full disk has cut off, so that the next one starts on its own."""
        if self.path and not all(line.endswith(b"\n") for line in read_raw_lines(self.path)[-1:]):
            self._append("\n")

    def write(
        self, round: int, event: str, node: int | None, client: int | None, why: str = ""
    ) -> None:
        """Add an event."""
        _log_event(round, event, node, client, why)
        record = {
            "round": round,
            "time": time.time(),
            "event": event,
            "node": node,
            "client": client,
            "why": why,
        }
        pending_lines = self.pending_lines if self.pending_lines is not None else []
        line = json.dumps(record) + "\n"
        if self.path is None:
            pending_lines.append(line)
        else:
            self._append("".join([*pending_lines, line]))
            pending_lines.clear()

    def _append(self, text: str) -> None:
        assert self.path is not None
        with Folder(self.path.parent).explain_write_errors(self.path) as path:
            append(path, text.encode(), durable=False)


def _log_event(round: int, event: str, node: int | None, client: int | None, why: str) -> None:
    """Log an event unless it is an ordinary answer; people count rounds from 1."""
    if event in MEMBERSHIP_EVENTS:
        log.info("round %d: node %s %s: %s", round + 1, node, event, why)
    elif event != "answered":
        client_name = "a node" if client is None else f"client {client}"
        node_name = "no node" if node is None else f"node {node}"
        log.warning("round %d: %s (%s) %s: %s", round + 1, client_name, node_name, event, why)


def log_to_stderr() -> None:
    """Write our log to stderr, as Flower does with its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{LOG_PREFIX}%(message)s"))
    log.addHandler(handler)
    log.setLevel(os.environ.get("FEDCOVER_LOG", "INFO"))
