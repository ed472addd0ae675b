"""Engines: how the clients of a round are trained. All of them agree with `sequential`."""

from collections.abc import Callable, Iterable

from fedcover.engines.batched import batched
from fedcover.engines.pools import PRECISIONS as PRECISIONS
from fedcover.engines.sequential import sequential
from fedcover.engines.streams import streams
from fedcover.types import Update

ENGINES: dict[str, Callable[..., Iterable[Update]]] = {
    "sequential": sequential,
    "batched": batched,
    "streams": streams,
}
