"""What a node answers when its work fails: a reason for each client, never a traceback for all."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.flower import engine, working
from fedcover.flower.link import Failed
from fedcover.flower.messages import Order, Orders
from fedcover.flower.parcels import as_sent, bundle, headed, kept
from fedcover.flower.places import Introduction, Roster, place_of
from fedcover.reduction import Masks
from fedcover.rounds import cohort_of
from tests.worlds import world


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
    answers = working.train_module(
        SimpleNamespace(content={}), SimpleNamespace(node_config={}), train, lambda: model(there)
    )
    assert [answer.client for answer in answers] == [0, 1]
    assert all(said in answer.error for answer in answers)


class Scripted:
    """A federation in which every node is there all the time, and some never answer."""

    def __init__(self, silent):
        self.silent, self.asked = set(silent), []

    def present(self):
        return {7, 8, 9}

    def introductions(self, nodes, *, patience, rows):
        places = {7: 0, 8: 1, 9: 1}
        return {node: Introduction(node, places[node], 2, None, fc.__version__) for node in nodes}

    def exchange(self, messages, *, patience, allowed):
        self.asked.append(sorted(messages))
        late = Failed("late", "no answer in 1 s")
        return {node: late if node in self.silent else "unreadable" for node in messages}


def test_a_node_that_does_not_answer_loses_its_place(monkeypatch):
    """While it is silent the next one that claims the place gets the work; one that answers keeps its place."""
    monkeypatch.setattr(engine, "to_node", lambda node, orders, ttl: orders)
    monkeypatch.setattr(engine, "read_answers", lambda reply: [])
    setup, state = world("mlp")
    work = [(client, Masks({})) for client in cohort_of(setup, 0)]
    link = Scripted(silent=[8])
    terms = engine.Terms("", setup.clients, deadline=1.0)
    train = engine.FlowerEngine(link, Roster(), terms, engine.Events(None))
    assert {place_of(client.id, setup.clients, 2) for client, _ in work} == {0, 1}
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    assert link.asked == [[7, 8], [7, 9], [7, 9]]
    link.silent = {9}
    train(setup.task, state, work, 0.1)
    train(setup.task, state, work, 0.1)
    assert link.asked[3:] == [[7, 9], [7, 8]]
