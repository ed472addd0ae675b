"""The reference engine: one client after another, each in a module of its own size."""

from collections.abc import Iterator, Sequence

from fedcover.training.engines.compilation import precision_context
from fedcover.training.local_sgd import train_client
from fedcover.types import Client, Reduction, State, Task, Update


def sequential(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
) -> Iterator[Update]:
    """Train the clients in the given order."""
    device = next(iter(state.params.values())).device
    for client, reduction in work:
        with precision_context(precision, device):
            update = train_client(task, state, client, reduction, lr)
        yield update
