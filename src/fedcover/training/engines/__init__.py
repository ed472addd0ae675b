"""Engines: the ways to train the clients of one round. All give the results of `sequential`.

The fast engines, `batched` and `streams`, rest on three concepts:

1. The tensors of a step (`step_tensors`): allocated once for all clients of equal shapes
   (`allocation`); each client's values (`client_inputs`) are copied in and out (`workspace`).
2. The step (`sgd_step`): a function that reads and writes these tensors only. `compilation`
   prepares it: eager, compiled, or captured as a CUDA graph. `stacked_layers`, `triton_conv`,
   `triton_norm` and `cpu_kernels` replace slow operations in it.
3. The cache of prepared steps (`runners`): keeps tensors and steps from round to round, unless
   the model changes (`fingerprint`).

Two more modules serve `batched`: `grouping` chooses who is stacked, and `ragged` trains clients
with different numbers of samples. What an engine cannot train raises `UnsupportedByEngine`
(`unsupported`), and `sequential` takes over (`streams` on CUDA).
"""

from collections.abc import Callable, Iterable, Sequence

from fedcover.errors import InvalidValue
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import PRECISIONS as PRECISIONS
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.streams import streams
from fedcover.types import Client, Engine, EngineFunction, Reduction, State, Task, Update


def flower(
    task: Task,
    state: State,
    work: Sequence[tuple[Client, Reduction]],
    lr: float,
    *,
    precision: str = "fp32",
) -> Iterable[Update]:
    """Stand in for the nodes of a Flower federation; `fedcover flower` provides the real engine.

    Raises:
        InvalidValue: Always.
    """
    raise InvalidValue(
        "engine 'flower' trains on SuperNodes: start or resume the run with 'fedcover flower up' "
        "or 'fedcover flower run' (or resume it in this process with --engine sequential --force)"
    )


def as_engine(train: EngineFunction) -> Engine:
    """Return an engine for any function that trains clients; an engine stays as it is."""
    return train if isinstance(train, Engine) else Engine(train)


ENGINES: dict[str, Callable[..., Iterable[Update]]] = {
    "sequential": sequential,
    "batched": batched,
    "streams": streams,
    "flower": flower,
}
