"""Norm statistics: none kept, kept once, kept by width, or computed for the very model that is
evaluated.
"""

import pytest
import torch
from torch import nn

import fedcover
from fedcover.models.norms import (
    NORMS,
    calibrate,
    running_statistics,
    statistics_key,
    use_batch_statistics,
)
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.evaluation import FULL_REDUCTION, eval_model, logits
from fedcover.server.round import aggregate, run_round
from fedcover.training.local_sgd import train_client
from tests.helpers.worlds import same, world

RESNET = "wide_resnet"


def trained(setup, state, keep=lambda client: True):
    """The updates of one round's clients, those that are kept."""
    cohort = cohort_of(setup, state.round)
    work = zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True)
    return [u for u in setup.engine(setup.task, state, list(work), setup.lr(0)) if keep(u.client)]


def small(norm, **fields):
    defaults = {"policy": "prefix", "epochs": 1, "clients": 6, "active": 6, "assignment": "slot"}
    return world(RESNET, norm=norm, **{**defaults, **fields})


def test_statistics_key_of_each_norm_and_width():
    assert [statistics_key(norm, 0.5) for norm in NORMS] == [None, "all", "0.5", None]
    assert statistics_key("per-width", 1.0) == "1"
    assert statistics_key("per-width", 1 / 3) != statistics_key("per-width", 0.333333)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_training_on_batch_statistics_stores_none(norm):
    setup, state = small(norm)
    before = {name: t.clone() for name, t in running_statistics(setup.task.model.module).items()}
    assert bool(before) == (norm == "batch")
    assert state.statistics == {}
    assert all(update.buffers == {} for update in trained(setup, state))
    after, _ = run_round(setup, state)
    assert after.statistics == {}
    same(running_statistics(setup.task.model.module), before)


