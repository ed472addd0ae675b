"""Clients' rows that stay on their node: what the node reports, and what it trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.data.client_data import PartitionedData
from fedcover.data.datasets import rows_from_file
from fedcover.data.partition import node_partition
from fedcover.errors import InvalidValue
from fedcover.flower.input_scales import InputScale
from fedcover.flower.nodes import DataRequirements
from fedcover.runs.experiment import Experiment
from fedcover.types import ClientInfo, Dataset, Samples, Source

MAX_LABELS, MAX_SAMPLES = 2**16, 10**9
"""The most labels, and the most samples of a client, that a node may report."""
MAX_AXES = 64
_COUNT = np.dtype("<u4")


def describe_client_info(path: str, *, scale: bool = True) -> dict[str, Any]:
    """Describe the rows in a file: each client's count and labels, and the shape of a row.

    Labels are bit masks. With `scale`, also describe the scale of all inputs, in coarse numbers.
    """
    samples, owner = rows_from_file(path)
    client_info = client_info_of(samples, owner)
    num_labels = 1 + max(max(info.labels) for info in client_info)
    has_label = np.zeros((len(client_info), 8 * -(-num_labels // 8)), bool)
    for row, info in enumerate(client_info):
        has_label[row, list(info.labels)] = True
    counts = np.array([info.samples for info in client_info], _COUNT)
    description = {
        "samples": counts.tobytes(),
        "labels": np.packbits(has_label, axis=1).tobytes(),
        "shape": list(client_info[0].shape),
    }
    input_scale = scale_of(samples.x) if scale else None
    if input_scale is not None:
        description["scale"] = list(astuple(input_scale))
    return description


def scale_of(x: Tensor) -> InputScale | None:
    """Return the scale of inputs; None if there are none.

    >>> scale_of(torch.tensor([[0.0, 16.0], [4.0, 4.0]]))
    InputScale(low=0.0, high=20.0, mean=6.0, spread=6.0)
    """
    if not x.numel():
        return None
    inputs = x.float()
    spread, mean = torch.std_mean(inputs, correction=0)
    return InputScale.coarse(torch.stack([*torch.aminmax(inputs), mean, spread]).tolist())


def client_info_of(samples: Samples, owner: Tensor) -> tuple[ClientInfo, ...]:
    """Describe the rows of each owner.

    >>> samples = Samples(torch.zeros(3, 8), torch.tensor([2, 0, 2]))
    >>> client_info_of(samples, torch.tensor([1, 1, 1]))
    (ClientInfo(samples=3, labels=(0, 2), shape=(8,)),)
    """
    largest_label = int(samples.y.max())
    if largest_label >= MAX_LABELS:
        raise InvalidValue(f"train_y must be labels below {MAX_LABELS}; got {largest_label}")
    shape = tuple(samples.x.shape[1:])
    client_info = []
    for client in torch.unique(owner):
        labels = samples.y[owner == client]
        distinct_labels = tuple(torch.unique(labels).tolist())
        client_info.append(ClientInfo(len(labels), distinct_labels, shape))
    return tuple(client_info)


class PackedClientInfo(Sequence[ClientInfo]):
    """A node's description of its clients' rows, kept as bytes.

    As Python objects it would take hundreds of times the memory.
    """

    def __init__(self, counts: np.ndarray, label_bits: np.ndarray, shape: tuple[int, ...]) -> None:
        self._counts, self._label_bits, self._shape = counts, label_bits, shape

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._counts)

    def __getitem__(self, index: Any) -> Any:
        """Describe one client's rows."""
        labels = np.flatnonzero(np.unpackbits(self._label_bits[index]))
        return ClientInfo(int(self._counts[index]), tuple(labels.tolist()), self._shape)


def parse_client_info(description: Mapping[str, Any]) -> Sequence[ClientInfo]:
    """Read what `describe_client_info` returns; raise a ValueError if it makes no sense.

    >>> counts, labels = np.array([7], "<u4").tobytes(), np.packbits([1, 0, 1]).tobytes()
    >>> list(parse_client_info({"samples": counts, "labels": labels, "shape": [8]}))
    [ClientInfo(samples=7, labels=(0, 2), shape=(8,))]
    """
    if "samples" not in description:
        return ()
    shape = tuple(description["shape"])
    if len(shape) > MAX_AXES or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError("no shape")
    counts = _parse_counts(description["samples"])
    labels = description["labels"]
    if not isinstance(labels, bytes) or not labels or len(labels) % len(counts):
        raise ValueError("no labels")
    label_bits = np.frombuffer(labels, np.uint8).reshape(len(counts), -1)
    if label_bits.shape[1] > MAX_LABELS // 8:
        raise ValueError("too many labels")
    return PackedClientInfo(counts, label_bits, shape)


def _parse_counts(samples: object) -> np.ndarray:
    """Return the number of rows of each client."""
    if not isinstance(samples, bytes) or not samples or len(samples) % _COUNT.itemsize:
        raise ValueError("no counts of rows")
    counts = np.frombuffer(samples, _COUNT)
    if not 1 <= counts.min() <= counts.max() <= MAX_SAMPLES:
        raise ValueError("no counts of rows")
    return counts


def data_requirements(source: Source, clients: int) -> DataRequirements:
    """Return what nodes' rows must be like, given the server's test data."""
    inputs = source.test.x
    return DataRequirements(clients, source.classes, tuple(inputs.shape[1:]), scale_of(inputs))


def load_node_data(
    path: str,
    experiment: Experiment,
    clients: range,
    requirements: DataRequirements,
    device: str = "cpu",
) -> PartitionedData:
    """Load the training rows of some of an experiment's clients; the server has the test rows."""
    samples, owner = rows_from_file(path)
    if violation := requirements.violation(client_info_of(samples, owner), clients):
        raise InvalidValue(f"{path}: {violation}")
    split = node_partition(owner, clients, experiment.clients)
    dataset = Dataset("rows", samples, samples, requirements.classes, owner)
    return PartitionedData(dataset, split, seed=experiment.seed, device=device)


def load_standalone_node_data(
    path: str, experiment: Experiment, classes: int | None, device: str
) -> PartitionedData:
    """Load the rows of a file for the first clients of an experiment, without a server's check."""
    client_info = client_info_of(*rows_from_file(path))
    num_labels = 1 + max(max(info.labels) for info in client_info)
    requirements = DataRequirements(
        len(client_info), num_labels if classes is None else classes, client_info[0].shape
    )
    return load_node_data(path, experiment, range(len(client_info)), requirements, device)
