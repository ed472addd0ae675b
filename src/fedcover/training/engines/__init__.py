"""Engines: how the clients of a round are trained. All of them agree with `sequential`."""

from collections.abc import Callable, Iterable, Sequence

from fedcover.errors import InvalidValue
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import PRECISIONS as PRECISIONS
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.streams import streams
from fedcover.types import Client, Reduction, State, Task, Update


def flower(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
) -> Iterable[Update]:
    """On the nodes of a Flower federation; `fedcover flower` puts the connection in its place."""
    raise InvalidValue(
        "engine 'flower' trains on SuperNodes: start, or go on with the run, by 'fedcover flower up' or 'fedcover "
        "flower run' (or go on in this process with --engine sequential --force)"
    )


ENGINES: dict[str, Callable[..., Iterable[Update]]] = {
    "sequential": sequential,
    "batched": batched,
    "streams": streams,
    "flower": flower,
}
