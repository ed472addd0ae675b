"""Scores by hand, and local accuracy against a twin that asks client by client and sample by
sample.
"""

import math
from dataclasses import replace

import pytest
import torch

from fedcover.models.norms import calibrate
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.evaluation import (
    FULL_REDUCTION,
    client_accuracies,
    eval_model,
    evaluate,
    logits,
    score,
)
from fedcover.server.round import initial_state
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import windows
from fedcover.types import Samples


def test_score_by_hand():
    logits_BK = torch.tensor(
        [[math.log(3.0), 0.0], [0.0, math.log(3.0)], [math.log(3.0), 0.0], [0.0, math.log(3.0)]]
    )
    score_of_part = score(logits_BK, torch.tensor([0, 1, 1, 1]))
    assert score_of_part.accuracy == 0.75
    assert score_of_part.loss == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4)


def test_logits_are_concatenated_in_order():
    module = torch.nn.Linear(3, 2)
    x = torch.randn(11, 3)
    for batch in (1, 4, 11, 100):
        torch.testing.assert_close(logits(module, x, batch), module(x).detach())
    assert not logits(module, x).requires_grad


def uneven(model="mlp(hidden=[8])", **fields):
    """Digits in uneven shares, so that clients differ in labels and samples."""
    defaults = {
        "dataset": "digits",
        "partition": "dirichlet(alpha=0.2)",
        "model": model,
        "fleet": "2x1 + 2x0.5 + 2x0.25",
        "policy": "prefix",
        "clients": 6,
        "active": 6,
        "epochs": 1,
        "lr": 0.1,
        "rounds": 1,
        "calibration": 50,
    }
    setup = prepare(Experiment(**{**defaults, **fields}), Machine(device="cpu").resolved())
    return setup, initial_state(setup)


def updates_of(setup, state):
    cohort = cohort_of(setup, state.round)
    work = list(zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True))
    return list(setup.engine(setup.task, state, work, setup.lr(0)))


def slow_local_accuracy(setup, state, updates, *, as_trained):
    test = setup.task.source.test
    shares, weight = 0.0, 0
    for update in updates:
        part = submodel(setup.task.model.module, update.sent, state.params)
        if as_trained:
            load_tensors(part, update.params)
        calibrate(part, setup.task.source.calibration)
        answers = part(test.x).argmax(1).tolist()
        truth = test.y.tolist()
        rows = [i for i, label in enumerate(truth) if label in update.client.labels]
        right = sum(answers[i] == truth[i] for i in rows)
        shares += update.client.samples * right / len(rows)
        weight += update.client.samples
    return shares / weight


@pytest.mark.parametrize("policy", ["prefix", "rolling(spread=true)", "magnitude"])
def test_local_accuracy_equals_a_loop_over_clients(policy):
    setup, state = uneven(policy=policy)
    updates = updates_of(setup, state)
    assert len({u.client.samples for u in updates}) > 1
    assert any(len(u.client.labels) < 10 for u in updates)
    own, trained = client_accuracies(setup.task, state, updates)
    assert own == pytest.approx(
        slow_local_accuracy(setup, state, updates, as_trained=False), abs=1e-9
    )
    assert trained == pytest.approx(
        slow_local_accuracy(setup, state, updates, as_trained=True), abs=1e-9
    )
    assert trained > own  # the state is still the first one


def test_local_accuracy_with_norms_equals_a_loop():
    data = "synthetic(shape=(3, 8, 8), samples=12, test_size=60, skew=0.7)"
    setup, state = uneven("wide_resnet(depth=10, widen=1)", dataset=data, partition="iid")
    updates = updates_of(setup, state)
    own, trained = client_accuracies(setup.task, state, updates)
    assert own == pytest.approx(
        slow_local_accuracy(setup, state, updates, as_trained=False), abs=1e-9
    )
    assert trained == pytest.approx(
        slow_local_accuracy(setup, state, updates, as_trained=True), abs=1e-9
    )


def test_local_accuracy_leaves_out_clients_without_test_samples():
    setup, state = uneven()
    updates = updates_of(setup, state)
    stranger = replace(updates[0], client=replace(updates[0].client, labels=(77,), samples=10**6))
    assert client_accuracies(setup.task, state, [*updates, stranger]) == client_accuracies(
        setup.task, state, updates
    )


def test_evaluation_of_a_part_equals_its_module():
    setup, state = uneven()
    test = setup.task.source.test
    part = windows(setup.task.model.groups, 0.5)
    score_of_part = evaluate(setup.task, state, test, reduction=part, capacity=0.5)
    hidden, head = state.params["hidden1.weight"][:4], state.params["head.weight"][:, :4]
    layer = torch.relu(test.x.flatten(1) @ hidden.T + state.params["hidden1.bias"][:4])
    expected = score(layer @ head.T + state.params["head.bias"], test.y)
    assert score_of_part.accuracy == expected.accuracy
    assert score_of_part.loss == pytest.approx(expected.loss, abs=1e-5)
    assert evaluate(setup.task, state, test).loss != score_of_part.loss


def test_evaluation_changes_nothing():
    setup, state = uneven()
    before = {name: t.clone() for name, t in state.params.items()}
    module = {name: t.clone() for name, t in setup.task.model.module.state_dict().items()}
    few = Samples(setup.task.source.test.x[:20], setup.task.source.test.y[:20])
    score_of_part = evaluate(setup.task, state, few)
    other = replace(state, params={name: -t for name, t in state.params.items()})
    assert evaluate(setup.task, other, few).loss != score_of_part.loss
    assert all(torch.equal(t, before[name]) for name, t in state.params.items())
    assert all(
        torch.equal(t, module[name]) for name, t in setup.task.model.module.state_dict().items()
    )
    assert not eval_model(setup.task, state, FULL_REDUCTION, 1.0).training
