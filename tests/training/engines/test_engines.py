"""Engines: how fast, never what: rounds from the same state equal those of `sequential` (law 4)."""

import logging
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.log import _WARNED
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.round import initial_state, run_round
from fedcover.training.engines import compilation, grouping, ragged
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import eager_backend
from fedcover.training.engines.runners import get_runner_cache, run_steps
from fedcover.training.engines.sequential import sequential
from fedcover.training.engines.sgd_step import _ForeachCast
from fedcover.training.engines.streams import streams
from fedcover.types import Engine, Recipe
from tests.helpers.engines import RECIPES, TORCH_WARNS, agree
from tests.helpers.worlds import same, world

UNCOMPILED = partial(batched, backend=eager_backend)
FAST = {"batched": UNCOMPILED, "streams": streams}


@pytest.fixture(params=FAST.values(), ids=FAST.keys(), name="fast")
def _fast(request):
    return request.param


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    _WARNED.clear()


@pytest.mark.parametrize(
    "policy", ["full", "prefix", "rolling(spread=true)", "random", "magnitude", "planned"]
)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_every_kind_of_reduction_equals_sequential(model, policy, fast):
    agree(*world(model, policy=policy), fast)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # attention under vmap
@pytest.mark.parametrize(
    "model", ["wide_resnet", "preact_resnet18", "lora", "depth_resnet", "transformer", "lstm"]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_other_models_equal_sequential(model, norm, fast, caplog):
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
        {"clip": 0.05}, {"weight_decay": 0.1, "momentum": 0.9}, {"scaler": True}, {"drop_out": 0.4}, {"batch_size": 4},
        {"batch_size": 100}, {"schedule": "cosine"}, {"rule": "median"},
    ],
    ids=lambda switch: "-".join(map(str, switch.items())),
)  # fmt: skip
def test_every_switch_equals_sequential(switch, fast):
    agree(*world("mlp", policy="prefix", **switch), fast)


@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES.keys())
def test_every_recipe_runs_in_every_engine(fields, fast, caplog):
    agree(*world("mlp", assignment="slot", **fields), fast)
    assert not [r for r in caplog.records if "one after another" in r.message]


def test_augmented_batches_equal_sequential(fast, caplog):
    agree(*world("cnn", policy="prefix", augment="crop-flip", assignment="slot"), fast)
    assert not caplog.records


def test_statistics_that_are_tracked_run_on_streams(caplog):
    agree(*world("wide_resnet", policy="prefix", norm="tracked", epochs=1), streams)
    agree(*world("wide_resnet", policy="prefix", norm="per-width", epochs=1), streams)
    assert not caplog.records
    agree(*world("wide_resnet", policy="prefix", norm="tracked", epochs=1), UNCOMPILED)
    assert "tracked" in caplog.text


def test_random_draws_run_one_after_another_and_the_log_says_so_once(fast, caplog):
    agree(*world("mlp", policy="prefix", model="mlp(hidden=[8], dropout=0.5)"), fast)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert ["one after another" in message for message in said].count(True) == 1


def test_a_recipe_that_decides_by_values_is_never_silently_wrong(fast, caplog):
    """On a CPU a replayed step still decides anew; stacked clients cannot, so they are trained one after another."""

    def loss(forward, params, batch, carry):
        found = nn.functional.cross_entropy(forward(params, batch.x), batch.y)
        return 2 * found if float(found.detach()) > 1.1 else found

    setup, state = world("mlp", policy="full")
    agree(replace(setup, task=replace(setup.task, recipe=Recipe(loss))), state, fast)
    assert ("one after another" in caplog.text) == (fast is UNCOMPILED)


def test_a_recipe_that_remembers_more_than_tensors_says_so(fast, caplog):
    setup, state = world("mlp", policy="full")
    recipe = replace(
        setup.task.recipe, start=lambda assignment, params: {"client": assignment.client.id}
    )
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)
    assert "remembers a int" in caplog.text


