"""Flower's SuperNode with two changes: it forgets ended tasks, and can reconnect after a kill.

Flower's own SuperNode keeps a record of every task for as long as it lives.
"""

from collections.abc import Collection
from typing import Any

from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode
from flwr.supernode.nodestate import nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedcover.flower.reconnection import ReconnectingClient

NUM_REMEMBERED = 8
"""Ended tasks that are kept: Flower asks for none, but a late event of the last may arrive."""


class ForgetfulNodeState(InMemoryNodeState):
    """The state of a SuperNode without its ended tasks."""

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """Add a new task, and forget old ones that have ended."""
        with self.lock_task_store:
            for task in forgettable_tasks(self.task_store.values()):
                del self.task_store[task.task_id]
        task_id: int | None = super().create_task(*args, **kwargs)
        return task_id


def forgettable_tasks(tasks: Collection[Any]) -> list[Any]:
    """Return the ended tasks but for the last few; `tasks` are in the order of arrival."""
    return [task for task in tasks if task.finished_at][:-NUM_REMEMBERED]


def main() -> None:
    """Run Flower's `flower-supernode` with these changes."""
    vars(nodestate_factory)["InMemoryNodeState"] = ForgetfulNodeState
    vars(fleet_http_connection)["FleetHttpClient"] = ReconnectingClient
    flower_supernode()
