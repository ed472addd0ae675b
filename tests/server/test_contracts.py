"""Results of a user's rules, recipes, server optimisers and policies: used or refused."""

import itertools
import sys

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

import fedcover as fc
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.server.aggregation import coverage_mean
from fedcover.server.contracts import checked_recipe
from fedcover.submodels.reductions import windows
from fedcover.types import Batch, Outcome, Recipe

SMALL = {
    "clients": 8,
    "active": 2,
    "rounds": 2,
    "epochs": 1,
    "fleet": "1x1.0 + 1x0.5",
    "policy": "prefix",
    "model": "mlp(hidden=[8])",
}
NAME = rf"{__name__}:mine\d+"
NUMBERS = itertools.count()
HERE = fc.Machine("sequential", "cpu", 1)


def named(monkeypatch, function):
    """A function as an experiment names it: by a new name each time, as a recipe of one name is
    made once.
    """
    name = f"mine{next(NUMBERS)}"
    monkeypatch.setattr(sys.modules[__name__], name, function, raising=False)
    return f"{__name__}:{name}"


@pytest.fixture
def ran(monkeypatch):
    """A run with one function of a user's own in some field."""

    def run(field, function, engine="sequential", **fields):
        experiment = fc.Experiment(**{**SMALL, field: named(monkeypatch, function)} | fields)
        return fc.run(experiment, machine=fc.Machine(engine, "cpu", 1))

    return run


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────

