"""PruneFL: what clients measure, the greedy choice against a loop that follows its definition, and
whole runs.
"""

from dataclasses import replace

import pytest
import torch

from fedcover.errors import InvalidValue
from fedcover.policies.prunefl import Reconfiguration, prunefl, reconfigure
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import run_round
from fedcover.types import Engine
from tests.helpers import twins
from tests.helpers.worlds import same, world

FIELDS = {
    "fleet": "3x1.0 + 3x0.5",
    "policy": "prunefl(every=2)",
    "recipe": "prunefl(every=2)",
    "uncovered": "zero",
}


def by_definition(view, kept, greedy):
    """Weights one by one: the certain stay; the best candidate joins while it beats the ratio of
    what is kept.

    A candidate is a kept weight among the smallest `share` of its layer, or a pruned one. The ratio
    is the sum of squared gradients of all that is kept, never pruned weights included, over its
    time and the overhead.
    """
    squares = view.measured["squared_gradient"]
    chosen, candidates = {name: [False] * view.params[name].numel() for name in view.prunable}, []
    gain = sum(float(squares[name].sum()) for name in view.params if name not in view.prunable)
    time = 0.0
    for name in view.prunable:
        seconds = view.uses[name] + greedy.traffic
        time += greedy.overhead * seconds * view.params[name].numel()
    for name in view.prunable:
        seconds = view.uses[name] + greedy.traffic
        sizes, mask_bits = view.params[name].abs().flatten().tolist(), kept[name].flatten().tolist()
        present = sorted(
            (i for i, bit in enumerate(mask_bits) if bit), key=lambda i, sizes=sizes: -sizes[i]
        )
        staying = set(present[: len(present) - int(len(present) * greedy.share)])
        for i, square in enumerate(squares[name].flatten().tolist()):
            if i in staying:
                chosen[name][i] = True
                gain, time = gain + square, time + seconds
            else:
                candidates.append((square / seconds, name, i, square, seconds))
    count = sum(sum(bits) for bits in chosen.values())
    for ratio, name, i, square, seconds in sorted(candidates, key=lambda candidate: -candidate[0]):
        if ratio <= gain / time or count == greedy.budget:
            break
        chosen[name][i] = True
        gain, time, count = gain + square, time + seconds, count + 1
    return {name: torch.tensor(bits).view_as(view.params[name]) for name, bits in chosen.items()}


