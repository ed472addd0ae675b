"""Clients' rows that stay on their node: what it says of them, what the server reads from that, what it trains on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedcover.datasets import rows_from_file
from fedcover.errors import InvalidValue
from fedcover.experiment import Experiment
from fedcover.partition import held
from fedcover.sources import Holding, Partitioned
from fedcover.types import Dataset

MOST_LABELS, MOST_SAMPLES = 2**16, 10**9
"""Beyond these a node does not tell of rows, and is not believed."""


def told_of(path: str) -> dict[str, Any]:
    """How many rows each of a node's clients has in a file, and, bit by bit, of which labels."""
    samples, owner = rows_from_file(path)
    if int(samples.y.max()) >= MOST_LABELS:
        raise InvalidValue(f"train_y must be labels below {MOST_LABELS}; got {int(samples.y.max())}")
    labels = [samples.y[owner == one] for one in torch.unique(owner)]
    return {"samples": [len(y) for y in labels], "labels": [_bits(y.numpy()) for y in labels]}


def _bits(labels: np.ndarray) -> bytes:
    return np.packbits(np.bincount(labels) > 0).tobytes()


def read_holdings(samples: Sequence[object], labels: Sequence[object]) -> tuple[Holding, ...]:
    """What `told_of` says, as the server knows it; refused if it makes no sense.

    >>> read_holdings([7], [np.packbits([1, 0, 1]).tobytes()])
    (Holding(samples=7, labels=(0, 2)),)
    """
    found = []
    for count, bits in zip(samples, labels, strict=True):
        if type(count) is not int or not 1 <= count <= MOST_SAMPLES or type(bits) is not bytes:
            raise ValueError("no count of rows, or no labels")
        if not 0 < len(bits) <= MOST_LABELS // 8:
            raise ValueError("no labels, or too many")
        known = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8)))
        found.append(Holding(count, tuple(known.tolist())))
    return tuple(found)


def rows_here(
    path: str, experiment: Experiment, *, mine: range | None = None, classes: int | None = None, device: str = "cpu"
) -> Partitioned:
    """The rows of some of an experiment's clients, to train on; what is tested is tested elsewhere.

    Without `mine` they are those of the first clients, without `classes` all labels are taken to be here.
    """
    samples, owner = rows_from_file(path)
    most = int(samples.y.max()) + 1
    if classes is not None and most > classes:
        raise InvalidValue(f"train_y in {path} must be labels 0 to {classes - 1}; got {most - 1}")
    split = held(owner, range(len(torch.unique(owner))) if mine is None else mine, experiment.clients)
    dataset = Dataset("rows", samples, samples, classes or most, owner)
    return Partitioned(dataset, split, seed=experiment.seed, device=device)
