"""Engines change the speed only: rounds from the same state equal those of `sequential`."""

import logging
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.round import initial_state, run_round
from fedcover.training.engines import grouping, ragged
from fedcover.training.engines.runners import RUNNER_POOL
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import _ForeachCast
from fedcover.training.engines.streams import streams
from fedcover.types import Engine, Recipe
from tests.helpers.engines import RECIPES, SEATED, TORCH_WARNS, UNCOMPILED, UNEQUAL, agree
from tests.helpers.tables import EVERY_POLICY
from tests.helpers.worlds import world


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_reductions_equal_sequential(model, name, fast):
    agree(*world(model, **EVERY_POLICY[name]), fast)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # attention under vmap
@pytest.mark.parametrize(
    "model", ["wide_resnet", "preact_resnet18", "lora", "depth_resnet", "transformer", "lstm"]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_models_equal_sequential(model, norm, fast, caplog):
    if norm == "group" and model in ("lora", "transformer", "lstm"):
        pytest.skip("has no norms to choose")
    fields = {"clients": 400} if model in ("transformer", "lstm") else {}
    agree(*world(model, policy="prefix", norm=norm, epochs=1, assignment="slot", **fields), fast)
    assert (
        model in ("transformer", "lstm") or not caplog.records
    )  # speakers have unequal numbers of lines


@pytest.mark.parametrize(
    "switch",
    [
        {"clip": 0.05},
        {"weight_decay": 0.1, "momentum": 0.9},
        {"scaler": True},
        {"drop_out": 0.4},
        {"batch_size": 4},
        {"batch_size": 100},
        {"schedule": "cosine"},
        {"rule": "median"},
    ],
    ids=lambda switch: "-".join(map(str, switch.items())),
)
def test_switches_equal_sequential(switch, fast):
    agree(*world("mlp", policy="prefix", **switch), fast)


@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES.keys())
def test_every_recipe_runs_in_every_engine(fields, fast, caplog):
    agree(*world("mlp", assignment="slot", **fields), fast)
    assert not [r for r in caplog.records if "one after another" in r.message]


def test_augmented_batches_equal_sequential(fast, caplog):
    agree(*world("cnn", policy="prefix", augment="crop-flip", assignment="slot"), fast)
    assert not caplog.records


def test_tracked_statistics_run_on_streams(caplog):
    agree(*world("wide_resnet", policy="prefix", norm="tracked", epochs=1), streams)
    agree(*world("wide_resnet", policy="prefix", norm="per-width", epochs=1), streams)
    assert not caplog.records
    agree(*world("wide_resnet", policy="prefix", norm="tracked", epochs=1), UNCOMPILED)
    assert "tracked" in caplog.text


def test_random_layers_train_in_turn_with_one_warning(fast, caplog):
    agree(*world("mlp", policy="prefix", model="mlp(hidden=[8], dropout=0.5)"), fast)
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert ["one after another" in message for message in lines].count(True) == 1


def test_recipe_with_data_dependent_branch_equals_sequential(fast, caplog):
    """On a CPU a replayed step still decides anew; stacked clients cannot, so they are trained one
    after another.
    """

    def loss(forward, params, batch, carry):
        result = nn.functional.cross_entropy(forward(params, batch.x), batch.y)
        return 2 * result if float(result.detach()) > 1.1 else result

    setup, state = world("mlp", policy="full")
    agree(replace(setup, task=replace(setup.task, recipe=Recipe(loss))), state, fast)
    assert ("one after another" in caplog.text) == (fast is UNCOMPILED)


def test_recipe_with_non_tensor_state_warns(fast, caplog):
    setup, state = world("mlp", policy="full")
    recipe = replace(
        setup.task.recipe, start=lambda assignment, params: {"client": assignment.client.id}
    )
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)
    assert "remembers a int" in caplog.text


@pytest.mark.parametrize("fields", SEATED.values(), ids=SEATED.keys())
def test_clients_with_unequal_rows_equal_sequential(fields, fast):
    agree(*world("mlp", **{**UNEQUAL, **fields}), fast)


