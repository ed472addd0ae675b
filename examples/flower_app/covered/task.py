"""The model, and a node's own data: here its share of the digits that ship with fedcover."""

import torch
from torch import nn

import fedcover as fc
from fedcover.data.datasets import load


def build() -> fc.Model:
    """An ordinary module; the groups in which its units can be cut are found by tracing."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    return fc.Model(module, fc.trace(module, torch.zeros(2, 1, 8, 8)))


def rows_of(node: int, nodes: int) -> fc.Samples:
    """Every `nodes`-th training row; a real node would read its own files."""
    train = load("digits").train
    return fc.Samples(train.x[node::nodes], train.y[node::nodes])
