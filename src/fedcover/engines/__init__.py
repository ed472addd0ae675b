"""Engines: how the clients of a round are trained. All of them agree with `sequential`."""

from fedcover.engines.batched import batched
from fedcover.engines.sequential import sequential
from fedcover.types import Engine

ENGINES: dict[str, Engine] = {"sequential": sequential, "batched": batched}
