"""The processes that share a run's clients: who trains which, and the few things that they tell each other."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from fedcover.errors import FedcoverError, RunError
from fedcover.types import Params

T = TypeVar("T")
SETTLING = 0.5
"""Seconds in which a Ctrl-C that ended another process has reached this one too."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a run as one of them sees them; the first, rank 0, alone prints and writes.

    >>> SINGLE_PROCESS.all_gather(lambda: "something"), SINGLE_PROCESS.local_slice(10)
    (['something'], slice(0, 10, None))
    """

    rank: int = 0
    size: int = 1

    def local_slice(self, number: int) -> slice:
        """This process's share of so many rows.

        >>> ProcessGroup(1, 3).local_slice(10)
        slice(3, 6, None)
        """
        return slice(self.rank * number // self.size, (self.rank + 1) * number // self.size)

    def total(self, tensors: Iterable[Tensor]) -> None:
        """Turn each tensor into its sum over all processes, in place; bit for bit the same in all of them."""
        if self.size > 1:
            with self._connected():
                for pending in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    pending.wait()

    def all_gather(self, make: Callable[[], T]) -> list[T]:
        """What every process makes, by rank; what goes wrong in one of them is raised in all."""
        if self.size == 1:
            return [make()]
        made: T | None = None
        own: Exception | None = None
        try:
            made = make()
        except Exception as error:
            own = error
        heard: list[tuple[T, FedcoverError | None]] = [None] * self.size  # type: ignore[list-item]
        with self._connected():
            dist.all_gather_object(
                heard, (made, None if own is None else self._portable_error(own))
            )
        failures = [failure for _, failure in heard if failure is not None]
        if own or failures:
            raise own or failures[0]
        return [thing for thing, _ in heard]

    def broadcast(self, thing: T) -> T:
        """What the first process says."""
        said = [thing]
        if self.size > 1:
            with self._connected():
                dist.broadcast_object_list(said, src=0)
        return said[0]

    def _portable_error(self, error: Exception) -> FedcoverError:
        """An error as other processes hear of it: one of ours as it is, any other in one sentence."""
        if isinstance(error, FedcoverError):
            return error
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return RunError(
            f"process {self.rank + 1} of {self.size} failed at {place} with {type(error).__name__}: {error}"
        )

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of the network
            time.sleep(
                SETTLING
            )  # Ctrl-C ends all processes: if this one was asked to stop too, it ends here
            raise RunError(
                f"process {self.rank + 1} of {self.size} has lost the others: one of them was ended"
            ) from error


SINGLE_PROCESS = ProcessGroup()


def is_remote(params: Params) -> bool:
    """Whether these tensors are only the shapes of what another process holds."""
    return any(tensor.is_meta for tensor in params.values())


def shard_by_cost(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which clients each process trains: the dearest first, each by the process that has the least to do so far.

    >>> shard_by_cost([4, 2, 2, 1, 1], 2)
    [[0, 3], [1, 2, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += costs[place]
    return [sorted(places) for places in shares]
