"""A policy is one function of a view, or two: one that assigns parts and one that changes the
model.
"""

from functools import partial
from inspect import getdoc

import pytest

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.policies import POLICIES, as_policy
from fedcover.policies.planned import planned
from fedcover.registry import options_of
from fedcover.types import Policy
from tests.helpers.worlds import same

BRIEF = {"fleet": "1x1.0 + 1x0.5", "clients": 4, "active": 2, "rounds": 2, "epochs": 1}
COPIED = fc.Experiment(fleet="1x0.5", model="mlp(hidden=[8, 8])", clients=4, active=2, rounds=1)


def halves(view, *, far=False):
    """Every client trains half of the units."""
    start = {group.name: group.size // 2 if far else 0 for group in view.groups}
    return [fc.windows(view.groups, 0.5, start) for _ in view.cohort]


def doubled(view, *, far=False):
    """The model is doubled before the second round, unless the far half is trained."""
    if view.round != 1 or far:
        return None
    return lambda tensors: {name: 2 * tensor for name, tensor in tensors.items()}


OWN = Policy(halves, doubled)


def run(policy, **fields):
    return fc.run(fc.Experiment(**BRIEF, **fields), policy=policy)


def test_function_is_a_policy_without_growth():
    policy = as_policy(halves)
    assert (policy.assign, policy.grow, policy.name) == (halves, None, None)
    assert as_policy(policy) is policy


@pytest.mark.parametrize("name", POLICIES)
def test_policy_of_the_table_describes_itself(name):
    policy = POLICIES[name]
    assert (policy.name, repr(policy)) == (name, f"policy {name}")
    assert options_of(policy) == options_of(policy.assign)
    assert getdoc(policy) == getdoc(policy.assign)


def test_options_are_bound_in_both_functions():
    far = run(OWN.with_options(far=True))
    near = run(OWN)
    assert near.setup.policy.grow is doubled
    same(far.state.params, run(partial(halves, far=True)).state.params)
    with pytest.raises(AssertionError):
        same(near.state.params, run(halves).state.params)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        planned,
        POLICIES["planned"],
        POLICIES["planned"].with_options(share=0.5),
    ],
    ids=str,
)
def test_planned_copies_however_it_is_given(policy):
    experiment = COPIED if policy else replace_policy("planned")
    assert fc.run(experiment, policy=policy).setup.policy.grow is not None


def test_a_partial_does_not_drop_the_growth_of_a_policy_without_a_word():
    with pytest.raises(InvalidValue, match=r"partial of policy planned, .* with \.with_options"):
        run(partial(planned, share=0.5))


def test_planned_copies_when_named_by_its_path():
    setup = fc.run(replace_policy("fedcover.policies.planned:planned")).setup
    assert (setup.policy.name, setup.policy.grow is not None) == ("planned", True)


def replace_policy(policy):
    return COPIED.model_copy(update={"policy": policy})
