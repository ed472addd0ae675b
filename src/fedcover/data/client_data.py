"""Where the clients' data comes from: a data set shared out, draws made when asked for, or other machines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcover.data.partition import Partition
from fedcover.errors import InvalidValue
from fedcover.rng import generator, wide_generator
from fedcover.types import Dataset, Samples, Shard, Source

_MAX_ELEMENTS = 2_000_000_000
REMOTE_DATA_MESSAGE = (
    "partition 'nodes': every client's rows are on its node, so this needs Flower ('fedcover flower run' or 'up'); to "
    "do it in one process put all rows into one file, with train_owner, and use partition 'owner'"
)


class PartitionedData:
    """A data set whose training rows are shared out among clients, moved to the device once."""

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
                f"partition must be of the {rows} training rows of {dataset.name}; got {len(partition.order)}"
            )
        _check_at_least(1, calibration_size=calibration_size)
        self.clients = partition.clients
        self.classes = dataset.classes
        self.test = dataset.test.to(device)
        self.validation = None if validation is None else validation.to(device)
        self._train = dataset.train.to(device)
        self._partition = Partition(partition.order.to(device), partition.bounds.cpu())
        # a GPU would be asked for the labels of each client of a round, one after another
        self._cpu_rows = (
            dataset.train.y.cpu(),
            Partition(partition.order.cpu(), partition.bounds.cpu()),
        )
        chosen = torch.randperm(rows, generator=generator(seed, "calibration"))[:calibration_size]
        self.calibration: Tensor = self._train.x[chosen.to(device)]

    def count(self, client: int) -> int:
        """How many training rows one client has."""
        return len(self._cpu_rows[1].indices(client))

    def shard(self, client: int) -> Shard:
        """The training rows of one client, among those of all."""
        return Shard(self._train, self._partition.indices(client))

    def labels(self, client: int) -> tuple[int, ...]:
        """The distinct labels that one client holds, in order."""
        labels, partition = self._cpu_rows
        return _distinct_labels(labels[partition.indices(client)])


class SyntheticData:
    """Clients whose data is drawn from their address on demand, so that a million of them cost nothing.

    A sample is the random prototype of its label plus `noise` times as much noise, scaled to unit variance.
    A share `skew` of a client's samples has the client's favourite label, the others have any: 0 is iid, 1 is
    one label for each client.

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
        if (samples + test_size + validation_size + calibration_size) * math.prod(
            shape
        ) > _MAX_ELEMENTS:
            raise InvalidValue(
                f"samples, sizes and shape must stay under {_MAX_ELEMENTS:,} numbers; got {samples} samples"
            )
        if skew > 1:
            raise InvalidValue(f"skew must be between 0 and 1; got {skew}")
        self.clients, self.classes = clients, classes
        self._seed, self._samples, self._skew, self._noise = seed, samples, skew, noise
        self._device = device
        random = generator(seed, "synthetic", "prototypes")
        self._prototypes = torch.randn((classes, *shape), generator=random)
        self.test = self._global_samples("test", test_size)
        self.validation = (
            self._global_samples("validation", validation_size) if validation_size else None
        )
        self.calibration: Tensor = self._global_samples("calibration", calibration_size).x

    def count(self, client: int) -> int:
        """How many training rows one client has: every one the same."""
        self._check(client)
        return self._samples

    def shard(self, client: int) -> Shard:
        """The training rows of one client: all of the samples that come with it."""
        random = wide_generator(self._seed, "synthetic", "noise", client)
        noise = random.standard_normal(
            (self._samples, *self._prototypes.shape[1:]), dtype=np.float32
        )
        samples = self._around_prototypes(self._labels(client), torch.from_numpy(noise))
        return Shard(samples, torch.arange(self._samples, device=self._device))

    def labels(self, client: int) -> tuple[int, ...]:
        """The distinct labels that one client holds, in order."""
        return _distinct_labels(self._labels(client))

    def _check(self, client: int) -> None:
        if not 0 <= client < self.clients:
            raise InvalidValue(f"client must be between 0 and {self.clients - 1}; got {client}")

    def _labels(self, client: int) -> Tensor:
        self._check(client)
        random = wide_generator(self._seed, "synthetic", "labels", client)
        favourite = random.integers(self.classes)
        favoured = random.random(self._samples) < self._skew
        return torch.from_numpy(
            np.where(favoured, favourite, random.integers(self.classes, size=self._samples))
        )

    def _global_samples(self, kind: str, size: int) -> Samples:
        """Samples that belong to no client."""
        random = generator(self._seed, "synthetic", "labels", kind, 0)
        y = torch.randint(self.classes, (size,), generator=random)
        random = generator(self._seed, "synthetic", "noise", kind, 0)
        return self._around_prototypes(
            y, torch.randn((size, *self._prototypes.shape[1:]), generator=random)
        )

    def _around_prototypes(self, y: Tensor, noise: Tensor) -> Samples:
        x = (self._prototypes[y] + self._noise * noise) / math.hypot(1, self._noise)
        return Samples(x, y).to(self._device)


@dataclass(frozen=True, slots=True)
class ClientDataInfo:
    """What is known of a client's rows that are elsewhere: how many there are, of which labels and of which shape."""

    samples: int
    labels: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RemoteData:
    """Every client's rows are on its own node of a real fleet and stay there; the data set is what the server tests on.

    `client_info` is what the nodes say of their clients; of clients whose node has not come yet nothing is known.
    """

    server_data: Source
    clients: int
    client_info: Mapping[int, ClientDataInfo]

    @property
    def test(self) -> Samples:
        """The common test set."""
        return self.server_data.test

    @property
    def validation(self) -> Samples | None:
        """Rows that are held out here."""
        return self.server_data.validation

    @property
    def calibration(self) -> Tensor:
        """Rows that are here, on which norm statistics are computed."""
        return self.server_data.calibration

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return self.server_data.classes

    def count(self, client: int) -> int:
        """How many training rows one client says it has; none that are known of, if it is not there."""
        return self.client_info[client].samples if client in self.client_info else 0

    def shard(self, client: int) -> Shard:
        """Refused: the rows are not here."""
        raise InvalidValue(REMOTE_DATA_MESSAGE)

    def labels(self, client: int) -> tuple[int, ...]:
        """The labels that one client says it holds, as far as there are such."""
        known = self.client_info[client].labels if client in self.client_info else ()
        return tuple(label for label in known if label < self.classes)


def _check_at_least(least: int, **fields: float) -> None:
    for field, value in fields.items():
        if not least <= value < math.inf:
            raise InvalidValue(f"{field} must be at least {least}; got {value}")


def _distinct_labels(y: Tensor) -> tuple[int, ...]:
    return tuple(torch.unique(y).tolist())
