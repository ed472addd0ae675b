"""The paper's public code, switch by switch: without switches it is the faithful algorithm, with
each it is not.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedcover.errors import InvalidValue
from fedcover.paper.explain import explain, settings
from fedcover.paper.public_code import SWITCHES, public_code
from fedcover.policies import as_policy
from fedcover.policies.paper_regions import regions
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import run_round
from tests.helpers.worlds import same, world

CODENAME = "147567"


def place(policy):
    fleet = "1x1 + 1x0.75 + 4x0.5"
    setup, state = world(
        "mlp", policy=f"regions(codename={CODENAME!r})", active=6, fleet=fleet, assignment="slot"
    )
    return replace(setup, policy=as_policy(partial(policy, codename=CODENAME))), state


def test_public_code_without_switches_is_the_regions_policy():
    faithful, state = place(regions)
    loose, _ = place(public_code)
    same(run_round(loose, state)[0].params, run_round(faithful, state)[0].params)


@pytest.mark.parametrize("switch", ["argsort", "wrong_net", "unmasked"])
def test_public_code_switch_changes_the_result(switch):
    faithful, state = place(regions)
    setup, _ = place(partial(public_code, **{switch: True}))
    left, right = run_round(setup, state)[0].params, run_round(faithful, state)[0].params
    assert not torch.equal(left["hidden1.weight"], right["hidden1.weight"])


def test_argsort_masks_are_no_ranking():
    """Its masks remove as much energy as random ones; ranks remove the least."""
    setup, state = place(regions)
    view = view_of(setup, state, cohort_of(setup, 0))
    weight = torch.rand(200, 784, generator=torch.Generator().manual_seed(0)) - 0.5
    view.params["hidden1.weight"] = weight
    removed = {}
    for argsort in (False, True):
        bits = public_code(view, codename=CODENAME, argsort=argsort)[1].mask(view.params)[
            "hidden1.weight"
        ]
        removed[argsort] = float((weight[~bits] ** 2).sum() / (weight**2).sum())
        assert int((~bits).sum()) == weight.numel() // 4
    assert removed[False] == pytest.approx(1 / 64, rel=0.05)
    assert removed[True] == pytest.approx(1 / 4, rel=0.05)


def test_wrong_net_starts_half_of_policies_6_and_7_at_zero():
    setup, state = place(public_code)
    view = view_of(setup, state, cohort_of(setup, 0))
    six = public_code(view, codename=CODENAME, wrong_net=True)[4]
    mask = six.mask(state.params)["hidden1.weight"]
    start = six.extract(state.params)["hidden1.weight"]
    assert int((start[mask] == 0).sum()) == int(mask.sum()) // 2


def test_leak_changes_only_the_start_of_round_0():
    setup, state = place(public_code)
    leaked = {name: tensor + 1 for name, tensor in state.params.items()}
    for round, expected in ((0, leaked), (1, state.params)):
        view = view_of(setup, replace(state, round=round), cohort_of(setup, 0))
        parts = public_code(view, codename=CODENAME, leaked=leaked)
        masks = parts[1].mask(state.params)["hidden1.weight"]
        start = parts[1].extract(state.params)["hidden1.weight"]
        assert torch.equal(start[masks], expected["hidden1.weight"][masks])
        assert torch.equal(
            parts[0].extract(state.params)["head.weight"], state.params["head.weight"]
        )


@pytest.mark.system
def test_explain_compares_every_switch_with_the_faithful_algorithm():
    rows = explain("1111444477", seeds=[0], dataset="digits", rounds=2, clients=20)
    assert [row["setting"] for row in rows] == ["faithful", *SWITCHES, "all"]
    by_name = {row["setting"]: row for row in rows}
    assert by_name["leak"]["first_round"] > by_name["faithful"]["first_round"]
    assert by_name["argsort"]["noise"] > 2 * by_name["faithful"]["noise"]
    assert all(0 < row["accuracy"] <= 1 for row in rows)


def test_unknown_switch_is_refused():
    with pytest.raises(InvalidValue, match="switch must be one of argsort"):
        settings(["typo"])
