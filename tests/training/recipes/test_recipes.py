"""Every recipe equals its slow twin over whole rounds, with momentum and weight decay; and what
each one promises.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.server.round import run_round
from fedcover.submodels.reductions import Masks, Slices, width_for_budget, windows
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.training.local_sgd import train_client
from fedcover.training.recipes import RECIPES, mask_absent_labels
from fedcover.training.recipes.fedmask import (
    INITIAL_SCORE,
    SCORE_THRESHOLD,
    replace_weights_with_scores,
)
from fedcover.training.recipes.fiarse import _ImportanceMask
from fedcover.training.recipes.fjord import client_widths
from fedcover.types import Assignment, Batch
from tests.helpers import twins
from tests.helpers.worlds import same, world

ROUGH = {"momentum": 0.9, "weight_decay": 0.05}
SMALL = {"epochs": 1, "clients": 4, "active": 3, "fleet": "1x1.0 + 2x0.5"}
"""For models that are slow to follow by hand."""


def agree(setup, state, twin, rounds=2, tolerance=1e-9):
    """Follow both for some rounds, round by round from the same state."""
    for _ in range(rounds):
        expected, _ = twins.slow_round(setup, state, twin)
        state, _ = run_round(setup, state)
        same(state.params, expected, tolerance)
    return state


def updates_of(setup, state):
    return [
        train_client(setup.task, state, c, r, setup.lr(state.round))
        for c, r in twins.working(setup, state)
    ]


# ── FedProx, labels ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["prefix", "magnitude", "random"])
def test_prox_equals_its_twin(policy):
    setup, state = world("mlp", policy=policy, recipe="prox(mu=0.7)", **ROUGH)
    agree(setup, state, twins.prox(0.7))
    with pytest.raises(AssertionError):
        agree(setup, state, twins.prox(0.71), rounds=1)


def test_prox_of_weight_zero_is_plain():
    left, right = world("mlp", recipe="prox(mu=0)"), world("mlp")
    same(run_round(*left)[0].params, run_round(*right)[0].params)


SKEWED = {
    "dataset": "synthetic(shape=(1, 3, 4), classes=5, samples=7, test_size=50, skew=0.8)",
    "seed": 3,
}


@pytest.mark.parametrize("absent", ["free", "zero", "ignore"])
@pytest.mark.parametrize("rows", [False, True])
def test_absent_labels_equal_their_twin(absent, rows):
    setup, state = world(
        "mlp",
        policy="prefix",
        absent_labels=absent,
        label_rows=rows,
        scaler=True,
        **SKEWED,
        **ROUGH,
    )
    assert any(len(c.labels) < 5 for c, _ in twins.working(setup, state))
    agree(setup, state, twins.mask_absent_labels(absent, rows))


@pytest.mark.parametrize(
    ("absent", "third"), [("free", math.exp(3)), ("zero", 1.0), ("ignore", 0.0)]
)
def test_absent_labels_by_hand(absent, third):
    """Logits 2, 1, 3, of which the client lacks the last label; the right one is the first."""
    setup, state = world("mlp", absent_labels=absent, label_rows=True)
    client, part = twins.working(setup, state)[0]
    recipe = setup.task.recipe
    carry = recipe.start(
        Assignment(setup.task, state, replace(client, labels=(0, 1)), part), state.params
    )
    batch = Batch(torch.zeros(1), torch.tensor([0]), torch.tensor(0))
    loss = recipe.loss(lambda params, x: torch.tensor([[2.0, 1.0, 3.0]]), {}, batch, carry)
    assert float(loss) == pytest.approx(math.log(math.exp(2) + math.exp(1) + third) - 2, abs=1e-6)


def test_label_rows_are_averaged_over_their_holders():
    """A classifier row is the mean over those who hold the label, and stays where nobody does."""
    setup, state = world(
        "mlp", label_rows=True, dataset=SKEWED["dataset"].replace("skew=0.8", "skew=1.0"), seed=1
    )
    updates = updates_of(setup, state)
    after, report = run_round(setup, state)
    taught = {label: [u for u in updates if label in u.client.labels] for label in range(5)}
    assert {bool(holders) for holders in taught.values()} == {
        True,
        False,
    }  # some label is held, some is not
    for label, holders in taught.items():
        if not holders:
            assert torch.equal(
                after.params["head.weight"][label], state.params["head.weight"][label]
            )
            assert torch.equal(after.params["head.bias"][label], state.params["head.bias"][label])
        else:
            mean = sum(u.params["head.bias"][label] for u in holders) / len(holders)
            torch.testing.assert_close(after.params["head.bias"][label], mean)
    assert report.metrics["gamma_round"] == 0
    assert torch.equal(
        after.coverage.window[-1]["head.bias"].long(),
        torch.tensor([len(taught[label]) for label in range(5)]),
    )


def test_ignored_labels_and_distillation_stay_finite():
    setup, state = world(
        "mlp", policy="prefix", recipe="fjord(distil=1.0)", absent_labels="ignore", **SKEWED
    )
    after, _ = run_round(setup, state)
    assert all(bool(p.isfinite().all()) for p in after.params.values())


def test_absent_labels_of_a_sequence_use_axis_one():
    recipe = mask_absent_labels(RECIPES["plain"](), absent="ignore")
    held = torch.tensor([True, False, True])
    logits_BKL = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.zeros(2), torch.tensor([[0, 2, 0, 2], [2, 2, 0, 0]]), torch.tensor(0))
    loss = recipe.loss(lambda params, x: logits_BKL, {}, batch, ((), held))
    expected = torch.nn.functional.cross_entropy(logits_BKL[:, [0, 2]], batch.y // 2)
    torch.testing.assert_close(loss, expected)


# ── FjORD ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("distil", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fjord_equals_its_twin(model, distil):
    setup, state = world(
        model,
        policy="prefix",
        recipe=f"fjord(widths=[0.25, 0.5, 1.0], distil={distil})",
        weights="samples",
        **ROUGH,
    )
    agree(setup, state, twins.fjord((0.25, 0.5, 1.0), distil))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fjord_on_a_network_with_norms_equals_its_twin(norm):
    setup, state = world(
        "wide_resnet", policy="prefix", recipe="fjord(widths=[0.25, 0.5, 1.0])", norm=norm, **SMALL
    )
    agree(setup, state, twins.fjord((0.25, 0.5, 1.0)), rounds=1)


@pytest.mark.parametrize("widths", [(0.3, 0.4), (0.7,), (1.0, 0.2, 0.5), (0.05,)])
def test_fjord_with_widths_other_than_the_fleets(widths):
    """Clients wider than all widths, narrower than all, and between two."""
    setup, state = world("mlp", policy="prefix", recipe=f"fjord(widths={list(widths)})", **ROUGH)
    agree(setup, state, twins.fjord(widths))


def test_fjord_counts_only_widths_that_run():
    setup, state = world("mlp", policy="prefix", recipe="fjord(widths=[0.5])", fleet="1x1.0")
    after, report = run_round(setup, state)
    assert report.metrics["gamma_round"] == 0
    reached = windows(setup.task.model.groups, 0.5).mask(state.params)
    for name, mask in reached.items():
        assert torch.equal(after.coverage.window[-1][name] > 0, mask)
        assert torch.equal(after.params[name][~mask], state.params[name][~mask])


def test_fjord_draws_widths_uniformly_up_to_the_clients():
    setup, state = world(
        "mlp", policy="prefix", recipe="fjord", fleet="1x0.6", epochs=900, active=1
    )
    client, part = twins.working(setup, state)[0]
    assignment = Assignment(setup.task, state, client, part)
    assert client_widths(assignment, (0.2, 0.4, 0.6, 0.8, 1.0)) == [0.2, 0.4, 0.6]
    schedule = setup.task.recipe.start(assignment, part.extract(state.params))[1]
    result = Counter(schedule.tolist())
    assert len(schedule) == 900 * 3  # seven rows in batches of three
    assert result.keys() == {0, 1, 2}
    assert all(abs(count - 900) < 4 * (2700 * 2 / 9) ** 0.5 for count in result.values())
    other = setup.task.recipe.start(
        replace(assignment, client=replace(client, id=client.id + 1)), state.params
    )[1]
    assert not torch.equal(schedule, other)


def test_fjord_knows_the_width_behind_a_share_of_the_parameters():
    setup, state = world(
        "cnn", policy="prefix", recipe="fjord", capacity="parameters", fleet="1x0.3", active=1
    )
    client, part = twins.working(setup, state)[0]
    assert [len(part.kept[g.name]) / g.size for g in setup.task.model.groups] == [0.5, 0.5, 0.5]
    assert client_widths(Assignment(setup.task, state, client, part), (0.2, 0.4, 0.5, 0.6)) == [
        0.2,
        0.4,
        0.5,
    ]


@pytest.mark.parametrize("distil", [0.0, 1.0])
def test_fjord_running_statistics_are_of_the_widest_part(distil):
    """Only steps of the client's own width may write: with lr 0 they can be repeated by hand."""
    fields = {
        "policy": "prefix",
        "norm": "per-width",
        "recipe": f"fjord(widths=[0.5, 1.0], distil={distil})",
    }
    setup, state = world("wide_resnet", **{**SMALL, **fields, "epochs": 3, "lr": 1e-300})
    before = {
        key: {n: t.clone() for n, t in tensors.items()} for key, tensors in state.statistics.items()
    }
    client, part = next((c, r) for c, r in twins.working(setup, state) if c.capacity == 1.0)
    update = train_client(setup.task, state, client, part, 1e-300)
    schedule = setup.task.recipe.start(Assignment(setup.task, state, client, part), state.params)[1]
    assert {0, 1} == set(schedule.tolist())
    expected = twins.running_statistics(
        setup, state, client, lambda step: distil or int(schedule[step]) == 1
    )
    same(update.buffers, expected, 1e-12)
    for key, tensors in before.items():  # and the server's own are not written to
        same(state.statistics[key], tensors)


