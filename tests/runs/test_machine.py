"""Which engine `auto` means: what pays on the device that is used."""

import pytest

import fedcover as fc
from fedcover.runs.machine import engine_for
from fedcover.runs.setup import prepare
from fedcover.training.engines import stacked_layers

IMAGES = {"dataset": "digits", "model": "cnn", "clients": 20}
CASES = {
    "images": ({}, "batched"),
    "a width for each": ({"policy": "prefix", "fleet": "1x1.0 + 1x0.5"}, "batched"),
    "no images": ({"model": "mlp"}, "streams"),
    "another norm": ({"model": "wide_resnet(depth=10, widen=1)", "norm": "group"}, "streams"),
    "tracked statistics": (
        {"model": "wide_resnet(depth=10, widen=1)", "norm": "tracked"},
        "streams",
    ),
    "unequal clients": ({"partition": "dirichlet(alpha=0.5)"}, "streams"),
    "large steps": ({"batch_size": 1_000_000}, "streams"),
}


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch):
    monkeypatch.setattr(stacked_layers, "find_spec", lambda name: name)


def setup(**fields):
    return prepare(fc.Experiment(**{**IMAGES, **fields}), fc.Machine(device="cpu").resolved())


@pytest.mark.parametrize(("fields", "engine"), CASES.values(), ids=CASES.keys())
def test_auto_engine_on_a_gpu(fields, engine):
    assert engine_for(setup(**fields), "auto", "cuda") == engine


def test_auto_engine_without_triton_uses_streams(monkeypatch):
    monkeypatch.setattr(stacked_layers, "find_spec", lambda name: None)
    assert engine_for(setup(), "auto", "cuda:1") == "streams"


def test_auto_engine_on_a_cpu_compiles_long_runs():
    assert [engine_for(setup(rounds=rounds), "auto", "cpu") for rounds in (1, 10_000)] == [
        "sequential",
        "batched",
    ]


def test_named_engine_is_used():
    assert engine_for(setup(), "sequential", "cuda") == "sequential"
