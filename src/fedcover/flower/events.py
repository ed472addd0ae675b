"""What happens on the nodes, as lines of a run folder and of the log."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fedcover.host.disk import append
from fedcover.log import log
from fedcover.runs.metrics_log import MEMBERSHIP_EVENTS, read_raw_lines
from fedcover.runs.run_folder import Folder


@dataclass(frozen=True)
class EventLog:
    """What became of whom, one line each in `events.jsonl` of the run folder.

    What happens before there is a folder is kept in `pending_lines`, if that is given, and written with the first line after.
    """

    path: Path | None
    pending_lines: list[str] | None = None

    def __post_init__(self) -> None:
        """After a full disk the last line may be half one: what comes next must not be written behind it."""
        if self.path and not all(line.endswith(b"\n") for line in read_raw_lines(self.path)[-1:]):
            self._append("\n")

    def write(
        self, round: int, event: str, node: int | None, client: int | None, why: str = ""
    ) -> None:
        """Add an event."""
        if event in MEMBERSHIP_EVENTS:
            log.info("round %d: node %s %s: %s", round + 1, node, event, why)
        elif event != "answered":
            whose = "a node" if client is None else f"client {client}"
            of = "no node" if node is None else f"node {node}"
            log.warning(
                "round %d: %s (%s) %s: %s", round + 1, whose, of, event, why
            )  # people count from 1
        record = {
            "round": round,
            "time": time.time(),
            "event": event,
            "node": node,
            "client": client,
            "why": why,
        }
        line, before = (
            json.dumps(record) + "\n",
            self.pending_lines if self.pending_lines is not None else [],
        )
        if self.path is None:
            before.append(line)
        else:
            self._append("".join([*before, line]))
            before.clear()

    def _append(self, text: str) -> None:
        assert self.path is not None
        with Folder(self.path.parent).explain_write_errors(self.path) as path:
            append(path, text.encode(), durable=False)


def log_to_stderr() -> None:
    """Show what is logged where Flower's own log goes."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fedcover: %(message)s"))
    log.addHandler(handler)
    log.setLevel(os.environ.get("FEDCOVER_LOG", "INFO"))
