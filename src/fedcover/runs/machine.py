"""Which engine pays for a run: it depends on how much work a step is, how many there are, and on the device."""

from fedcover.models.norms import statistics_key
from fedcover.server.round import Setup
from fedcover.training.engines import stacked_layers

WORTH_COMPILING = 100_000
"""Steps of all clients in a run from which on compiling them (10 to 40 seconds, once) saves more than it takes."""

SMALL_STEP = 100_000_000
"""Multiply-adds of a forward pass below which two threads of one process wait for each other more than they work."""

LARGE_STEP = 10_000_000_000
"""Multiply-adds of a client's forward pass from which on torch's convolutions fill a GPU by themselves.

Measured on an H200: at 2 billion (WRN28-2, ten images) crews were 1.6 times faster, at 34 (WRN28-8) they were not.
"""


def model_multiply_adds(setup: Setup) -> int:
    """Those of the whole model, for one sample."""
    sizes = {name: p.numel() for name, p in setup.task.model.module.named_parameters()}
    return sum(sizes.get(name, 0) * times for name, times in setup.uses.items())


def has_small_steps(setup: Setup) -> bool:
    """Whether a step of one client is too little work to keep a processor busy."""
    return model_multiply_adds(setup) * setup.task.local.batch_size < SMALL_STEP


def engine_for(setup: Setup, engine: str, device: str) -> str:
    """The engine of a run: the one asked for, or instead of `auto` what pays on its device."""
    if engine != "auto":
        return engine
    if device.startswith("cuda"):
        return "batched" if _suits_stacking(setup) else "streams"
    local, rows = setup.task.local, _rows(setup)
    steps = setup.rounds * setup.active * local.epochs * sum(rows) / len(rows) / local.batch_size
    return "batched" if steps >= WORTH_COMPILING else "sequential"


def _suits_stacking(setup: Setup) -> bool:
    """Whether a GPU is better filled by a layer of all clients at once than by all clients one layer each."""
    task = setup.task
    known = stacked_layers.has_stacked_kernels(task.model.module) and statistics_key(task.norm, 1.0) is None
    alike = len(set(_rows(setup))) <= 2  # a crew takes equally many steps, and each number is captured for itself
    return known and alike and model_multiply_adds(setup) * task.local.batch_size < LARGE_STEP


def _rows(setup: Setup) -> list[int]:
    """How many samples some of the clients have."""
    return [setup.task.source.count(client) for client in range(min(setup.clients, 10))]