# ── Hermes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_hermes_equals_its_twin(model):
    setup, state = world(
        model, recipe="hermes(step=0.3, good_enough=0.4)", clients=6, rounds=4, **ROUGH
    )
    twin = twins.hermes(0.3, 0.4)
    state = agree(setup, state, twin, rounds=4)
    units = {
        id: {
            n.removeprefix("units."): t.nonzero().flatten().tolist()
            for n, t in client_units.items()
        }
        for id, client_units in state.private.items()
    }
    assert units == twin.kept
    assert (
        len({str(client_units) for client_units in units.values()}) > 1
    )  # clients have pruned, and not alike


def test_hermes_on_a_network_with_norms_equals_its_twin():
    setup, state = world("wide_resnet", recipe="hermes(good_enough=0.0)", **SMALL)
    agree(setup, state, twins.hermes(0.2, 0.0))


@pytest.mark.parametrize("assignment", ["device", "slot"])
def test_hermes_shrinks_to_the_capacity_and_never_grows(assignment):
    setup, state = world(
        "mlp",
        recipe="hermes(step=0.4, good_enough=0.0)",
        clients=6,
        rounds=8,
        epochs=1,
        assignment=assignment,
    )
    for _ in range(8):
        before, (state, report) = state, run_round(setup, state)
        for id, now in state.private.items():
            for name, units in now.items():
                assert not (
                    units & ~before.private.get(id, {}).get(name, torch.ones_like(units))
                ).any()
        assert report.metrics["gamma_round"] >= 0
    if assignment == "device":
        for client, _ in twins.working(setup, state):
            units_kept = {
                name: int(units.sum()) for name, units in state.private[client.id].items()
            }
            full = {1.0: (8, 6), 0.5: (4, 3), 0.25: (2, 1)}[client.capacity]
            assert units_kept == {"units.hidden1": full[0], "units.hidden2": full[1]}