def test_clients_with_unequal_rows_share_the_slots_of_a_stack(monkeypatch, caplog):
    """No client trains alone, the longest come first, and all rounds share the same few runners."""
    loads = []

    def train_ragged(runner, clients):
        loads.append((runner.workspace, [client.rows for client in clients]))
        return ragged.train_ragged(runner, clients)

    monkeypatch.setattr(
        sys.modules["fedcover.training.engines.batched"], "train_ragged", train_ragged
    )
    setup, state = world("mlp", **{**UNEQUAL, **SEATED["whole"]})
    for _ in range(3):
        state, _ = run_round(replace(setup, engine=Engine(UNCOMPILED)), state)
    assert [len(rows) for _, rows in loads] == [8, 8, 8]
    for workspace, rows in loads:
        useful = sum(n // 10 for n in rows) / (
            max(rows) // 10
        )  # with so many, all are busy until the longest is done
        assert workspace.stack_size in (1, 2, 4)
        assert workspace.stack_size <= useful + 1 < 2 * workspace.stack_size + 1
    assert not caplog.records


def test_runners_are_reused_when_capacities_move():
    """With capacities that belong to devices the widths of a cohort change every round; the places
    stay few.
    """
    setup, state = world(
        "mlp", policy="prefix", assignment="device", clients=30, rounds=8, epochs=1
    )
    setup = replace(setup, engine=Engine(streams))
    for _ in range(8):
        state, _ = run_round(setup, state)
    cache = RUNNER_POOL.cache_for(setup.task)
    calls = {runner.workspace.signature for runner in cache.runners.values()}
    assert len(calls) == 3  # one for each width
    before = list(cache.runners)
    run_round(setup, state)
    assert sum(key not in before for key in cache.runners) <= 1


def test_runner_cache_is_bounded(monkeypatch):
    monkeypatch.setattr("fedcover.training.engines.runners.MAX_RUNNERS", 3)
    setup, state = world("mlp", policy="prefix")
    agree(setup, state, streams, rounds=3)
    assert len(RUNNER_POOL.cache_for(setup.task).runners) == 3


def test_later_stacks_use_only_compiled_sizes(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_STACK_SIZES", 1)
    setup, state = world("mlp", policy="full", fleet="1x1", drop_out=0.3, rounds=6)
    agree(setup, state, UNCOMPILED, rounds=6)
    stack_sizes = {
        runner.workspace.stack_size for runner in RUNNER_POOL.cache_for(setup.task).runners.values()
    }
    assert len(stack_sizes) == 1


@TORCH_WARNS
@pytest.mark.parametrize(
    "engine", [sequential, UNCOMPILED, streams], ids=["sequential", "batched", "streams"]
)
def test_bf16_computes_in_bf16_and_keeps_float32(engine):
    """Near float32, not equal to it, and what comes back is float32."""
    experiment = fc.Experiment(
        policy="prefix", fleet="1x1 + 1x0.5", clients=20, active=4, rounds=1, epochs=1
    )
    setup = prepare(experiment, fc.Machine("sequential", "cpu").resolved())
    run = {
        precision: run_round(
            replace(setup, engine=Engine(partial(engine, precision=precision))),
            initial_state(setup),
        )[0].params
        for precision in ("fp32", "bf16")
    }
    distance = max(float((run["fp32"][n] - run["bf16"][n]).abs().max()) for n in run["fp32"])
    assert 0 < distance < 0.02
    assert {p.dtype for p in run["bf16"].values()} == {torch.float32}


def test_batch_of_one_row_is_refused_in_every_engine():
    """A single row has no batch statistics; only full batches were tried before."""
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )
    experiment = fc.Experiment(
        policy="full", partition="dirichlet(alpha=0.3)", clients=60, active=30, rounds=1, epochs=1
    )
    setup = prepare(
        experiment,
        fc.Machine("sequential", "cpu").resolved(),
        overrides=Overrides(model=fc.Model(module, ())),
    )
    for engine in (sequential, UNCOMPILED):
        with pytest.raises(fc.InvalidValue, match=r"leaves client \d+ a batch of one sample"):
            run_round(replace(setup, engine=Engine(engine)), initial_state(setup))


def test_foreach_cast_equals_casting_one_by_one():
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(size, generator=draw).requires_grad_() for size in ((3, 4), (5,), (2, 3, 2, 2))
    ]
    weights.append(torch.ones(2).requires_grad_())  # which the loss does not look at
    result = []
    for turned in (_ForeachCast.apply(*weights), [weight.bfloat16() for weight in weights]):
        assert all(tensor.dtype == torch.bfloat16 for tensor in turned)
        loss = sum((tensor * tensor).sum() for tensor in turned[:-1])
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        result.append([*turned, *gradients])
    assert all(map(torch.equal, *result))
