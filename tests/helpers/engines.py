"""Two engines compared over the same rounds."""

from dataclasses import replace
from functools import partial

import pytest

from fedcover.server.round import run_round
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import eager_backend
from fedcover.training.engines.sequential import sequential
from fedcover.types import Engine
from tests.helpers.worlds import same

TORCH_WARNS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # of itself, while it compiles


SKEWED = {"dataset": "synthetic(shape=(1, 3, 4), classes=5, samples=7, test_size=50, skew=0.8)"}


def agree(setup, state, engine, rounds=2):
    """The same rounds, one of them after places have been used, so that what stays in them would
    show.
    """
    slow = fast = state
    for _ in range(rounds):
        slow, left = run_round(replace(setup, engine=Engine(sequential)), slow)
        fast, right = run_round(replace(setup, engine=Engine(engine)), fast)
        same(fast.params, slow.params, 1e-8)
        for kind in ("statistics", "measured"):
            assert getattr(fast, kind).keys() == getattr(slow, kind).keys()
            for key, tensors in getattr(slow, kind).items():
                same(getattr(fast, kind)[key], tensors, 1e-8)
        assert fast.private.keys() == slow.private.keys()
        assert right.metrics["train_loss"] == pytest.approx(left.metrics["train_loss"], rel=1e-8)
        assert right.metrics["histogram"] == left.metrics["histogram"]


RECIPES = {
    "prox": {"recipe": "prox(mu=0.5)", "policy": "magnitude"},
    "fjord": {"recipe": "fjord(widths=[0.25, 0.5, 1.0])", "policy": "prefix"},
    "fjord-distil": {"recipe": "fjord(widths=[0.25, 0.5, 1.0], distil=0.7)", "policy": "prefix"},
    "prunefl": {"recipe": "prunefl(every=1)", "policy": "prunefl(every=1)"},
    "hermes": {"recipe": "hermes(good_enough=0.2)", "policy": "full"},
    "fedmask": {"recipe": "fedmask", "policy": "rolling(spread=true)", "lr": 1.0},
    "fiarse": {"recipe": "fiarse", "policy": "magnitude(scope=model)"},
    "labels": {"absent_labels": "zero", "label_rows": True, "policy": "prefix", **SKEWED},
}

UNCOMPILED = partial(batched, backend=eager_backend)
"""The batched engine without a compiler."""


UNEQUAL = {
    "dataset": "digits",
    "partition": "dirichlet(alpha=0.3)",
    "clients": 60,
    "active": 8,
    "batch_size": 10,
}
"""Clients with unequal numbers of rows."""


SMALL = {"model": "mlp(hidden=[6])", "fleet": "1x1.0 + 1x0.5"}


SEATED = {
    "sliced": {**SMALL, "policy": "prefix"},
    "masked": {**SMALL, "policy": "magnitude"},
    "whole": {**SMALL, "policy": "full", "fleet": "1x1.0"},
    "clipped": {**SMALL, "policy": "rolling", "clip": 0.1, "weight_decay": 0.01, "momentum": 0.5},
    "images": {
        "model": "cnn(channels=[4, 6], hidden=8)",
        "fleet": "1x1.0 + 1x0.5",
        "policy": "prefix",
    },
    "norms": {
        "model": "wide_resnet(depth=10, widen=1)",
        "fleet": "1x0.5",
        "policy": "prefix",
        "augment": "crop-flip",
    },
    "hermes": {**SMALL, "policy": "full", "fleet": "1x1.0", "recipe": "hermes"},
    "prunefl": {**SMALL, "policy": "prunefl(every=1)", "recipe": "prunefl(every=1)"},
    "fedmask": {**SMALL, "policy": "full", "fleet": "1x1.0", "recipe": "fedmask"},
    "fjord": {**SMALL, "policy": "prefix", "recipe": "fjord"},
    "smallest": {**SMALL, "policy": "full", "fleet": "1x1.0", "clients": 400, "epochs": 1},
}
"""Experiments for which clients with unequal rows share the places of a stack."""
