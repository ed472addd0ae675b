"""A SuperNode that forgets tasks that have ended; Flower's own keeps a record of every one for as long as it lives."""

from collections.abc import Collection
from typing import Any

from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode
from flwr.supernode.nodestate import nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedcover.flower.returning import ReturningClient

REMEMBERED = 8
"""Ended tasks that are still known; Flower asks for none of them, but a late word of the last one may come in."""


class Forgetful(InMemoryNodeState):
    """What a SuperNode knows, without what it is done with."""

    def create_task(self, *given: Any, **named: Any) -> int | None:
        """Note a new task, and forget old ones that have ended."""
        with self.lock_task_store:
            for task in to_forget(self.task_store.values()):
                del self.task_store[task.task_id]
        created: int | None = super().create_task(*given, **named)
        return created


def to_forget(tasks: Collection[Any]) -> list[Any]:
    """Of tasks in the order of their coming those that have ended, but for the last few."""
    return [task for task in tasks if task.finished_at][:-REMEMBERED]


def main() -> None:
    """Flower's `flower-supernode`, with such a memory; and when it was killed, it is let in again at once."""
    vars(nodestate_factory)["InMemoryNodeState"] = Forgetful
    vars(fleet_http_connection)["FleetHttpClient"] = ReturningClient
    flower_supernode()
