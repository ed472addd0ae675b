"""Two engines compared over the same rounds."""

from dataclasses import replace

import pytest

from fedcover.server.round import run_round
from fedcover.training.engines.sequential import sequential
from fedcover.types import Engine
from tests.helpers.worlds import same

TORCH_WARNS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # of itself, while it compiles


SKEWED = {"dataset": "synthetic(shape=(1, 3, 4), classes=5, samples=7, test_size=50, skew=0.8)"}


def agree(setup, state, engine, rounds=2):
    """The same rounds, one of them after places have been used, so that what stays in them would show."""
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