def test_hermes_with_capacities_in_parameters_ends_within_them():
    setup, state = world(
        "mlp",
        recipe="hermes(step=0.9, good_enough=0.0)",
        capacity="parameters",
        fleet="1x0.5",
        clients=6,
    )
    for _ in range(3):
        state, _ = run_round(setup, state)
    groups = setup.task.model.groups
    units_kept = {
        group.name: state.private[0][f"units.{group.name}"].nonzero().flatten() for group in groups
    }
    size = sum(Slices(groups, units_kept).sizes(state.params).values())
    assert size <= 0.5 * sum(p.numel() for p in state.params.values())
    share = width_for_budget(groups, state.params, 0.5)
    assert {name: len(units) for name, units in units_kept.items()} == {
        g.name: num_units_kept(g.size, share) for g in groups
    }


def test_hermes_counts_only_kept_units():
    setup, state = world(
        "mlp", recipe="hermes(step=0.5, good_enough=0.0)", fleet="1x0.25", clients=6, rounds=3
    )
    state, first = run_round(setup, state)
    assert first.metrics["gamma_round"] == 6  # everybody trains all of it and prunes afterwards
    _, second = run_round(setup, state)
    assert second.metrics["gamma_round"] < 6
    units_kept = sum(int(units["units.hidden1"].sum()) for units in state.private.values())
    assert int(run_round(setup, state)[0].coverage.window[-1]["hidden1.bias"].sum()) == units_kept


