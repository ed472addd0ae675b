"""The reference engine: one client after another, each in a module of its own size."""

from collections.abc import Iterator, Sequence

from fedcover.training import train_client
from fedcover.types import Client, Reduction, State, Task, Update


def sequential(task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float) -> Iterator[Update]:
    """Train the clients in the given order."""
    for client, reduction in work:
        yield train_client(task, state, client, reduction, lr)
