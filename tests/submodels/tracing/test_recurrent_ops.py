"""Recurrent layers: a unit is cut from all gates, layers and directions, and what is sliced equals
what is masked.
"""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fedcover as fc
from fedcover.models import params_and_buffers
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import drawn, windows
from fedcover.submodels.tracing import trace
from fedcover.submodels.unit_groups import check_groups
from fedcover.types import Cut
from tests.helpers.idioms import Written

LAYERS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "rnn-relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 4}),
    "projected-tightly": (nn.LSTM, {"proj_size": 5}),
    "projected-twofold": (nn.LSTM, {"proj_size": 2}),
}
FORMS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "two-layers": {"num_layers": 2, "dropout": 0.3},
    "bidirectional": {"bidirectional": True},
    "three-layers-bidirectional": {"num_layers": 3, "bidirectional": True, "batch_first": True},
    "no-bias": {"bias": False, "num_layers": 2},
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
)


def reader(layer, form):
    """A recurrent layer between two linear ones."""
    make, options = LAYERS[layer]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        r = make(7, 6, **options, **FORMS[form])
        width = (r.proj_size or 6) * (2 if r.bidirectional else 1)
        return Written(
            lambda m, x: m.b(m.r(m.a(x))[0]), a=nn.Linear(5, 7), r=r, b=nn.Linear(width, 2)
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_recurrent_part_trains_as_its_mask(layer, form):
    """Steps of SGD with momentum in float64; then what was trained is embedded and the whole agrees
    again.
    """
    module = reader(layer, form).double()
    module.r.dropout = 0.0
    x = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    groups = trace(module, x)
    check_groups(groups, params_and_buffers(module))
    assert [(group.name, group.size) for group in groups] == [
        ("a", 7),
        ("r", module.r.proj_size or 6),
    ]
    reduction = drawn(groups, 0.5, key=4)
    masks = reduction.mask(params_and_buffers(module))
    part = submodel(module, reduction, {})
    dense = submodel(
        module,
        drawn(groups, 1.0, key=0),
        {n: t * masks[n] for n, t in params_and_buffers(module).items()},
    )
    assert not all(bool(mask.all()) for mask in masks.values())
    for net in (part, dense):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
        for step in range(3):
            optimizer.zero_grad()
            (
                net(x) * torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(step))
            ).mean().backward()
            for key, weight in net.named_parameters() if net is dense else ():
                weight.grad *= masks[key]
            optimizer.step()
    whole = {name: torch.zeros_like(tensor) for name, tensor in params_and_buffers(module).items()}
    reduction.add_into(whole, params_and_buffers(part), 1.0)
    for name, tensor in params_and_buffers(dense).items():
        torch.testing.assert_close(
            whole[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(load_tensors(dense, whole)(x), part(x), rtol=1e-9, atol=1e-12)


def test_lstm_unit_is_a_row_of_every_gate_and_a_recurrent_column():
    module = Written(lambda m, x: m.b(m.r(x)[0]), r=nn.LSTM(5, 6), b=nn.Linear(6, 2))
    gates = [0, 6, 12, 18]
    rows = [
        Cut(f"r.{name}_l0", 0, start)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        for start in gates
    ]
    (group,) = trace(module, torch.randn(3, 4, 5))
    assert group.size == 6
    assert set(group.cuts) == {*rows, Cut("r.weight_hh_l0", 1), Cut("b.weight", 1)}


def test_projected_lstm_part_has_more_hidden_units_than_features():
    """The same number would be read by torch as no projection at all."""
    for layer in ("projected", "projected-tightly", "projected-twofold"):
        module = reader(layer, "plain")
        groups = trace(module, torch.randn(3, 4, 5))
        for share in (0.01, 0.2, 0.4, 0.6, 0.8, 1.0):
            part = submodel(module, windows(groups, share), {})
            assert 0 < part.r.proj_size < part.r.hidden_size
            assert part(torch.randn(3, 4, 5)).shape == (3, 4, 2)


def test_recurrent_part_is_saved_and_loaded():
    module = reader("lstm", "two-layers")
    reduction = windows(trace(module, torch.randn(3, 4, 5)), 0.5)
    part, other = (
        submodel(module, reduction, values)
        for values in ({}, {"r.weight_hh_l0": torch.zeros(24, 6)})
    )
    assert (part.r.input_size, part.r.hidden_size, part.r.num_layers) == (3, 3, 2)
    other.load_state_dict(part.state_dict())
    x = torch.randn(3, 4, 5)
    assert torch.equal(other.eval()(x), part.eval()(x))


def last_state(m, x):
    return m.b(m.r(m.a(x))[1][0][-1])


def both_ends(m, x):
    forward, backward = m.r(x)[1][-2:]
    return m.b(torch.cat([forward, backward], 1))


def padded(m, x):
    read = pack_padded_sequence(
        m.a(x), torch.tensor([2, 4, 3]), batch_first=True, enforce_sorted=False
    )
    return m.b(pad_packed_sequence(m.r(read)[0], batch_first=True)[0])


def stepped(m, x):
    state = None
    for step in m.a(x).unbind(1):
        state = m.r(step, state)
    return m.b(state[0] if isinstance(state, tuple) else state)


def begun(m, x):
    return m.b(m.r(x, torch.zeros(m.layers, x.size(0), m.width))[0].reshape(-1, m.width))


def learned_start(m, x):
    return m.b(m.r(x, m.start.expand(-1, len(x), -1).contiguous())[0])


def given_start(m, x):
    return m.b(m.r(x, x.new_ones(1, len(x), 6))[0])


IDIOMS = {
    "the last state": (
        last_state,
        {"a": nn.Linear(5, 7), "r": nn.LSTM(7, 6, 2, batch_first=True)},
        6,
        [7, 6],
    ),
    "both directions' ends": (
        both_ends,
        {"r": nn.GRU(5, 6, batch_first=True, bidirectional=True)},
        12,
        [6],
    ),
    "packed sequences": (
        padded,
        {"a": nn.Linear(5, 7), "r": nn.LSTM(7, 6, 2, batch_first=True)},
        6,
        [7, 6],
    ),
    "step by step, LSTM": (stepped, {"a": nn.Linear(5, 7), "r": nn.LSTMCell(7, 6)}, 6, [7, 6]),
    "step by step, GRU": (stepped, {"a": nn.Linear(5, 7), "r": nn.GRUCell(7, 6)}, 6, [7, 6]),
    "step by step, RNN": (
        stepped,
        {"a": nn.Linear(5, 7), "r": nn.RNNCell(7, 6, bias=False)},
        6,
        [7, 6],
    ),
    "a start of the width that the module keeps": (
        begun,
        {"r": nn.GRU(5, 6, 2, batch_first=True), "layers": 2, "width": 6},
        6,
        [6],
    ),
    "a learned start": (
        learned_start,
        {"r": nn.GRU(5, 6, batch_first=True), "start": nn.Parameter(torch.ones(1, 1, 6))},
        6,
        [6],
    ),
    "a start that is written as a number": (
        given_start,
        {"r": nn.GRU(5, 6, batch_first=True)},
        6,
        [],
    ),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_recurrent_models_of_every_form_are_cut(name):
    write, parts, width, sizes = IDIOMS[name]
    module = Written(write, **parts, b=nn.Linear(width, 2))
    groups = trace(module, torch.randn(3, 4, 5))
    assert [group.size for group in groups] == sizes
    assert submodel(module, windows(groups, 0.5), {})(torch.randn(3, 4, 5)).shape[-1] == 2


def test_nonzero_padding_keeps_units_whole():
    def write(m, x):
        read = pack_padded_sequence(x, torch.tensor([4, 3, 2]), batch_first=True)
        return m.b(pad_packed_sequence(m.r(read)[0], batch_first=True, padding_value=1.0)[0])

    module = Written(write, r=nn.GRU(5, 6, batch_first=True), b=nn.Linear(6, 2))
    assert trace(module, torch.randn(3, 4, 5)) == ()


class Rows(nn.Module):
    """Reads a digit row by row."""

    def __init__(self):
        super().__init__()
        self.reader, self.last = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.reader(x.reshape(len(x), 8, 8))[0][:, -1])


@pytest.mark.parametrize("policy", ["rolling", "random", "planned", "magnitude"])
def test_unequal_fleet_trains_a_recurrent_model(policy):
    experiment = fc.Experiment(
        fleet="1x1.0 + 1x0.5",
        policy=policy,
        clients=20,
        active=4,
        rounds=3,
        epochs=2,
        lr=0.2,
        window=2,
    )
    run = fc.run(experiment, model=Rows())
    assert run.accuracy > 0.3
    if policy != "magnitude":
        assert run.submodel(0.5).reader.hidden_size == 8


def test_batched_engine_logs_that_recurrent_clients_train_in_turn(caplog, no_warnings_yet):
    experiment = fc.Experiment(
        fleet="1x1.0 + 1x0.5", policy="rolling", clients=20, active=4, rounds=1, epochs=1
    )
    model = Rows()
    with caplog.at_level(logging.WARNING):
        fast = fc.run(
            experiment,
            model=copy.deepcopy(model),
            machine=fc.Machine(engine="batched", device="cpu"),
        )
    assert "recurrent layers, which torch computes for one client at a time" in caplog.text
    slow = fc.run(
        experiment,
        model=copy.deepcopy(model),
        machine=fc.Machine(engine="sequential", device="cpu"),
    )
    assert fast.summary["accuracy"] == slow.summary["accuracy"]
