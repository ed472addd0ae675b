"""Clients' rows that stay on their node: what it says of them, what the server reads from that, what it trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.data.client_data import ClientDataInfo, PartitionedData
from fedcover.data.datasets import rows_from_file
from fedcover.data.partition import node_partition
from fedcover.errors import InvalidValue
from fedcover.flower.input_scales import InputScale
from fedcover.flower.nodes import DataRequirements
from fedcover.runs.experiment import Experiment
from fedcover.types import Dataset, Samples, Source

MOST_LABELS, MOST_SAMPLES = 2**16, 10**9
"""Beyond these a node does not tell of rows, and is not believed."""
MOST_AXES = 64
_COUNT = np.dtype("<u4")


def describe_node_data(path: str, *, scale: bool = True) -> dict[str, Any]:
    """How many rows each of a node's clients has in a file, of which shape and, bit by bit, of which labels.

    Unless told not to, also how the inputs of all of them together are scaled, in coarse numbers.
    """
    samples, owner = rows_from_file(path)
    found = data_info_of(samples, owner)
    known = scale_of(samples.x) if scale else None
    about = {} if known is None else {"scale": list(astuple(known))}
    labels = np.zeros((len(found), -(-(1 + max(max(one.labels) for one in found)) // 8) * 8), bool)
    for row, one in enumerate(found):
        labels[row, list(one.labels)] = True
    samples_N = np.array([one.samples for one in found], _COUNT)
    told = {"samples": samples_N.tobytes(), "labels": np.packbits(labels, axis=1).tobytes()}
    return {**told, "shape": list(found[0].shape), **about}


def scale_of(x: Tensor) -> InputScale | None:
    """How inputs are scaled; None if there are none.

    >>> scale_of(torch.tensor([[0.0, 16.0], [4.0, 4.0]]))
    InputScale(low=0.0, high=20.0, mean=6.0, spread=6.0)
    """
    if not x.numel():
        return None
    spread, mean = torch.std_mean(x.float(), correction=0)
    numbers = torch.stack([*torch.aminmax(x.float()), mean, spread])
    return InputScale.coarse(numbers.tolist())


def data_info_of(samples: Samples, owner: Tensor) -> tuple[ClientDataInfo, ...]:
    """What there is to tell of rows, owner by owner.

    >>> data_info_of(Samples(torch.zeros(3, 8), torch.tensor([2, 0, 2])), torch.tensor([1, 1, 1]))
    (ClientDataInfo(samples=3, labels=(0, 2), shape=(8,)),)
    """
    if int(samples.y.max()) >= MOST_LABELS:
        raise InvalidValue(
            f"train_y must be labels below {MOST_LABELS}; got {int(samples.y.max())}"
        )
    shape = tuple(samples.x.shape[1:])
    each = (samples.y[owner == one] for one in torch.unique(owner))
    return tuple(ClientDataInfo(len(y), tuple(torch.unique(y).tolist()), shape) for y in each)


class PackedDataInfo(Sequence[ClientDataInfo]):
    """What a node says of its clients' rows, kept as it came: as objects it would be hundreds of times as large."""

    def __init__(self, samples_N: np.ndarray, bits_NB: np.ndarray, shape: tuple[int, ...]) -> None:
        self._samples_N, self._bits_NB, self._shape = samples_N, bits_NB, shape

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._samples_N)

    def __getitem__(self, place: Any) -> Any:
        """One client's."""
        labels = np.flatnonzero(np.unpackbits(self._bits_NB[place]))
        return ClientDataInfo(int(self._samples_N[place]), tuple(labels.tolist()), self._shape)


def parse_data_info(told: Mapping[str, Any]) -> Sequence[ClientDataInfo]:
    """What `describe_node_data` says, as the server knows it; refused if it makes no sense.

    >>> told = {"samples": np.array([7], "<u4").tobytes(), "labels": np.packbits([1, 0, 1]).tobytes(), "shape": [8]}
    >>> list(parse_data_info(told))
    [ClientDataInfo(samples=7, labels=(0, 2), shape=(8,))]
    """
    if "samples" not in told:
        return ()
    samples, labels, shape = told["samples"], told["labels"], tuple(told["shape"])
    if len(shape) > MOST_AXES or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError("no shape")
    if not isinstance(samples, bytes) or not samples or len(samples) % _COUNT.itemsize:
        raise ValueError("no counts of rows")
    samples_N = np.frombuffer(samples, _COUNT)
    if not 1 <= samples_N.min() <= samples_N.max() <= MOST_SAMPLES:
        raise ValueError("no counts of rows")
    if not isinstance(labels, bytes) or not labels or len(labels) % len(samples_N):
        raise ValueError("no labels")
    bits_NB = np.frombuffer(labels, np.uint8).reshape(len(samples_N), -1)
    if bits_NB.shape[1] > MOST_LABELS // 8:
        raise ValueError("too many labels")
    return PackedDataInfo(samples_N, bits_NB, shape)


def data_requirements(source: Source, clients: int) -> DataRequirements:
    """What nodes' rows must be like, by what the server tests on."""
    return DataRequirements(
        clients, source.classes, tuple(source.test.x.shape[1:]), scale_of(source.test.x)
    )


def load_node_data(
    path: str,
    experiment: Experiment,
    mine: range,
    requirements: DataRequirements,
    device: str = "cpu",
) -> PartitionedData:
    """The rows of some of an experiment's clients, to train on; what is tested is tested elsewhere."""
    samples, owner = rows_from_file(path)
    if violation := requirements.violation(data_info_of(samples, owner), mine):
        raise InvalidValue(f"{path}: {violation}")
    split = node_partition(owner, mine, experiment.clients)
    dataset = Dataset("rows", samples, samples, requirements.classes, owner)
    return PartitionedData(dataset, split, seed=experiment.seed, device=device)


def load_standalone_node_data(
    path: str, experiment: Experiment, classes: int | None, device: str
) -> PartitionedData:
    """The rows of a file for the first of an experiment's clients, whatever the server would have them be."""
    found = data_info_of(*rows_from_file(path))
    most = 1 + max(max(holding.labels) for holding in found)
    requirements = DataRequirements(
        len(found), most if classes is None else classes, found[0].shape
    )
    return load_node_data(path, experiment, range(len(found)), requirements, device)
