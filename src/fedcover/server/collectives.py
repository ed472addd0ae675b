"""Communication between the processes that share a run, and how they share its clients."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fedcover.errors import FedcoverError, RunError
from fedcover.types import Params

T = TypeVar("T")
INTERRUPT_DELAY = 0.5
"""Seconds after which a Ctrl-C that ended another process has reached this one too."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a run, as seen by one of them. Only rank 0 prints and writes files.

    All methods but `local_slice` are collective: every process must call them in the same order.

    >>> SINGLE_PROCESS.all_gather(lambda: "value"), SINGLE_PROCESS.local_slice(10)
    (['value'], slice(0, 10, None))
    """

    rank: int = 0
    size: int = 1

    def local_slice(self, rows: int) -> slice:
        """Return this process's share of a number of rows.

        >>> ProcessGroup(1, 3).local_slice(10)
        slice(3, 6, None)
        """
        return slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def total(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all processes.

        All processes end with the same bits.
        """
        if self.size > 1:
            with self._connected():
                for pending in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    pending.wait()

    def all_gather(self, make: Callable[[], T]) -> list[T]:
        """Call `make` in every process and return all results, by rank.

        Raises:
            Exception: `make` failed here, or in another process (then as a FedcoverError).
        """
        if self.size == 1:
            return [make()]
        result: T | None = None
        error: Exception | None = None
        try:
            result = make()
        except Exception as raised:
            error = raised
        portable_error = None if error is None else self._portable_error(error)
        answers: list[Any] = [None] * self.size  # becomes pairs of a result and an error
        with self._connected():
            dist.all_gather_object(answers, (result, portable_error))
        if error is not None:
            raise error
        for _, remote_error in answers:
            if remote_error is not None:
                raise remote_error
        return [remote_result for remote_result, _ in answers]

    def broadcast(self, value: T) -> T:
        """Return the value of the first process, in every process."""
        values = [value]
        if self.size > 1:
            with self._connected():
                dist.broadcast_object_list(values, src=0)
        return values[0]

    def _portable_error(self, error: Exception) -> FedcoverError:
        """Return an error that can be pickled; describe any but our own in one sentence."""
        if isinstance(error, FedcoverError):
            return error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return RunError(
            f"process {self.rank + 1} of {self.size} failed at "
            f"{Path(frame.filename).name}:{frame.lineno} with {type(error).__name__}: {error}"
        )

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn an error of the network into a RunError."""
        try:
            yield
        except RuntimeError as error:
            # Ctrl-C ends all processes. Wait, so that it can end this one without an error.
            time.sleep(INTERRUPT_DELAY)
            raise RunError(
                f"process {self.rank + 1} of {self.size} has lost the others: one of them was ended"
            ) from error


SINGLE_PROCESS = ProcessGroup()


def is_remote(params: Params) -> bool:
    """Return whether another process holds the values, and these tensors are only shapes."""
    return any(tensor.is_meta for tensor in params.values())


def shard_by_cost(costs: Sequence[float], num_processes: int) -> list[list[int]]:
    """Distribute clients over processes so that all have about the same work.

    The most expensive client comes first; each goes to the process with the least work so far.

    Returns:
        The indices of the clients of each process.

    >>> shard_by_cost([4, 2, 2, 1, 1], 2)
    [[0, 3], [1, 2, 4]]
    """
    shards: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0.0] * num_processes
    most_expensive_first = sorted(range(len(costs)), key=lambda index: -costs[index])
    for index in most_expensive_first:
        rank = loads.index(min(loads))
        shards[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(shard) for shard in shards]
