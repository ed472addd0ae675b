"""What a node answers when its work fails: a reason for each client, never a traceback for all."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.flower import working
from fedcover.flower.messages import Order, Orders
from fedcover.flower.parcels import as_sent, bundle, headed, kept
from fedcover.reduction import Masks


def model(hidden):
    module = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    return fc.Model(module, fc.trace(module, torch.zeros(1, 4)))


def failing(*_):
    raise ZeroDivisionError("no rows")


@pytest.mark.parametrize(
    ("there", "train", "said"),
    [
        (8, lambda *_: {"num-examples": 1, "loss": 0.0}, "wrong shape"),
        (16, failing, "ZeroDivisionError('no rows')"),
    ],
)
def test_a_node_says_why_it_cannot_train(monkeypatch, there, train, said):
    server = model(16)
    params = {name: p.detach() for name, p in server.module.named_parameters()}
    encoded, wire = as_sent(Masks({}), server)
    parcel = bundle(headed({"params": kept(wire, wire.extract(params))}))
    orders = Orders(0, 0.1, 1, "", tuple(Order(n, 1.0, 0, encoded, 0, f"nonce{n}") for n in range(2)), (parcel,))
    monkeypatch.setattr(working, "read_orders", lambda message: orders)
    monkeypatch.setattr(working, "to_server", lambda message, answers: answers)
    answers = working.train_module(None, SimpleNamespace(node_config={}), train, lambda: model(there))
    assert [answer.client for answer in answers] == [0, 1]
    assert all(said in answer.error for answer in answers)
