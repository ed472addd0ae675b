"""Provide the clients' data: a partitioned data set, synthetic draws, or other machines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcover.data.partition import Partition
from fedcover.errors import InvalidValue
from fedcover.rng import generator, wide_generator
from fedcover.types import ClientInfo, Dataset, Samples, Shard, Source

_MAX_ELEMENTS = 2_000_000_000

REMOTE_DATA_MESSAGE = (
    "partition 'nodes': every client's rows are on its node, so this needs Flower "
    "('fedcover flower run' or 'up'); to do it in one process put all rows into one file, "
    "with train_owner, and use partition 'owner'"
)


class PartitionedData:
    """Provide a data set whose training rows are partitioned, moved to the device once."""

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        *,
        seed: int,
        validation: Samples | None = None,
        calibration_size: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        rows = len(dataset.train)
        if len(partition.order) != rows:
            raise InvalidValue(
                f"partition must be of the {rows} training rows of {dataset.name}; "
                f"got {len(partition.order)}"
            )
        _check_at_least(1, calibration_size=calibration_size)
        self.clients = partition.clients
        self.classes = dataset.classes
        self.test = dataset.test.to(device)
        self.validation = None if validation is None else validation.to(device)
        self._train = dataset.train.to(device)
        self._partition = Partition(partition.order.to(device), partition.bounds.cpu())
        # Labels are read client by client; on a GPU each read would wait for the device.
        self._cpu_labels = dataset.train.y.cpu()
        self._cpu_partition = Partition(partition.order.cpu(), partition.bounds.cpu())
        order = torch.randperm(rows, generator=generator(seed, "calibration"))
        calibration_rows = order[:calibration_size]
        self.calibration: Tensor = self._train.x[calibration_rows.to(device)]

    def count(self, client: int) -> int:
        """Return the number of training rows of a client."""
        return len(self._cpu_partition.indices(client))

    def shard(self, client: int) -> Shard:
        """Return the training rows of a client, as indices into the rows of all clients."""
        return Shard(self._train, self._partition.indices(client))

    def labels(self, client: int) -> tuple[int, ...]:
        """Return the distinct labels of a client, in ascending order."""
        return _distinct_labels(self._cpu_labels[self._cpu_partition.indices(client)])


class SyntheticData:
    """Draw each client's data on demand, so that a million clients cost no memory.

    A sample is the random prototype of its label plus noise, scaled to unit variance.

    Args:
        clients: The number of clients.
        seed: The seed of all draws.
        shape: The shape of one sample.
        classes: The number of classes.
        samples: The number of training samples per client.
        skew: The share of a client's samples that have its favourite label; the other labels are
            uniform. 0 is iid, 1 is one label per client.
        noise: The standard deviation of the noise, relative to that of the prototypes.
        test_size: The number of test samples.
        validation_size: The number of validation samples.
        calibration_size: The number of calibration samples.
        device: The device of the samples.

    Raises:
        InvalidValue: If a number is out of range.

    >>> source = SyntheticData(1_000_000, seed=0)
    >>> source.shard(999_999).samples.x.shape
    torch.Size([60, 1, 8, 8])
    """

    def __init__(
        self,
        clients: int,
        seed: int,
        *,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        samples: int = 60,
        skew: float = 0.0,
        noise: float = 2.0,
        test_size: int = 2000,
        validation_size: int = 0,
        calibration_size: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_at_least(
            1, clients=clients, classes=classes, samples=samples, shape=min(shape, default=0)
        )
        _check_at_least(1, test_size=test_size, calibration_size=calibration_size)
        _check_at_least(0, validation_size=validation_size, noise=noise, skew=skew)
        num_samples = samples + test_size + validation_size + calibration_size
        if num_samples * math.prod(shape) > _MAX_ELEMENTS:
            raise InvalidValue(
                f"samples, sizes and shape must stay under {_MAX_ELEMENTS:,} numbers; "
                f"got {samples} samples"
            )
        if skew > 1:
            raise InvalidValue(f"skew must be between 0 and 1; got {skew}")
        self.clients, self.classes = clients, classes
        self._seed, self._samples, self._skew, self._noise = seed, samples, skew, noise
        self._device = device
        random = generator(seed, "synthetic", "prototypes")
        self._prototypes = torch.randn((classes, *shape), generator=random)
        self.test = self._global_samples("test", test_size)
        self.validation = None
        if validation_size:
            self.validation = self._global_samples("validation", validation_size)
        self.calibration: Tensor = self._global_samples("calibration", calibration_size).x

    def count(self, client: int) -> int:
        """Return the number of training rows of a client, which is the same for all."""
        self._check(client)
        return self._samples

    def shard(self, client: int) -> Shard:
        """Draw the training rows of a client."""
        random = wide_generator(self._seed, "synthetic", "noise", client)
        noise_shape = (self._samples, *self._prototypes.shape[1:])
        noise = random.standard_normal(noise_shape, dtype=np.float32)
        samples = self._around_prototypes(self._labels(client), torch.from_numpy(noise))
        return Shard(samples, torch.arange(self._samples, device=self._device))

    def labels(self, client: int) -> tuple[int, ...]:
        """Return the distinct labels of a client, in ascending order."""
        return _distinct_labels(self._labels(client))

    def _check(self, client: int) -> None:
        if not 0 <= client < self.clients:
            raise InvalidValue(f"client must be between 0 and {self.clients - 1}; got {client}")

    def _labels(self, client: int) -> Tensor:
        self._check(client)
        random = wide_generator(self._seed, "synthetic", "labels", client)
        favourite = random.integers(self.classes)
        is_favourite = random.random(self._samples) < self._skew
        uniform_labels = random.integers(self.classes, size=self._samples)
        return torch.from_numpy(np.where(is_favourite, favourite, uniform_labels))

    def _global_samples(self, kind: str, size: int) -> Samples:
        """Draw samples that belong to no client."""
        random = generator(self._seed, "synthetic", "labels", kind, 0)
        y = torch.randint(self.classes, (size,), generator=random)
        random = generator(self._seed, "synthetic", "noise", kind, 0)
        noise = torch.randn((size, *self._prototypes.shape[1:]), generator=random)
        return self._around_prototypes(y, noise)

    def _around_prototypes(self, y: Tensor, noise: Tensor) -> Samples:
        x = (self._prototypes[y] + self._noise * noise) / math.hypot(1, self._noise)
        return Samples(x, y).to(self._device)


@dataclass(frozen=True)
class RemoteData:
    """Describe clients whose rows stay on their own nodes.

    Attributes:
        server_data: The data on which the server evaluates.
        clients: The number of clients.
        client_info: What nodes reported about their clients; without clients of absent nodes.
    """

    server_data: Source
    clients: int
    client_info: Mapping[int, ClientInfo]

    @property
    def test(self) -> Samples:
        """Return the common test set."""
        return self.server_data.test

    @property
    def validation(self) -> Samples | None:
        """Return the validation rows on the server."""
        return self.server_data.validation

    @property
    def calibration(self) -> Tensor:
        """Return rows on the server on which norm statistics are computed."""
        return self.server_data.calibration

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.server_data.classes

    def count(self, client: int) -> int:
        """Return the reported number of training rows of a client; 0 if its node is absent."""
        return self.client_info[client].samples if client in self.client_info else 0

    def shard(self, client: int) -> Shard:
        """Raise `InvalidValue`: the rows are on another machine."""
        raise InvalidValue(REMOTE_DATA_MESSAGE)

    def labels(self, client: int) -> tuple[int, ...]:
        """Return the reported labels of a client, without labels that do not exist."""
        reported = self.client_info[client].labels if client in self.client_info else ()
        return tuple(label for label in reported if label < self.classes)


def _check_at_least(least: int, **fields: float) -> None:
    for field, value in fields.items():
        if not least <= value < math.inf:
            raise InvalidValue(f"{field} must be at least {least}; got {value}")


def _distinct_labels(y: Tensor) -> tuple[int, ...]:
    return tuple(torch.unique(y).tolist())