UNEQUAL = {
    "dataset": "digits",
    "partition": "dirichlet(alpha=0.3)",
    "clients": 60,
    "active": 8,
    "batch_size": 10,
}
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


@pytest.mark.parametrize("fields", SEATED.values(), ids=SEATED.keys())
def test_clients_with_unequal_rows_equal_sequential(fields, fast):
    agree(*world("mlp", **{**UNEQUAL, **fields}), fast)


def test_clients_with_unequal_rows_share_the_slots_of_a_stack(monkeypatch, caplog):
    """No client trains alone, the longest come first, and all rounds share the same few runners."""
    seen = []

    def train_ragged(runner, clients):
        seen.append((runner.workspace, [client.rows for client in clients]))
        return ragged.train_ragged(runner, clients)

    monkeypatch.setattr(
        sys.modules["fedcover.training.engines.batched"], "train_ragged", train_ragged
    )
    setup, state = world("mlp", **{**UNEQUAL, **SEATED["whole"]})
    for _ in range(3):
        state, _ = run_round(replace(setup, engine=Engine(UNCOMPILED)), state)
    assert [len(rows) for _, rows in seen] == [8, 8, 8]
    for workspace, rows in seen:
        useful = sum(n // 10 for n in rows) / (
            max(rows) // 10
        )  # with so many, all are busy until the longest is done
        assert workspace.stack_size in (1, 2, 4)
        assert workspace.stack_size <= useful + 1 < 2 * workspace.stack_size + 1
    assert not caplog.records


@TORCH_WARNS
def test_a_compiled_stack_of_unequal_clients_equals_sequential():
    agree(*world("mlp", **{**UNEQUAL, **SEATED["whole"], "epochs": 1, "active": 4}), batched)


def test_places_are_used_again_when_capacities_move_between_devices():
    """With capacities that belong to devices the widths of a cohort change every round; the places stay few."""
    setup, state = world(
        "mlp", policy="prefix", assignment="device", clients=30, rounds=8, epochs=1
    )
    setup = replace(setup, engine=Engine(streams))
    for _ in range(8):
        state, _ = run_round(setup, state)
    cache = get_runner_cache(setup.task)
    seen = {runner.workspace.signature for runner in cache.runners.values()}
    assert len(seen) == 3  # one for each width
    before = list(cache.runners)
    run_round(setup, state)
    assert sum(key not in before for key in cache.runners) <= 1


def test_the_cache_of_runners_is_bounded(monkeypatch):
    monkeypatch.setattr("fedcover.training.engines.runners.MAX_RUNNERS", 3)
    setup, state = world("mlp", policy="prefix")
    agree(setup, state, streams, rounds=3)
    assert len(get_runner_cache(setup.task).runners) == 3


def test_later_stacks_use_only_compiled_sizes(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_STACK_SIZES", 1)
    setup, state = world("mlp", policy="full", fleet="1x1", drop_out=0.3, rounds=6)
    agree(setup, state, UNCOMPILED, rounds=6)
    stack_sizes = {
        runner.workspace.stack_size for runner in get_runner_cache(setup.task).runners.values()
    }
    assert len(stack_sizes) == 1


@TORCH_WARNS
@pytest.mark.parametrize(
    "engine", [sequential, UNCOMPILED, streams], ids=["sequential", "batched", "streams"]
)
def test_bf16_computes_in_bf16_and_keeps_float32(engine):
    """Near float32, not equal to it, and what comes back is float32."""
    wanted = fc.Experiment(
        policy="prefix", fleet="1x1 + 1x0.5", clients=20, active=4, rounds=1, epochs=1
    )
    setup = prepare(wanted, fc.Machine("sequential", "cpu").resolved())
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


def test_auto_compiles_only_what_is_long_enough():
    fields = {"policy": "full", "fleet": "1x1", "clients": 20, "active": 10}
    setup, _ = world("mlp", **fields)
    machine = fc.Machine(device="cpu").resolved()
    assert machine.for_setup(setup).engine == "sequential"
    assert machine.for_setup(replace(setup, rounds=100_000)).engine == "batched"
    assert replace(machine, engine="streams").for_setup(setup).engine == "streams"


@TORCH_WARNS
def test_the_compiled_step_equals_sequential():
    agree(*world("mlp", policy="magnitude", fleet="1x0.5", clients=6, active=2, epochs=1), batched)


@TORCH_WARNS
def test_a_warning_of_the_compiler_does_not_stop_it_where_warnings_are_errors():
    program = """
import fedcover as fc
fields = dict(model="mlp(hidden=[32])", clients=4, active=2, rounds=1, epochs=1)
fc.run(fc.Experiment(**fields), machine=fc.Machine(engine="batched", device="cpu", threads=1))
"""
    words = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"import logging\nlogging.basicConfig(level='INFO')\n{program}",
    ]
    log = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    assert "compiling, once" in log
    assert "cannot be compiled" not in log


