"""The batched engine: how fast, never what. One round from the same state equals `sequential`."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from fedcover.engines.batched import batched
from fedcover.engines.sequential import sequential
from fedcover.rounds import run_round
from tests.worlds import same, world

UNCOMPILED = partial(batched, compiled=False)
MODULE = sys.modules["fedcover.engines.batched"]  # the function of that name hides it
TORCH_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of itself, while it compiles


def agree(setup, state, engine=UNCOMPILED):
    slow, left = run_round(replace(setup, engine=sequential), state)
    fast, right = run_round(replace(setup, engine=engine), state)
    same(fast.params, slow.params, 1e-8)
    assert right.metrics["train_loss"] == pytest.approx(left.metrics["train_loss"], rel=1e-8)
    assert right.metrics["histogram"] == left.metrics["histogram"]


@pytest.mark.parametrize("policy", ["full", "prefix", "rolling(spread=true)", "random", "magnitude", "planned"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_every_kind_of_reduction_equals_sequential(model, policy):
    agree(*world(model, policy=policy))


@pytest.mark.parametrize("model", ["wide_resnet", "preact_resnet18", "lora"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_other_models_equal_sequential(model, norm):
    if (model, norm) == ("lora", "group"):
        pytest.skip("adapters have no norms")
    agree(*world(model, policy="prefix", norm=norm, epochs=1))


@pytest.mark.parametrize(
    "switch",
    [{"clip": 0.05}, {"weight_decay": 0.1, "momentum": 0.9}, {"scaler": True}, {"drop_out": 0.4}, {"batch_size": 4}],
    ids=lambda switch: next(iter(switch)),
)
def test_every_switch_equals_sequential(switch):
    agree(*world("mlp", policy="prefix", **switch))


@pytest.mark.parametrize(
    "fields",
    [{"recipe": "prox"}, {"recipe": "fjord"}, {"model": "mlp(hidden=[8], dropout=0.5)"}, {"absent_labels": "zero"}],
    ids=["prox", "fjord", "dropout", "labels"],
)
def test_what_cannot_run_together_runs_one_after_another_and_says_so(fields, caplog, monkeypatch):
    monkeypatch.setattr(MODULE, "_SAID", set())
    agree(*world("mlp", policy="prefix", **fields))
    assert "one after another" in caplog.text


def test_tracked_statistics_run_one_after_another():
    agree(*world("wide_resnet", policy="prefix", norm="tracked", epochs=1))


@TORCH_WARNS
def test_the_compiled_step_equals_sequential():
    agree(*world("mlp", policy="magnitude", fleet="1x0.5", clients=6, active=2, epochs=1), engine=batched)


def test_without_a_compiler_it_runs_uncompiled_and_says_so():
    program = """
import fedcover as fc
fields = dict(policy="magnitude", fleet="1x0.5", clients=20, active=2, rounds=1, epochs=1, model="mlp(hidden=[8])")
runs = [fc.run(fc.Experiment(**fields), machine=fc.Machine(engine=engine)) for engine in ("sequential", "batched")]
print(abs(runs[0].summary["loss"] - runs[1].summary["loss"]) < 1e-5)
"""
    without = {"CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **without}, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    assert "cannot be compiled" in done.stderr
