"""Engines: how the clients of a round are trained. All of them agree with `sequential`."""

from collections.abc import Iterable, Sequence

from fedcover.engines.batched import batched
from fedcover.engines.sequential import sequential
from fedcover.errors import InvalidValue
from fedcover.types import Client, Engine, Reduction, State, Task, Update


def flower(task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float) -> Iterable[Update]:
    """On the nodes of a Flower federation; `fedcover flower` puts the connection in its place."""
    raise InvalidValue(
        "engine 'flower' trains on SuperNodes: start, or go on with the run, by 'fedcover flower up' or 'fedcover "
        "flower run' (or go on in this process with --engine sequential --force)"
    )


ENGINES: dict[str, Engine] = {"sequential": sequential, "batched": batched, "flower": flower}