def test_a_step_that_cannot_have_a_wrapper_in_cpp_is_compiled_with_one_in_python(
    monkeypatch, caplog
):
    compile_step, tried = compilation._compile, []

    def only_in_python(step, leaves, options):
        tried.append(dict(options))
        if options:
            raise NotImplementedError("an operation that C++ cannot call")
        return compile_step(step, leaves, options)

    monkeypatch.setattr(compilation, "_compile", only_in_python)
    agree(*world("mlp", policy="magnitude", fleet="1x0.5", clients=6, active=2, epochs=1), batched)
    assert [bool(options) for options in tried] == [True, False]
    assert "cannot be compiled" not in caplog.text


def test_without_a_compiler_clients_train_one_after_another_and_one_line_says_so():
    program = """
import fedcover as fc
fields = dict(policy="magnitude", fleet="1x0.5", clients=20, active=2, rounds=2, epochs=1, model="mlp(hidden=[8])")
runs = [fc.run(fc.Experiment(**fields), machine=fc.Machine(engine=engine)) for engine in ("sequential", "batched")]
print(runs[0].summary["loss"] == runs[1].summary["loss"])
"""
    without = {"CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={**os.environ, **without}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("engine:")]
    assert re.fullmatch(
        r"engine: the step cannot be compiled \(\w+\), so clients are trained one after another",
        said,
    )


class Remembering(nn.Module):
    """A model that keeps something of its steps, or draws for them, beside what torch knows of."""

    def __init__(self, how):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.how, self.calls, self.last, self.seen = how, 0, None, []
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        said = self.head(x.flatten(1))
        if self.training:
            said = getattr(self, self.how)(said)
        return said

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
    "counter": "changes its Python state in forward", "kept": "changes its Python state in forward",
    "listed": "changes its Python state in forward", "reassigned": "replaces its buffers by new tensors",
    "pythons_dice": "draws random numbers", "numpys_dice": "draws random numbers",
}  # fmt: skip


