"""The reference engine `sequential`: train one client after another, each in its own sub-model."""

from collections.abc import Iterator, Sequence

from fedcover.tensors import device_of
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
    """Train the clients in the given order.

    Args:
        task: What all clients have in common.
        state: The global model.
        work: The clients with their parts of the model.
        lr: The learning rate.
        precision: What steps compute in: "fp32", "tf32" or "bf16".

    Yields:
        One update for each client, in the given order.

    Raises:
        TrainingDiverged: If a loss or a weight is not finite.
    """
    device = device_of(state.params)
    for client, reduction in work:
        with precision_context(precision, device):
            update = train_client(task, state, client, reduction, lr)
        yield update
