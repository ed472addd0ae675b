"""Models and recipes that remember something between steps train in every engine as in
`sequential`.
"""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.round import initial_state, run_round
from fedcover.training.engines.batched import batched
from fedcover.training.engines.runners import run_steps
from fedcover.training.engines.sequential import sequential
from fedcover.types import Engine, Recipe
from tests.helpers.engines import TORCH_WARNS, UNCOMPILED, agree
from tests.helpers.worlds import same, world


class Remembering(nn.Module):
    """A model with state or random draws outside of its parameters and buffers."""

    def __init__(self, how):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.how, self.calls, self.last, self.seen = how, 0, None, []
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        logits = self.head(x.flatten(1))
        if self.training:
            logits = getattr(self, self.how)(logits)
        return logits

    def counter(self, said):
        self.calls += 1
        return said / (1 + 0.1 * self.calls)

    def kept(self, said):
        self.last = said.detach().mean(0) if self.last is None else 0.5 * self.last
        return said

    def listed(self, said):
        self.seen.append(1)
        return said * (1 + 0.1 * len(self.seen))

    def reassigned(self, said):
        self.mean = 0.9 * self.mean + 0.1 * said.detach().mean(0)
        return said - self.mean

    def pythons_dice(self, said):
        return said if random.random() < 0.5 else 2 * said

    def numpys_dice(self, said):
        return said if np.random.random() < 0.5 else 2 * said


REMEMBERING = {
    "counter": "changes its Python state in forward",
    "kept": "changes its Python state in forward",
    "listed": "changes its Python state in forward",
    "reassigned": "replaces its buffers by new tensors",
    "pythons_dice": "draws random numbers",
    "numpys_dice": "draws random numbers",
}