HEAD = "head.weight"
WRONG_RULES = {
    "None": (lambda new: None, "must give tensors by name; got None"),
    "a list": (lambda new: list(new.values()), "must give tensors by name; got a list"),
    "a tensor missing": (
        lambda new: {n: t for n, t in new.items() if n != HEAD},
        (rf"must give '{HEAD}', float32 of shape \(10, 8\); " rf"got nothing of that name"),
    ),
    "a tensor more": (
        lambda new: {**new, "mean": torch.ones(1)},
        ("gives 'mean', and there is no such tensor"),
    ),
    "another shape": (
        lambda new: {**new, HEAD: new[HEAD].T},
        (rf"must give '{HEAD}' as float32 of shape \(10, 8\); got " rf"float32 of shape \(8, 10\)"),
    ),
    "a shape that broadcasts": (
        lambda new: {**new, HEAD: new[HEAD].mean()},
        r"got float32 of shape \(\)",
    ),
    "another type": (lambda new: {**new, HEAD: new[HEAD].double()}, r"as float32 .*; got float64"),
    "no tensor": (
        lambda new: {**new, HEAD: new[HEAD].numpy()},
        (f"must give '{HEAD}' as .*; got a ndarray"),
    ),
    "NaN": (lambda new: {**new, HEAD: new[HEAD] * torch.nan}, f"gives NaN or infinity in '{HEAD}'"),
    "infinity": (lambda new: {**new, HEAD: new[HEAD] / 0}, f"gives NaN or infinity in '{HEAD}'"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_RULES.values(), ids=WRONG_RULES)
def test_rule_that_returns_no_model_is_refused(ran, change, message):
    with pytest.raises(InvalidValue, match=f"rule '{NAME}' .*{message}"):
        ran("rule", lambda old, parts: change(coverage_mean(old, parts)))


def test_rule_that_writes_in_place_changes_nothing_else(ran):
    def in_place(old, parts):
        for name, tensor in coverage_mean(old, parts).items():
            old[name].copy_(tensor)
        return old

    run = ran("rule", in_place)
    plain = ran("rule", coverage_mean)
    assert run.metrics[-1]["loss"] == plain.metrics[-1]["loss"]
    assert run.metrics[-1]["delta2_mean"] == plain.metrics[-1]["delta2_mean"]


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────


def cross_entropy(forward, params, batch, carry):
    return F.cross_entropy(forward(params, batch.x), batch.y)


WRONG_LOSSES = {
    "one for each row": (
        lambda f, p, b, c: F.cross_entropy(f(p, b.x), b.y, reduction="none"),
        "got float32 of shape",
    ),
    "None": (lambda f, p, b, c: None, "loss must give one number, a floating tensor; got None"),
    "no tensor": (
        lambda f, p, b, c: 1.0,
        "loss must give one number, a floating tensor; got a float",
    ),
    "whole numbers": (lambda f, p, b, c: (f(p, b.x).argmax(1) != b.y).sum(), "got int64 of shape"),
    "no gradient": (
        lambda f, p, b, c: cross_entropy(f, p, b, c).detach(),
        "loss must depend on the parameters",
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "streams"])
@pytest.mark.parametrize(("loss", "message"), WRONG_LOSSES.values(), ids=WRONG_LOSSES)
def test_loss_without_gradient_is_refused(ran, loss, message, engine):
    with pytest.raises(InvalidValue, match=f"recipe '{NAME}': .*{message}"):
        ran("recipe", lambda: Recipe(loss), engine, fleet="1x1")


WRONG_ENDS = {
    "None": (lambda p: None, "must give a fedcover Outcome; got None"),
    "parameters": (lambda p: p, "must give a fedcover Outcome; got a"),
    "a tensor missing": (
        lambda p: Outcome({n: t for n, t in p.items() if n != HEAD}),
        f"must give '{HEAD}', ",
    ),
    "the whole model's shapes": (
        lambda p: Outcome({**p, HEAD: torch.zeros(10, 9)}),
        r"got float32 of shape \(10, 9\)",
    ),
    "another type": (lambda p: Outcome({**p, HEAD: p[HEAD].half()}), "got float16"),
    "NaN": (lambda p: Outcome({**p, HEAD: p[HEAD] / 0 * 0}), f"gives NaN or infinity in '{HEAD}'"),
    "bits of numbers": (
        lambda p: Outcome(p, bits={HEAD: p[HEAD]}),
        f"bits must give '{HEAD}' as bool",
    ),
    "bits of no tensor": (
        lambda p: Outcome(p, bits={"no": p[HEAD].bool()}),
        "bits gives 'no', and there is no such",
    ),
    "bits in a list": (lambda p: Outcome(p, bits=[True]), "bits must be given by name; got a list"),
    "measured in other shapes": (
        lambda p: Outcome(p, measured={"far": {HEAD: torch.ones(3)}}),
        "measured 'far' must",
    ),
    "measured as one": (
        lambda p: Outcome(p, measured={"far": p[HEAD]}),
        "measured 'far' must be given by name",
    ),
    "a private number": (
        lambda p: Outcome(p, private={"seen": 3}),
        "private 'seen' must be a tensor; got a int",
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "streams"])
@pytest.mark.parametrize(("end", "message"), WRONG_ENDS.values(), ids=WRONG_ENDS)
def test_finish_that_does_not_fit_the_part_is_refused(ran, end, message, engine):
    recipe = Recipe(
        cross_entropy, finish=lambda a, f, params, c: end(dict(params)), measures={"far": "all"}
    )
    with pytest.raises(InvalidValue, match=f"recipe '{NAME}': finish.*{message}"):
        ran("recipe", lambda: recipe, engine)


def test_own_recipe_trains_as_the_table_recipe(ran):
    own, plain = ran("recipe", lambda: Recipe(cross_entropy)), ran("lr", None, lr=0.01)
    assert own.metrics[-1]["loss"] == plain.metrics[-1]["loss"]


def test_loss_checks_work_under_vmap():
    """As a crew does it: whether a loss has a gradient can be asked there too."""
    weights_C2, step = torch.randn(3, 2), torch.zeros((), dtype=torch.int64)

    def gradients(loss):
        checked = checked_recipe("own:recipe", Recipe(loss))
        batch = Batch(torch.ones(1), torch.zeros(1, dtype=torch.int64), step)
        return vmap(grad(lambda w_2: checked.loss(lambda p, x: p["w"], {"w": w_2}, batch, ())))(
            weights_C2
        )

    assert torch.equal(gradients(lambda f, p, b, c: p["w"].square().sum()), 2 * weights_C2)
    with pytest.raises(InvalidValue, match="must depend on the parameters"):
        gradients(lambda f, p, b, c: p["w"].detach().sum())
    with pytest.raises(InvalidValue, match=r"got float32 of shape \(2,\)"):
        gradients(lambda f, p, b, c: p["w"].square())


# ── server optimisers ─────────────────────────────────────────────────────────────────────────────


WRONG_STEPS = {
    "a tensor alone": (
        lambda t, m: t.new,
        InvalidValue,
        ("must give a tensor and a dict of tensors; got float32"),
    ),
    "None": (lambda t, m: None, InvalidValue, "must give a tensor and a dict of tensors; got None"),
    "another shape": (
        lambda t, m: (t.new.sum(), {}),
        InvalidValue,
        (r"must give 'tensor' as .*; got " r"float32 of shape"),
    ),
    "another type": (lambda t, m: (t.new.double(), {}), InvalidValue, "got float64"),
    "memory of no tensor": (
        lambda t, m: (t.new, {"rounds": 1}),
        InvalidValue,
        ("must give 'rounds' as .*; got a int"),
    ),
    "memory of some tensors": (
        lambda t, m: (t.new, {"v": t.new} if t.new.ndim > 1 else {}),
        InvalidValue,
        r"must remember \[.*\] of every tensor",
    ),
    "memory that goes": (
        lambda t, m: (t.new, {} if m else {"v": t.new}),
        InvalidValue,
        r"must remember \['v'\]",
    ),
    "infinite": (lambda t, m: (t.new / 0, {}), TrainingDiverged, "makes the model NaN or infinite"),
}


@pytest.mark.parametrize(("step", "error", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_server_step_that_returns_no_tensor_is_refused(ran, step, error, message):
    with pytest.raises(error, match=f"server '{NAME}' .*{message}"):
        ran("server", lambda: step)


def test_server_that_returns_no_function_is_refused(ran):
    with pytest.raises(
        InvalidValue,
        match=f"server '{NAME}' must make a function of a tensor and a memory; got None",
    ):
        ran("server", lambda: None)


def test_server_step_that_writes_in_place_changes_nothing_else(ran):
    def half_way(tensor, memory):
        tensor.old.add_(tensor.new).div_(2)
        return tensor.old, {}

    run = ran("server", lambda: half_way)
    pure = ran("server", lambda: lambda tensor, memory: ((tensor.old + tensor.new) / 2, {}))
    assert run.metrics[-1]["loss"] == pure.metrics[-1]["loss"]


def test_diverged_server_step_ends_its_own_run_of_a_sweep(monkeypatch):
    server = named(monkeypatch, lambda: lambda t, m: (t.new / 0, {}))
    experiments = [
        fc.Experiment(**SMALL, name="far", server=server),
        fc.Experiment(**SMALL, name="near"),
    ]
    result = {run.experiment.name: run for run in fc.sweep(experiments, machine=HERE)}
    assert "NaN or infinite" in result["far"].diverged
    assert not result["near"].diverged


# ── policies ──────────────────────────────────────────────────────────────────────────────────────


def test_policy_part_without_cuts_is_refused(ran):
    """Units of every group are named, but of groups without cuts: the client would train the whole
    model.
    """

    def policy(view):
        bare = tuple(fc.UnitGroup(group.name, group.size, ()) for group in view.groups)
        return [windows(bare, client.capacity) for client in view.cohort]

    with pytest.raises(
        InvalidValue, match=r"policy gives client \d+ a part of other groups than view.groups"
    ):
        ran("policy", policy)
