"""Define samples, data sets and where the clients' data comes from."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and their labels, row by row.

    Attributes:
        x: The inputs; the first axis is the sample.
        y: The labels, one entry (or one sequence of entries) per sample.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Samples":
        """Copy the samples to a device.

        Args:
            device: The target device, such as `"cpu"` or `"cuda"`.

        Returns:
            The same samples on that device.
        """
        return Samples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set.

    Attributes:
        name: The name shown in messages and stored with results.
        train: Training samples, with normalised inputs.
        test: Test samples, normalised in the same way.
        classes: The number of classes; labels are 0 to `classes - 1`.
        owner: The owner of each training row, or None if it is unknown.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    owner: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One client's data: the rows `index` of `samples`, a tensor shared by clients."""

    samples: Samples
    index: Tensor


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A client's rows on another machine: their number, distinct labels and shape."""

    samples: int
    labels: tuple[int, ...]
    shape: tuple[int, ...]


class Source(Protocol):
    """The clients' data; only the clients of a round are asked for, so it may be lazy."""

    @property
    def test(self) -> Samples:
        """Return the common test set."""

    @property
    def validation(self) -> Samples | None:
        """Return held-out training samples, used for model selection."""

    @property
    def calibration(self) -> Tensor:
        """Return the inputs on which norm statistics are computed before evaluation."""

    @property
    def classes(self) -> int:
        """Return the number of classes."""

    def count(self, client: int) -> int:
        """Return the number of training rows of a client."""

    def shard(self, client: int) -> Shard:
        """Return the training rows of a client."""

    def labels(self, client: int) -> tuple[int, ...]:
        """Return the distinct labels of a client, in ascending order."""
