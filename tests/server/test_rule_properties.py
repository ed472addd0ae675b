"""Properties of aggregation, masking and evaluation that hold for every entry of the tables."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.registry import options_of
from fedcover.server.aggregation import (
    OVER,
    RULES,
    SUMMABLE_RULES,
    UNWEIGHTED_RULES,
    coverage_mean,
    trimmed_mean,
)
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.contracts import build_rule
from fedcover.server.evaluation import evaluate
from fedcover.server.round import run_round
from fedcover.submodels.reductions import Masks, Slices
from fedcover.training.local_sgd import train_client
from fedcover.types import Cut, Engine, Samples, UnitGroup
from tests.helpers.worlds import same, world

GROUPS = (
    UnitGroup("a", 4, (Cut("w", 0), Cut("b", 0))),
    UnitGroup("c", 3, (Cut("w", 1, per_unit=2),)),
)
SHAPES = {"w": (4, 6), "b": (4,), "free": (2,)}


def tensors(draw):
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def some_reduction(draw):
    """A random structured or unstructured reduction of the tensors above."""
    if torch.rand((), generator=draw) < 0.5:
        return Masks({"w": torch.rand(4, 6, generator=draw) < 0.5})
    kept = {}
    for group in GROUPS:
        number = 1 + int(torch.randint(group.size, (), generator=draw))
        kept[group.name] = torch.randperm(group.size, generator=draw)[:number].sort().values
    return Slices(GROUPS, kept)


def parts_of(draw, clients):
    reductions = [some_reduction(draw) for _ in range(clients)]
    return [(r, r.extract(tensors(draw)), 1.0 + i) for i, r in enumerate(reductions)]


def test_summable_rules_have_the_options_of_the_table():
    for name, make in SUMMABLE_RULES.items():
        assert options_of(make) == options_of(RULES[name])


@pytest.mark.parametrize("over", OVER)
@given(seed=st.integers(0, 10_000), clients=st.integers(0, 5))
@settings(max_examples=20)
def test_rule_sums_of_two_processes_add_up(over, seed, clients):
    draw = torch.Generator().manual_seed(seed)
    old, parts = tensors(draw), parts_of(draw, clients)
    rule = build_rule(f"coverage_mean(over={over})")
    same(rule(old, parts), coverage_mean(old, parts, over=over))
    sums = rule.sum_updates(old, parts[::2])
    for tensor, other in zip(
        sums.tensors(), rule.sum_updates(old, parts[1::2]).tensors(), strict=True
    ):
        tensor += other
    same(rule.finish(old, sums), rule(old, parts), 1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
class TestEveryRule:
    """What each aggregation rule promises."""

    @given(seed=st.integers(0, 10_000), clients=st.integers(1, 5))
    @settings(max_examples=50)
    def test_rule_keeps_untrained_entries(self, rule, seed, clients):
        draw = torch.Generator().manual_seed(seed)
        old, parts = tensors(draw), parts_of(draw, clients)
        new = rule(old, parts)
        for name, tensor in old.items():
            held = torch.stack([r.mask(old)[name] for r, _, _ in parts]).any(0)
            assert torch.equal(new[name][~held], tensor[~held])
            assert torch.isfinite(new[name]).all()

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=25)
    def test_rule_is_independent_of_client_order(self, rule, seed):
        draw = torch.Generator().manual_seed(seed)
        old, parts = tensors(draw), parts_of(draw, 5)
        same(rule(old, parts), rule(old, parts[::-1]), 1e-12)

    def test_rule_without_clients_changes_nothing(self, rule):
        old = tensors(torch.Generator().manual_seed(0))
        same(rule(old, []), old)

    def test_rule_does_not_modify_old_values(self, rule):
        draw = torch.Generator().manual_seed(0)
        old = tensors(draw)
        before = {name: tensor.clone() for name, tensor in old.items()}
        rule(old, parts_of(draw, 3))
        same(old, before)

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=50)
    def test_rule_never_reads_outside_the_mask(self, rule, seed):
        draw = torch.Generator().manual_seed(seed)
        old = tensors(draw)
        masks = [Masks({"w": torch.rand(4, 6, generator=draw) < 0.5}) for _ in range(3)]
        clean = [(mask, mask.extract(tensors(draw)), 1.0) for mask in masks]
        poisoned = [
            (
                mask,
                {n: torch.where(mask.mask(old)[n], t, torch.nan) for n, t in values.items()},
                weight,
            )
            for mask, values, weight in clean
        ]
        same(rule(old, poisoned), rule(old, clean))


AVERAGES = {
    **{name: make() for name, make in SUMMABLE_RULES.items()},
    "trimmed_mean of nothing": partial(trimmed_mean, share=0.0),
}
"""Rules that are means: those that can be summed, and the trimmed mean where it trims nothing."""


@pytest.mark.parametrize("rule", AVERAGES.values(), ids=AVERAGES.keys())
def test_rule_on_full_coverage_is_federated_averaging(rule):
    draw = torch.Generator().manual_seed(0)
    old, sent = tensors(draw), [tensors(draw) for _ in range(4)]
    new = rule(old, [(Masks({}), values, 1.0) for values in sent])
    means = {name: torch.stack([values[name] for values in sent]).mean(0) for name in old}
    same(new, means, 1e-12)


@given(seed=st.integers(0, 10_000), clients=st.integers(1, 6))
@settings(max_examples=50)
def test_coverage_mean_equals_its_formula(seed, clients):
    draw = torch.Generator().manual_seed(seed)
    old, parts = tensors(draw), parts_of(draw, clients)
    expected = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in old.items():
        for place in (
            torch.cartesian_prod(*[torch.arange(n) for n in tensor.shape])
            .view(-1, tensor.ndim)
            .tolist()
        ):
            total = weight = 0.0
            for reduction, values, scale in parts:
                mask = reduction.mask(old)[name]
                if mask[tuple(place)]:
                    position = tuple(_rank(mask, axis, index) for axis, index in enumerate(place))
                    at = position if isinstance(reduction, Slices) else tuple(place)
                    total, weight = total + scale * values[name][at].item(), weight + scale
            if weight:
                expected[name][tuple(place)] = total / weight
    same(coverage_mean(old, parts), expected, 1e-12)


def _rank(mask, axis, index):
    """The place of an index among the kept ones of its axis."""
    others = tuple(a for a in range(mask.ndim) if a != axis)
    return int((mask.any(others) if others else mask)[:index].sum())


def test_masked_weight_stays_zero_through_momentum_and_decay():
    setup, state = world(
        "mlp", policy="magnitude", momentum=0.9, weight_decay=0.1, fleet="1x0.5", clients=6
    )
    cohort = cohort_of(setup, 0)
    client, mask = cohort[0], setup.policy(view_of(setup, state, cohort))[0]
    update = train_client(setup.task, state, client, mask, lr=0.1)
    for name, bits in mask.bits.items():
        assert not bits.all()
        assert (update.params[name][~bits] == 0).all()
        assert (update.params[name][bits] != state.params[name][bits]).any()


def test_round_is_independent_of_answer_order():
    setup, state = world("mlp", policy="random")
    engine = setup.engine
    backwards = replace(
        setup, engine=Engine(lambda task, state, work, lr: engine(task, state, work[::-1], lr))
    )
    forward, _ = run_round(setup, state)
    backward, _ = run_round(backwards, state)
    same(forward.params, backward.params)


@pytest.mark.parametrize("model", ["mlp", "wide_resnet"])
def test_evaluation_does_not_depend_on_the_test_batch(model, monkeypatch):
    setup, state = world(model, policy="prefix")
    test = setup.task.source.test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(1))
    whole = evaluate(setup.task, state, test)
    monkeypatch.setattr("fedcover.server.evaluation.EVAL_BATCH_SIZE", {"cpu": 7})
    shuffled = evaluate(setup.task, state, Samples(test.x[order], test.y[order]))
    assert shuffled.accuracy == whole.accuracy
    assert shuffled.loss == pytest.approx(whole.loss, rel=1e-10)


def test_evaluation_on_batch_statistics_depends_on_the_test_batch():
    """The public codes' way, kept only for comparison: this is what the calibration mends."""
    setup, state = world("wide_resnet", policy="prefix")
    test = setup.task.source.test
    mixed = evaluate(setup.task, state, Samples(test.x[:20], test.y[:20]), mode="batch-compat")
    part = evaluate(setup.task, state, Samples(test.x[:10], test.y[:10]), mode="batch-compat")
    rest = evaluate(setup.task, state, Samples(test.x[10:20], test.y[10:20]), mode="batch-compat")
    assert mixed.loss != pytest.approx((part.loss + rest.loss) / 2, rel=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_called_unweighted_exactly_if_it_is(name):
    """The weights of two clients are swapped; only a rule that uses them notices."""
    old = {"w": torch.zeros(1)}
    parts = [
        (Masks({}), {"w": torch.tensor([value])}, weight)
        for value, weight in ((1.0, 3.0), (2.0, 1.0))
    ]
    swapped = [(part, values, 4.0 - weight) for part, values, weight in parts]
    ignores = torch.equal(RULES[name](old, parts)["w"], RULES[name](old, swapped)["w"])
    assert ignores == (name in UNWEIGHTED_RULES)
