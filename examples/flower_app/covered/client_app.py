"""The nodes: your own training loop on an ordinary module, the node's part of the model."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Context
from torch import nn
from torch.nn import functional as F

from covered.task import build, rows_of
from fedcover.flower import client_app


def train(module: nn.Module, config: Mapping[str, Any], context: Context) -> dict[str, float]:
    """One pass over the node's rows; `module` has as many units as the node can hold."""
    node = context.node_config
    rows = rows_of(int(node["partition-id"]), int(node["num-partitions"]))
    optimizer = torch.optim.SGD(module.parameters(), lr=config["lr"])
    loss = torch.tensor(0.0)
    for x, y in zip(rows.x.split(16), rows.y.split(16), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
    return {"num-examples": len(rows), "loss": loss.item()}


app = client_app(train, build)
