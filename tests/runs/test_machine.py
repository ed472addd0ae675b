"""Which engine `auto` means: what pays on the device that is used."""

import pytest

import fedcover as fc
from fedcover.runs.machine import engine_for
from fedcover.runs.setup import prepare, prepare_workload
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


def workload(**fields):
    return prepare_workload(fc.Experiment(**{**IMAGES, **fields}), "cpu")


@pytest.mark.parametrize(("fields", "engine"), CASES.values(), ids=CASES.keys())
def test_auto_engine_on_a_gpu(fields, engine):
    assert engine_for(workload(**fields), "auto", "cuda") == engine


def test_auto_engine_without_triton_uses_streams(monkeypatch):
    monkeypatch.setattr(stacked_layers, "find_spec", lambda name: None)
    assert engine_for(workload(), "auto", "cuda:1") == "streams"


def test_auto_engine_on_a_cpu_compiles_long_runs():
    assert [engine_for(workload(rounds=rounds), "auto", "cpu") for rounds in (1, 10_000)] == [
        "sequential",
        "batched",
    ]


def test_named_engine_is_used():
    assert engine_for(workload(), "sequential", "cuda") == "sequential"


def test_a_setup_leads_to_the_same_choices_as_its_workload():
    experiment = fc.Experiment(**{**IMAGES, "rounds": 10_000})
    machine = fc.Machine(device="cpu", processes="auto").resolved()
    setup = prepare(experiment, machine)
    chosen = machine.for_setup(setup)
    assert chosen == machine.for_workload(prepare_workload(experiment, "cpu"))
    assert (chosen.engine, machine.engine) == ("batched", "auto")
