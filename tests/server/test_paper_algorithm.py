"""A round equals the slow reference of Algorithm 1, for every model, policy and switch."""

import pytest

from fedcover.fleet import drops_out
from fedcover.policies import POLICIES
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import run_round
from tests.helpers.reference import reference_round
from tests.helpers.worlds import same, world

NAMED = {
    **{name: name for name in POLICIES},
    "regions": "regions(codename='147256')",
    "rolling": "rolling(spread=true)",
}


def agree(setup, state, rounds=2):
    """Follow both for some rounds from the same state; the reference leads."""
    for _ in range(rounds):
        cohort = cohort_of(setup, state.round)
        planned = zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True)
        work = [
            (client, part)
            for client, part in planned
            if part is not None
            and not drops_out(client.id, setup.experiment.drop_out, setup.task.seed, state.round)
        ]
        expected = reference_round(setup, state, work)
        state, _ = run_round(setup, state)
        same(state.params, expected, 1e-9)


def setting(policy):
    """A codename brings its own fleet."""
    if not policy.startswith("regions"):
        return {"policy": policy}
    return {
        "policy": policy,
        "fleet": "1x1 + 1x0.75 + 1x0.5 + 1x0.75 + 2x0.5",
        "assignment": "slot",
        "active": 6,
    }


@pytest.mark.parametrize("policy", NAMED.values(), ids=NAMED.keys())
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_policies_equal_the_reference(model, policy):
    agree(*world(model, **setting(policy)))


@pytest.mark.parametrize("policy", ["prefix", "random", "magnitude"])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("model", ["wide_resnet", "preact_resnet18"])
def test_residual_networks_with_norms_equal_the_reference(model, norm, policy):
    agree(
        *world(
            model, norm=norm, policy=policy, epochs=1, clients=4, active=3, fleet="1x1.0 + 2x0.5"
        ),
        rounds=1,
    )


@pytest.mark.parametrize("policy", ["prefix", "rolling", "random", "magnitude"])
@pytest.mark.parametrize("model", ["transformer", "lstm", "lora"])
def test_language_model_and_adapters_equal_the_reference(model, policy):
    if (model, policy) == ("lora", "magnitude"):
        pytest.skip("adapters have nothing that may be pruned")
    agree(*world(model, policy=policy, epochs=1, clients=800, active=3, batch_size=4), rounds=1)


def test_subnet_regions_equal_the_reference():
    agree(*world("cnn", **setting("regions(codename='147256', kind='subnet')")))


@pytest.mark.parametrize("model", ["mlp", "cnn", "wide_resnet", "preact_resnet18"])
def test_scaler_equals_the_reference(model):
    agree(*world(model, policy="prefix", scaler=True, epochs=1, active=3), rounds=1)


@pytest.mark.parametrize(
    "switch",
    [
        {"weights": "samples"},
        {"drop_out": 0.5},
        {"weight_decay": 0.05, "momentum": 0.9},
        {"clip": 0.05},
        {"schedule": "steps(at=[1])"},
        {"assignment": "slot"},
        {"capacity": "parameters", "fleet": "3x0.6 + 3x0.4"},
    ],
    ids=lambda switch: next(iter(switch)),
)
@pytest.mark.parametrize("policy", ["rolling", "magnitude"])
def test_switches_equal_the_reference(policy, switch):
    agree(*world("mlp", policy=policy, **switch))


def test_reference_can_disagree():
    """A wrong learning rate is noticed: the comparison above is able to fail."""
    setup, state = world("mlp", policy="prefix")
    wrong, _ = world("mlp", policy="prefix", lr=0.11)
    cohort = cohort_of(setup, 0)
    expected = reference_round(
        setup, state, list(zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True))
    )
    after, _ = run_round(wrong, state)
    with pytest.raises(AssertionError):
        same(after.params, expected, 1e-9)
