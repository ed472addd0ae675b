"""A data set, a model and a policy as users make them in Python."""

import numpy as np
from torch import nn

import fedcover as fc


def half_then_whole(view: fc.View) -> list[fc.Slices]:
    """A policy whose windows grow in the second round."""
    return [
        fc.windows(view.groups, client.capacity * (0.5 if view.round < 1 else 1.0))
        for client in view.cohort
    ]


def small_dataset() -> fc.Dataset:
    """Sixty rows of six random numbers to train on, and thirty to test with."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(90, 6)).astype(np.float32), draw.integers(3, size=90)
    return fc.from_tensors((x[:60], y[:60]), (x[60:], y[60:]))


def own_model() -> fc.Model:
    """A model with one hidden layer, whose group is declared by hand."""
    torch_model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    cuts = (fc.Cut("0.weight", 0), fc.Cut("0.bias", 0), fc.Cut("2.weight", 1))
    return fc.Model(torch_model, (fc.UnitGroup("inner", 8, cuts),), ("0.weight",))


def failing_policy(view: fc.View) -> list[fc.Slices]:
    """A policy that raises an error of its own."""
    raise ZeroDivisionError("mine")
