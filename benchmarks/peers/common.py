"""What the peers' scripts share: the job's arrays, the model, the eager local epochs.

Needs only NumPy and torch.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

EPOCHS, BATCH, LR, MOMENTUM = 5, 10, 0.01, 0.5
NAMES = {"hidden1": 1, "head": 3}
"""Where fedcover's layers stand in the sequential model below."""


class Job:
    """The arrays of `benchmarks/job.py` as tensors."""

    def __init__(self, path):
        arrays = np.load(path)
        self.train_x, self.test_x = (
            torch.from_numpy(arrays[name]) for name in ("train_x", "test_x")
        )
        self.train_y, self.test_y = (
            torch.from_numpy(arrays[name]) for name in ("train_y", "test_y")
        )
        self.rows_CN, self.cohorts_RA = arrays["rows_CN"], arrays["cohorts_RA"]
        self.orders_RAEN = arrays["orders_RAEN"]
        self.weights = {name: arrays[name] for name in arrays.files if name.startswith("weights/")}

    def model(self):
        """The MLP with the job's initial weights."""
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
        named = {}
        for name, value in self.weights.items():
            layer, leaf = name.removeprefix("weights/").rsplit(".", 1)
            named[f"{NAMES[layer]}.{leaf}"] = torch.from_numpy(value)
        module.load_state_dict(named)
        return module

    def epochs(self, round, slot):
        """The rows of a client's epochs in their order: one gather an epoch, batches are views."""
        own = self.rows_CN[self.cohorts_RA[round, slot]]
        for order_N in self.orders_RAEN[round, slot]:
            rows = torch.from_numpy(own[order_N])
            yield self.train_x[rows], self.train_y[rows]


def train(job, module, round, slot):
    """A client's local training: plain eager SGD."""
    optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    for x_N, y_N in job.epochs(round, slot):
        for x_B, y_B in zip(x_N.split(BATCH), y_N.split(BATCH), strict=True):
            optimiser.zero_grad()
            F.cross_entropy(module(x_B), y_B).backward()
            optimiser.step()


@torch.no_grad()
def accuracy(job, module):
    """The share of the test set that a model knows."""
    return float((module(job.test_x).argmax(1) == job.test_y).double().mean())


class Watch:
    """Seconds and accuracy of every round."""

    def __init__(self):
        self.last = time.perf_counter()
        self.seconds, self.accuracy = [], []

    def round(self, accuracy):
        """A round has ended."""
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.accuracy.append(accuracy)
        self.last = now

    def write(self, path, **versions):
        """Leave the figures for `run.py`."""
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, **versions}
        figures = {"seconds": self.seconds, "accuracy": self.accuracy, "versions": versions}
        Path(path).write_text(json.dumps(figures))