def random_view(seed, model="cnn"):
    """A view with measurements of very different sizes, and a mask that is in force."""
    setup, state = world(model, **FIELDS)
    draw = torch.Generator().manual_seed(seed)
    squares = {
        n: torch.rand(p.shape, generator=draw, dtype=p.dtype) ** 4 for n, p in state.params.items()
    }
    bits = {
        n: torch.rand(state.params[n].shape, generator=draw) < 0.5
        for n in setup.task.model.prunable
    }
    view = view_of(
        setup, replace(state, measured={"squared_gradient": squares}), cohort_of(setup, 0)
    )
    return view, bits


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("share", [0.3, 0.05, 1.0])
def test_reconfiguration_equals_its_definition(model, seed, share):
    view, bits = random_view(seed, model)
    sizes = {name: view.params[name].numel() for name in view.prunable}
    for overhead, traffic, budget in [
        (0.1, 6.0, 10**6),
        (2.0, 0.0, 10**6),
        (0.1, 6.0, sum(sizes.values()) * 6 // 10),
    ]:
        greedy = Reconfiguration(share, overhead, traffic, budget)
        same(reconfigure(view, bits, greedy), by_definition(view, bits, greedy))


def test_reconfiguration_removes_and_restores_weights():
    """Both kinds of candidates: kept ones that go, pruned ones that return.

    Else the comparison would be empty.
    """
    view, bits = random_view(1)
    new = reconfigure(view, bits, Reconfiguration(0.3, 0.1, 6.0, 10**6))
    num_removed = sum(int((bits[name] & ~new[name]).sum()) for name in bits)
    came = sum(int((~bits[name] & new[name]).sum()) for name in bits)
    stayed_out = sum(int((~bits[name] & ~new[name]).sum()) for name in bits)
    assert min(num_removed, came, stayed_out) > 0


def test_weights_used_more_often_need_larger_gradients():
    view, bits = random_view(2)
    even = {
        **view.measured["squared_gradient"],
        **{n: torch.ones_like(view.params[n]) for n in view.prunable},
    }
    view = replace(view, measured={"squared_gradient": even})
    assert view.uses["conv2.weight"] > view.uses["hidden.weight"]
    greedy = Reconfiguration(1.0, 0.1, 0.0, view.params["hidden.weight"].numel())
    new = reconfigure(view, bits, greedy)
    assert new["hidden.weight"].all()
    assert not new["conv2.weight"].any()


def test_clients_measure_gradients_of_pruned_weights():
    setup, state = world("mlp", weight_decay=0.05, momentum=0.9, **FIELDS)
    for q in range(4):
        expected, updates = twins.slow_round(setup, state, twins.plain)
        earlier = (
            state.measured["squared_gradient"] if q % 2 else None
        )  # sums begin anew every two rounds
        state, _ = run_round(setup, state)
        same(
            {n: state.params[n][c > 0] for n, c in state.coverage.window[-1].items()},
            {n: expected[n][c > 0] for n, c in state.coverage.window[-1].items()},
            1e-9,
        )
        mean = {n: sum(slow.more[n] for _, slow in updates) / len(updates) for n in state.params}
        if earlier:
            mean = {n: mean[n] + earlier[n] for n in mean}
        same(state.measured["squared_gradient"], mean, 1e-9)
        outside = ~updates[0][1].counts["hidden1.weight"]
        assert bool(outside.any())
        assert bool((state.measured["squared_gradient"]["hidden1.weight"][outside] > 0).any())


def mask_of(setup, state):
    view = view_of(setup, state, cohort_of(setup, state.round))
    return next(part for part in setup.policy(view) if part is not None).bits


def test_prunefl_mask_is_common_and_changes_only_when_due():
    """Eight rounds, three re-configurations, never above the smallest device; then a twin repeats
    each choice.
    """
    setup, state = world("mlp", lr=0.3, **{**FIELDS, "rounds": 8})
    budget = sum(state.params[name].numel() for name in setup.task.model.prunable) // 2
    masks = []
    for _ in range(8):
        view = view_of(setup, state, cohort_of(setup, state.round))
        parts = setup.policy(view)
        assert all(part is parts[0] for part in parts)
        masks.append(parts[0].bits)
        assert sum(int(bits.sum()) for bits in masks[-1].values()) <= budget
        if state.round in (2, 4, 6):
            share = 0.3 * 0.5 ** (state.round / 10_000)
            same(
                masks[-1], by_definition(view, masks[-2], Reconfiguration(share, 0.1, 6.0, budget))
            )
        state, report = run_round(setup, state)
        for name, bits in masks[-1].items():
            assert not state.params[name][~bits].any()
        assert report.metrics["histogram"]["6"] == sum(
            int(bits.sum()) for bits in masks[-1].values()
        ) + sum(p.numel() for n, p in state.params.items() if n not in masks[-1])
    for q in range(1, 8):
        alike = all(torch.equal(masks[q][name], masks[q - 1][name]) for name in masks[q])
        assert alike == (q % 2 == 1), q


@pytest.mark.parametrize(
    ("initial", "due", "share"), [(0, 4, 0.2), (4, 4, 0.8), (6, 4, 0.8), (2, 6, 0.2), (2, 4, 0.4)]
)
def test_candidate_share_halves_every_half_life(initial, due, share):
    """With a half-life of two rounds, 0.8 becomes 0.4 two rounds after the initial ones and 0.2
    four rounds after.
    """
    view, mask_bits = random_view(3, "mlp")
    masked = {
        name: bits.double() * due for name, bits in mask_bits.items()
    }  # the mask of the rounds before the choice
    view = replace(view, round=due, measured={**view.measured, "trained_in": masked}, levels=(1.0,))
    options = {"every": 2, "initial": initial, "share": 0.8, "half_life": 2.0}
    mask = next(part for part in prunefl(view, **options) if part is not None)
    budget = sum(view.params[name].numel() for name in view.prunable)
    same(mask.bits, by_definition(view, mask_bits, Reconfiguration(share, 0.1, 6.0, budget)))


def by_hand(squares, kept, share, budget, uses=None):
    """The choice among four weights 4, 3, 2, 1 that take 1 + 1 each (2 + 1 under other uses),
    overhead 0.25 of all.
    """
    view, _ = random_view(0, "mlp")
    params = {"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}
    measured = {"squared_gradient": {"w": torch.tensor(squares)}}
    view = replace(view, params=params, prunable=("w",), measured=measured, uses=uses or {})
    chosen = reconfigure(view, {"w": torch.tensor(kept)}, Reconfiguration(share, 0.25, 1.0, budget))
    return chosen["w"].int().tolist()


def test_candidate_joins_only_above_the_ratio_of_kept_weights():
    """Kept: gains 6 + 2 in a time of 2 (overhead) + 4, a ratio of 8/6.

    A candidate of gain g takes 2: g/2 > 8/6.
    """
    mask_bits = [True, True, False, False]
    assert by_hand([6.0, 2.0, 2.7, 0.0], mask_bits, 0.0, 4) == [1, 1, 1, 0]
    assert by_hand([6.0, 2.0, 2.6, 0.0], mask_bits, 0.0, 4) == [1, 1, 0, 0]
    assert by_hand([6.0, 3.0, 3.0, 0.0], mask_bits, 0.0, 4) == [
        1,
        1,
        0,
        0,
    ]  # 3/2 equals 9/6, and is not more


def test_no_candidate_joins_a_full_budget():
    assert by_hand([1.0, 1.0, 9.0, 9.0], [True, True, False, False], 0.0, 2) == [1, 1, 0, 0]
    assert by_hand([1.0, 1.0, 9.0, 8.0], [True, True, False, False], 0.0, 3) == [1, 1, 1, 0]


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_prunefl_mask_survives_rounds_without_answers(silent):
    """Whether the silent round is one before a re-configuration, the very one, or one after it."""
    setup, state = world("mlp", lr=0.3, **{**FIELDS, "window": 1, "uncovered": "keep"})
    nobody = replace(setup, engine=Engine(lambda task, state, work, lr: []))
    masks = []
    for q in range(4):
        masks.append(mask_of(setup, state))
        state, _ = run_round(nobody if q == silent else setup, state)
    same(masks[0], masks[1])
    same(masks[2], masks[3])
    assert any(not torch.equal(masks[1][name], masks[2][name]) for name in masks[1])
    same(mask_of(setup, replace(state, round=3)), masks[3])


def test_prunefl_starts_with_the_strongest_client():
    setup, state = world("mlp", **{**FIELDS, "policy": "prunefl(every=2, initial=3)"})
    for q in range(5):
        cohort = cohort_of(setup, q)
        after, report = run_round(setup, state)
        strongest = max(client.capacity for client in cohort)
        trained = [c for c in cohort if str(c.id) in report.metrics["clients"]]
        assert len(trained) == (1 if q < 3 else len(cohort))
        assert q >= 3 or trained[0].capacity == strongest
        state = after


def test_prunefl_without_measurements_keeps_the_largest_weights():
    setup, state = world("mlp", fleet="1x0.5", policy="prunefl(every=1)")
    state, _ = run_round(setup, state)
    for name, bits in mask_of(setup, state).items():
        sizes = state.params[name].abs()
        assert int(bits.sum()) == bits.numel() // 2
        assert float(sizes[bits].min()) >= float(sizes[~bits].max())


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"share": 0.0},
        {"share": 1.1},
        {"half_life": 0.0},
        {"overhead": 0.0},
        {"traffic": -1.0},
    ],
)
def test_prunefl_refuses_wrong_options(wrong):
    view, _ = random_view(0, "mlp")
    with pytest.raises(InvalidValue, match=f"policy prunefl: .*{next(iter(wrong))}"):
        prunefl(view, **wrong)


@pytest.mark.parametrize(
    "right", [{"share": 1.0}, {"half_life": 0.5}, {"traffic": 0.0}, {"traffic": 0.5}]
)
def test_prunefl_accepts_options_at_their_limits(right):
    view, _ = random_view(0, "mlp")
    assert len(prunefl(replace(view, measured={}), **right)) == len(view.cohort)


@pytest.mark.parametrize("policy", ["prefix", "random"])
def test_gradients_are_measured_under_unit_policies(policy):
    setup, state = world(**{**FIELDS, "policy": policy, "recipe": "prunefl(every=5)"})
    for _ in range(3):  # the second round goes on with what the first has measured
        before, (state, _) = state, run_round(setup, state)
    squares = state.measured["squared_gradient"]
    assert {name: t.shape for name, t in squares.items()} == {
        name: t.shape for name, t in state.params.items()
    }
    assert all(bool((squares[name] >= 0).all()) for name in squares)
    assert sum(float(t.sum()) for t in squares.values()) > sum(
        float(t.sum()) for t in before.measured["squared_gradient"].values()
    )