@pytest.mark.parametrize("how", REMEMBERING)
def test_model_with_state_between_steps_trains_in_turn(how, caplog):
    experiment = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
    losses = []
    for engine in ("sequential", "batched"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        own = fc.Model(Remembering(how), ())
        run = fc.run(experiment, machine=fc.Machine(engine=engine), model=own)
        losses.append([line["loss"] for line in run.metrics])
    assert REMEMBERING[how] in caplog.text
    if "dice" not in how:  # which have moved on by the trial
        assert losses[0] == losses[1]


class Holding(nn.Module):
    """Looks deep inside of it for what it does next."""

    def __init__(self, held):
        super().__init__()
        self.hidden, self.held = nn.Linear(64, 10), held

    def forward(self, x):
        return self.hidden(x.flatten(1)) * HELD[type(self.held)](self.held)


def _count(holder, key):
    holder[key] = holder[key] + 1
    return 1.0 / float(holder[key])


HELD = {
    SimpleNamespace: lambda held: _count(vars(held), "n"),
    dict: lambda held: _count(held["a"], "n"),
    np.ndarray: lambda held: _count(held, 0),
    np.random.Generator: lambda held: 1 + held.random(),
    random.Random: lambda held: 1 + held.random(),
    torch.Generator: lambda held: 1 + torch.rand((), generator=held),
    torch.Tensor: lambda held: 1 / held.add_(1),
}


@pytest.mark.parametrize(
    "held",
    [
        lambda: SimpleNamespace(n=0),
        lambda: {"a": {"n": 0}},
        lambda: np.zeros(1),
        lambda: np.random.default_rng(0),
        lambda: random.Random(0),
        lambda: torch.Generator().manual_seed(0),
        lambda: torch.zeros(()),
    ],
)
def test_changes_inside_model_attributes_are_noticed(held, fast, caplog):
    experiment = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
    setup = prepare(
        experiment,
        fc.Machine("sequential", "cpu").resolved(),
        overrides=Overrides(model=fc.Model(Holding(held()), ())),
    )
    agree(setup, initial_state(setup), fast)
    assert "so clients are trained one after another" in caplog.text


class Sharing(nn.Module):
    """One layer in two places; which one can be changed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.again, self.kept, self.listed = self.first, torch.ones(3), np.ones(3)

    def forward(self, x):
        x = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.head(self.again(x)) * self.kept.sum() / float(self.listed.sum())


def test_shared_layers_are_noticed_and_constant_attributes_allowed(fast, caplog):
    model = fc.Model(Sharing(), ())
    for name in ("first", "second"):
        model.module.again = getattr(model.module, name)
        experiment = fc.Experiment(policy="full", clients=24, active=3, rounds=1, epochs=1, lr=0.1)
        setup = prepare(
            experiment, fc.Machine("sequential", "cpu").resolved(), overrides=Overrides(model=model)
        )
        slow, quick = (
            run_round(replace(setup, engine=Engine(e)), initial_state(setup))[0]
            for e in (sequential, fast)
        )
        same(quick.params, slow.params, 1e-5)
    assert not caplog.records


def test_failure_of_one_recipe_does_not_affect_another(monkeypatch):
    setup, state = world("mlp", policy="full", fleet="1x1")
    calls = []
    module = sys.modules["fedcover.training.engines.batched"]
    monkeypatch.setattr(module, "run_steps", lambda runners: calls.append(1) or run_steps(runners))
    drawing = _weighted(lambda carry: random.uniform(1, 2))
    for recipe in (drawing, setup.task.recipe):
        run_round(
            replace(setup, engine=Engine(UNCOMPILED), task=replace(setup.task, recipe=recipe)),
            state,
        )
    assert calls


def test_changed_model_attribute_gets_new_runners(fast):
    """Lanes are kept with the module; what was prepared for one setting of it must not serve
    another.
    """
    model = fc.Model(Holding(SimpleNamespace(n=1)), ())
    model.module.register_forward_hook(lambda module, inputs, logits: logits / module.temperature)
    for model.module.temperature in (1.0, 5.0):
        for scaler in (False, True):
            experiment = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
            setup = prepare(
                experiment,
                fc.Machine("sequential", "cpu").resolved(),
                overrides=Overrides(model=model),
            )
            setup = replace(setup, task=replace(setup.task, scaler=scaler))
            agree(setup, initial_state(setup), fast)


def _weighted(weight, **fields):
    def loss(forward, params, batch, carry):
        return torch.nn.functional.cross_entropy(forward(params, batch.x), batch.y) * weight(carry)

    return Recipe(loss, **fields)


REMEMBERED = {
    "swapped": _weighted(
        lambda c: c[0],
        start=lambda a, p: (torch.tensor(1.0), torch.tensor(3.0)),
        observe=lambda c, g: (c[1], c[0]),
    ),
    "handed on": _weighted(
        lambda c: 1 + c["before"].abs().mean(),
        start=lambda a, p: {name: torch.zeros(8) for name in ("last", "before")},
        observe=lambda c, g: {"last": g["hidden1.bias"], "before": c["last"].clone()},
    ),
    "in another order": _weighted(
        lambda c: c["u"],
        start=lambda a, p: {"u": torch.tensor(1.0), "v": torch.tensor(0.0)},
        observe=lambda c, g: {"v": c["u"] * 0, "u": c["u"] * 0.9},
    ),
    "of another type": _weighted(
        lambda c: 1 + c,
        start=lambda a, p: torch.zeros((), dtype=torch.int64),
        observe=lambda c, g: c + 0.5,
    ),
    "under other names": _weighted(
        lambda c: c["up"] if "up" in c else 0.1 * c["down"],
        start=lambda a, p: {"up" if a.client.id % 2 else "down": torch.tensor(0.5)},
    ),
}


@pytest.mark.parametrize("recipe", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_recipe_state_equals_sequential(recipe, fast):
    setup, state = world("mlp", policy="full", fleet="1x1")
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)


@TORCH_WARNS
@pytest.mark.parametrize("how", ["swapped", "handed on"])
def test_recipe_state_equals_sequential_if_compiled(how):
    setup, state = world("mlp", policy="full", fleet="1x1", active=2, clients=6)
    agree(replace(setup, task=replace(setup.task, recipe=REMEMBERED[how])), state, batched)