def test_hermes_evaluation_leaves_running_statistics_unchanged():
    """The pass over the client's rows that decides on pruning is no training step."""
    setup, state = world("wide_resnet", norm="tracked", recipe="hermes(good_enough=2.0)", **SMALL)
    plain, _ = world("wide_resnet", norm="tracked", **SMALL)
    for u, v in zip(updates_of(setup, state), updates_of(plain, state), strict=True):
        same(u.buffers, v.buffers)


# ── FedMask ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["full", "prefix", "random"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fedmask_equals_its_twin(model, policy):
    setup, state = world(
        model, policy=policy, recipe="fedmask", lr=2.0, momentum=0.9, weight_decay=0.001
    )
    original = world(model)[0].task.model.module
    after = agree(setup, state, twins.fedmask(original, INITIAL_SCORE, SCORE_THRESHOLD))
    off = sum(int((scores < SCORE_THRESHOLD).sum()) for scores in after.params.values())
    assert (
        0 < off < sum(scores.numel() for scores in after.params.values())
    )  # something has been learned


@pytest.mark.parametrize("policy", ["full", "prefix"])
def test_fedmask_on_a_network_with_norms_equals_its_twin(policy):
    setup, state = world("wide_resnet", policy=policy, recipe="fedmask", lr=5.0, **SMALL)
    agree(
        setup,
        state,
        twins.fedmask(world("wide_resnet")[0].task.model.module, INITIAL_SCORE, SCORE_THRESHOLD),
        rounds=1,
    )


@pytest.mark.parametrize("model", ["mlp", "cnn", "wide_resnet"])
def test_fedmask_freezes_every_weight_and_keeps_the_groups(model):
    plain, masked = world(model)[0].task.model, world(model, recipe="fedmask", lr=2.0, **SMALL)
    setup, state = masked
    weights = {name: p for name, p in plain.module.named_parameters() if p.ndim > 1}
    assert state.params.keys() == weights.keys()
    assert [g.size for g in setup.task.model.groups] == [g.size for g in plain.groups]
    frozen = {
        name: t.clone()
        for name, t in setup.task.model.module.named_buffers()
        if "running" not in name
    }
    same(
        {n.replace("frozen", "weight"): t for n, t in frozen.items() if "frozen" in n},
        dict(weights),
    )
    after, _ = run_round(setup, state)
    assert any(not torch.equal(p, state.params[name]) for name, p in after.params.items())
    same({n: t for n, t in setup.task.model.module.named_buffers() if n in frozen}, frozen)


def test_fedmask_gradient_goes_straight_through():
    model = replace_weights_with_scores(world("mlp")[0].task.model)
    layer, x = model.module.get_submodule("hidden1"), torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[0, :6] = 0.0  # switched off, and still able to learn
    layer(x)[:, 0].sum().backward()
    torch.testing.assert_close(layer.weight.grad[0], layer.frozen[0] * x.sum(0))
    assert layer(x)[:, 0].allclose(x[:, 6:] @ layer.frozen[0, 6:] + layer.bias[0])