def test_batch_statistics_ignore_running_ones():
    layer = nn.BatchNorm2d(3)
    layer.running_mean.fill_(torch.nan)
    assert use_batch_statistics(layer) is layer
    assert [name for name, _ in layer.named_buffers()] == []
    x = torch.randn(4, 3, 5, 5)
    assert bool(layer(x).isfinite().all())
    assert torch.equal(layer.train()(x), layer.eval()(x))
    assert not layer.state_dict().keys() & {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("policy", ["prefix", "rolling(spread=true)", "magnitude"])
def test_tracked_statistics_are_means_over_covering_clients(policy):
    setup, state = small("tracked", policy=policy, fleet="3x0.5 + 3x0.25", weights="samples")
    statistics = state.statistics["all"]
    updates = trained(setup, state)
    after = aggregate(setup, state, updates).statistics
    assert list(after) == ["all"]
    total = {name: torch.zeros_like(t) for name, t in statistics.items()}
    times = {name: torch.zeros_like(t) for name, t in statistics.items()}
    for update in updates:
        masks = update.sent.mask(statistics)
        for name in statistics:
            total[name][masks[name]] += update.buffers[name]
            times[name] += masks[name]
    expected = {
        name: torch.where(times[name] > 0, total[name] / times[name].clamp(min=1), statistics[name])
        for name in statistics
    }
    same(after["all"], expected, 1e-12)
    if policy == "prefix":  # the second half of the channels is nobody's
        assert torch.equal(
            after["all"]["norm.running_var"][32:], torch.ones(32, dtype=torch.float64)
        )
    assert not torch.equal(
        after["all"]["norm.running_var"][:16], statistics["norm.running_var"][:16]
    )


def test_tracked_training_starts_from_the_servers_statistics():
    setup, state = small("tracked")
    update = trained(setup, state)[0]
    moved = {name: t + 5 for name, t in state.statistics["all"].items()}
    state.statistics["all"] = moved
    other = trained(setup, state)[0]
    assert not torch.equal(update.buffers["norm.running_mean"], other.buffers["norm.running_mean"])
    same(update.params, other.params)  # batch norm trains on the batch's own


def test_statistics_of_different_widths_stay_apart():
    setup, state = small("per-width")
    assert set(state.statistics) == {"1", "0.5", "0.25"}
    halves = trained(setup, state, lambda client: client.capacity == 0.5)
    assert len(halves) == 2
    after = aggregate(setup, state, halves)
    same(after.statistics["1"], state.statistics["1"])
    same(after.statistics["0.25"], state.statistics["0.25"])
    name = "stages.0.0.norm2.running_mean"
    assert not torch.equal(after.statistics["0.5"][name], state.statistics["0.5"][name])
    expected = sum(update.buffers[name] for update in halves) / 2
    torch.testing.assert_close(after.statistics["0.5"][name][:8], expected, rtol=0, atol=1e-12)
    poisoned = {
        **state.statistics,
        "1": {n: t * torch.nan for n, t in state.statistics["1"].items()},
    }
    again = train_client(
        setup.task,
        type(state)(0, state.params, poisoned),
        halves[0].client,
        halves[0].sent,
        setup.lr(0),
    )
    same(again.buffers, halves[0].buffers)
    whole = eval_model(setup.task, after, FULL_REDUCTION, 1.0)
    assert torch.equal(running_statistics(whole)[name], after.statistics["1"][name])
    half = eval_model(setup.task, after, halves[0].sent, 0.5)
    assert torch.equal(running_statistics(half)[name], after.statistics["0.5"][name][:8])


def test_width_without_clients_is_calibrated():
    setup, state = small("per-width", fleet="3x0.5 + 3x0.25")
    assert set(state.statistics) == {"0.5", "0.25"}
    after, report = run_round(setup, state)
    assert 0 <= report.metrics["accuracy"] <= 1
    whole = eval_model(setup.task, after, FULL_REDUCTION, 1.0)
    first = whole.stages[0][0].norm1
    activations = whole.stem(setup.task.source.calibration)
    torch.testing.assert_close(first.running_mean, activations.mean((0, 2, 3)))


def test_calibration_gives_the_moments_of_norm_inputs():
    setup, state = small("batch")
    module = eval_model(setup.task, state, FULL_REDUCTION, 1.0)
    layer_inputs = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(
                lambda _, inputs, __, path=path: layer_inputs.update({path: inputs[0]})
            )
            layer.train()
    with torch.no_grad():
        module(setup.task.source.calibration)
    assert len(layer_inputs) == 7
    fresh = running_statistics(eval_model(setup.task, state, FULL_REDUCTION, 1.0))
    for path, x in layer_inputs.items():
        torch.testing.assert_close(fresh[f"{path}.running_mean"], x.mean((0, 2, 3)))
        torch.testing.assert_close(fresh[f"{path}.running_var"], x.var((0, 2, 3)))


def test_calibration_restores_momentum_and_forgets_old_statistics():
    net = nn.Sequential(
        nn.BatchNorm1d(2, momentum=0.3), nn.Dropout(0.9), nn.BatchNorm1d(2, momentum=0.01)
    ).train()
    x = torch.randn(400, 2)
    first = {name: t.clone() for name, t in running_statistics(calibrate(net, x)).items()}
    for layer in (net[0], net[2]):
        layer.running_mean.fill_(1e6)
    assert calibrate(net.train(), x) is net
    assert all(
        torch.equal(t, first[name]) for name, t in running_statistics(net).items()
    )  # no dropout, nothing remembered
    assert (net[0].momentum, net[2].momentum) == (0.3, 0.01)
    assert not any(layer.training for layer in net.modules())
    torch.testing.assert_close(net[0].running_mean, x.mean(0))
    torch.testing.assert_close(net[0].running_var, x.var(0))


def test_calibration_weighs_a_short_last_batch_by_its_size():
    layer = nn.BatchNorm1d(1)
    x = torch.zeros(501, 1)
    x[500] = 1000.0
    calibrate(layer, x)
    assert float(layer.running_mean) == pytest.approx(1000 / 501, rel=0.01)
    thousand = torch.randn(1000, 1)
    calibrate(layer, thousand)
    torch.testing.assert_close(layer.running_mean, thousand.mean(0))


@pytest.mark.parametrize("norm", NORMS)
def test_evaluation_depends_on_neither_batch_nor_order(norm):
    setup, state = small(norm)
    state, _ = run_round(setup, state)
    test = setup.task.source.test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    part = setup.policy(view_of(setup, state, cohort_of(setup, 1)))[3]
    for reduction, capacity in ((FULL_REDUCTION, 1.0), (part, 0.5)):
        model = eval_model(setup.task, state, reduction, capacity)
        expected = logits(model, test.x, 50)
        for batch in (1, 7, 49):
            torch.testing.assert_close(logits(model, test.x, batch), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            logits(model, test.x[order], 7), expected[order], rtol=0, atol=1e-10
        )


def test_batch_compatible_evaluation_depends_on_both():
    setup, state = small("batch")
    model = eval_model(setup.task, state, FULL_REDUCTION, 1.0, "batch-compat")
    x = setup.task.source.test.x
    assert not torch.allclose(logits(model, x, 50), logits(model, x, 10), atol=1e-4)
    assert not torch.allclose(logits(model, x.flip(0), 20).flip(0), logits(model, x, 20), atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_runs(norm):
    experiment = fedcover.Experiment(
        model="wide_resnet(depth=10, widen=1)",
        dataset=("synthetic(shape=(3, 8, 8), samples=20, test_size=100)"),
        fleet="1x1.0 + 1x0.5",
        policy="rolling",
        clients=4,
        active=4,
        rounds=2,
        epochs=1,
        norm=norm,
        calibration=60,
    )
    run = fedcover.run(experiment, machine=fedcover.Machine(device="cpu"))
    assert (
        set(run.state.statistics)
        == {"batch": set(), "tracked": {"all"}, "per-width": {"1", "0.5"}, "group": set()}[norm]
    )
    assert all(bool(t.isfinite().all()) for t in run.state.params.values())
    for model in (run.model(), run.submodel(0.5)):
        norms = [
            layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)
        ]
        assert {type(layer) for layer in norms} == {
            nn.GroupNorm if norm == "group" else nn.BatchNorm2d
        }
        assert bool(model(torch.randn(1, 3, 8, 8)).isfinite().all())  # one sample is enough