@pytest.mark.parametrize("how", REMEMBERING)
def test_a_model_that_remembers_its_steps_is_trained_one_after_another(how, caplog):
    wanted = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
    losses = []
    for engine in ("sequential", "batched"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        own = fc.Model(Remembering(how), ())
        done = fc.run(wanted, machine=fc.Machine(engine=engine), model=own)
        losses.append([line["loss"] for line in done.metrics])
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
        lambda: SimpleNamespace(n=0), lambda: {"a": {"n": 0}}, lambda: np.zeros(1), lambda: np.random.default_rng(0),
        lambda: random.Random(0), lambda: torch.Generator().manual_seed(0), lambda: torch.zeros(()),
    ],
)  # fmt: skip
def test_what_a_model_changes_inside_of_what_it_holds_is_seen(held, fast, caplog):
    wanted = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
    setup = prepare(
        wanted,
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


def test_which_layer_is_shared_is_seen_and_what_a_model_only_holds_does_no_harm(fast, caplog):
    model = fc.Model(Sharing(), ())
    for name in ("first", "second"):
        model.module.again = getattr(model.module, name)
        wanted = fc.Experiment(policy="full", clients=24, active=3, rounds=1, epochs=1, lr=0.1)
        setup = prepare(
            wanted, fc.Machine("sequential", "cpu").resolved(), overrides=Overrides(model=model)
        )
        slow, quick = (
            run_round(replace(setup, engine=Engine(e)), initial_state(setup))[0]
            for e in (sequential, fast)
        )
        same(quick.params, slow.params, 1e-5)
    assert not caplog.records


def test_a_rest_that_no_step_can_take_is_said_as_sequential_says_it():
    """A single row has no batch statistics; only full batches were tried before."""
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )
    wanted = fc.Experiment(
        policy="full", partition="dirichlet(alpha=0.3)", clients=60, active=30, rounds=1, epochs=1
    )
    setup = prepare(
        wanted,
        fc.Machine("sequential", "cpu").resolved(),
        overrides=Overrides(model=fc.Model(module, ())),
    )
    for engine in (sequential, UNCOMPILED):
        with pytest.raises(fc.InvalidValue, match=r"leaves client \d+ a batch of one sample"):
            run_round(replace(setup, engine=Engine(engine)), initial_state(setup))


def test_what_one_recipe_cannot_do_is_no_verdict_on_another(monkeypatch):
    setup, state = world("mlp", policy="full", fleet="1x1")
    seen = []
    module = sys.modules["fedcover.training.engines.batched"]
    monkeypatch.setattr(module, "run_steps", lambda runners: seen.append(1) or run_steps(runners))
    drawing = _weighted(lambda carry: random.uniform(1, 2))
    for recipe in (drawing, setup.task.recipe):
        run_round(
            replace(setup, engine=Engine(UNCOMPILED), task=replace(setup.task, recipe=recipe)),
            state,
        )
    assert seen


def test_a_model_that_is_set_otherwise_between_runs_is_another(fast):
    """Lanes are kept with the module; what was prepared for one setting of it must not serve another."""
    model = fc.Model(Holding(SimpleNamespace(n=1)), ())
    model.module.register_forward_hook(lambda module, inputs, logits: logits / module.temperature)
    for model.module.temperature in (1.0, 5.0):
        for scaler in (False, True):
            wanted = fc.Experiment(policy="full", clients=20, active=3, rounds=2, epochs=1)
            setup = prepare(
                wanted, fc.Machine("sequential", "cpu").resolved(), overrides=Overrides(model=model)
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
def test_what_recipes_remember_equals_sequential(recipe, fast):
    setup, state = world("mlp", policy="full", fleet="1x1")
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)


@TORCH_WARNS
@pytest.mark.parametrize("how", ["swapped", "handed on"])
def test_what_recipes_remember_equals_sequential_if_compiled(how):
    setup, state = world("mlp", policy="full", fleet="1x1", active=2, clients=6)
    agree(replace(setup, task=replace(setup.task, recipe=REMEMBERED[how])), state, batched)


def test_many_shapes_are_not_all_compiled(monkeypatch, caplog):
    monkeypatch.setattr(grouping, "MAX_SIGNATURES", 1)
    agree(
        *world("mlp", policy="prefix", fleet="1x1.0 + 1x0.5", clients=8, active=8, epochs=1),
        UNCOMPILED,
    )
    assert "there are more than 1 shapes of clients" in caplog.text


def test_weights_turned_to_bf16_in_one_go_equal_those_turned_one_by_one():
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(size, generator=draw).requires_grad_() for size in ((3, 4), (5,), (2, 3, 2, 2))
    ]
    weights.append(torch.ones(2).requires_grad_())  # which the loss does not look at
    found = []
    for turned in (_ForeachCast.apply(*weights), [weight.bfloat16() for weight in weights]):
        assert all(tensor.dtype == torch.bfloat16 for tensor in turned)
        loss = sum((tensor * tensor).sum() for tensor in turned[:-1])
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        found.append([*turned, *gradients])
    assert all(map(torch.equal, *found))