def test_fedmask_refuses_weights_that_it_cannot_mask():
    with pytest.raises(InvalidValue, match=r"recipe fedmask cannot mask .*Embedding"):
        replace_weights_with_scores(fc.Model(torch.nn.Sequential(torch.nn.Embedding(3, 4)), ()))


# ── FIARSE ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fiarse_equals_its_twin(model, scope):
    setup, state = world(
        model, policy=f"magnitude(scope='{scope}')", recipe=f"fiarse(scope='{scope}')", **ROUGH
    )
    agree(setup, state, twins.fiarse(scope))


def test_fiarse_without_the_surrogate_equals_its_twin():
    """The public code's mask is boolean, so its surrogate never acts."""
    setup, state = world(
        "mlp", policy="magnitude(scope='model')", recipe="fiarse(surrogate=false)", **ROUGH
    )
    agree(setup, state, twins.fiarse("model", surrogate=False))
    with pytest.raises(AssertionError):
        agree(setup, state, twins.fiarse("model"))


def test_fiarse_on_a_network_with_norms_equals_its_twin():
    setup, state = world("wide_resnet", policy="magnitude(scope='model')", recipe="fiarse", **SMALL)
    agree(setup, state, twins.fiarse("model"), rounds=1)


def test_fiarse_derivative_by_hand():
    """tau = 1: |w| = 3 gives 1 + 2*3/16, |w| = 1 gives 1 + 2/4, what is smaller gives 0."""
    weight = torch.tensor([3.0, -3.0, 1.0, -0.5, 0.0], requires_grad=True)
    chosen = _ImportanceMask.apply(weight, torch.tensor(1.0))
    assert chosen.tolist() == [3.0, -3.0, 1.0, 0.0, 0.0]
    chosen.sum().backward()
    assert weight.grad.tolist() == [1.375, 1.375, 1.5, 0.0, 0.0]


def test_fiarse_weights_leave_the_mask_and_none_enters():
    setup, state = world(
        "mlp", policy="magnitude(scope='model')", recipe="fiarse", fleet="1x0.5", momentum=0, lr=0.5
    )
    left = 0
    for u in updates_of(setup, state):
        assert isinstance(u.sent, Masks)
        tau = min(float(state.params[n][bits].abs().min()) for n, bits in u.sent.bits.items())
        for name, bits in u.sent.bits.items():
            assert not u.params[name][~bits].any()
            left += int((u.params[name][bits].abs() < tau).sum())
    assert left > 0


# ── private and frozen tensors survive a checkpoint ───────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "hermes(step=0.5, good_enough=0.0)"},
        {"recipe": "fedmask", "lr": 1.0, "policy": "prefix"},
        {
            "recipe": "prunefl(every=2)",
            "policy": "prunefl(every=2)",
            "fleet": "1x0.5",
            "uncovered": "zero",
        },
        {"server": "adam", "policy": "rolling"},
        {"server": "momentum", "policy": "rolling"},
        {"recipe": "fjord", "policy": "prefix"},
    ],
    ids=["hermes", "fedmask", "prunefl", "adam", "momentum", "fjord"],
)
def test_resumed_recipe_run_equals_an_uninterrupted_one(fields, tmp_path):
    base = {
        "fleet": "1x1.0 + 1x0.5",
        "clients": 8,
        "active": 4,
        "rounds": 5,
        "epochs": 1,
        "model": "mlp(hidden=[8])",
    }
    experiment = fc.Experiment(**{**base, **fields})
    whole = fc.run(experiment)

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment, tmp_path / "run", watch=stop)
    resumed = fc.resume(tmp_path / "run", complain=lambda sentence: None)
    assert resumed.state.round == whole.state.round == 5
    same(resumed.state.params, whole.state.params)
    for kind in ("private", "measured", "server"):
        left, right = getattr(resumed.state, kind), getattr(whole.state, kind)
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    assert resumed.accuracy == whole.accuracy
