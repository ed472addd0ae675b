"""Copies: where no device holds the whole model, `planned` trains what one holds, copies it, and
makes an ensemble.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from benchmarks.coverage.candidates import copy_first_half, twins
from benchmarks.coverage.cells import CIFAR, SHARED
from torch import nn

import fedcover as fc
from fedcover.analysis.plan_report import fleet_view
from fedcover.errors import InvalidValue
from fedcover.policies import POLICIES
from fedcover.policies.replication import copy_transform, num_copies
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.evaluation import evaluate
from fedcover.server.round import initial_state
from fedcover.submodels import coverage
from fedcover.submodels.reductions import windows
from fedcover.training.engines import ENGINES
from tests.helpers.worlds import same

FIELDS = {
    "dataset": ("synthetic(shape=(3, 8, 8), samples=20, test_size=100)"),
    "model": "wide_resnet(depth=10, widen=1)",
    "fleet": "1x0.5 + 1x0.25",
    "assignment": "slot",
    "clients": 20,
    "active": 4,
    "epochs": 1,
    "rounds": 5,
    "lr": 0.05,
}


def experiment(**changes):
    return fc.Experiment(**{**FIELDS, "policy": "planned", **changes})


def view_at(round, **changes):
    view = fleet_view(experiment(dataset="cifar10", **changes))
    return replace(view, round=round, rounds=100)


def test_planned_copies_equal_the_winner_of_the_trial():
    described = fc.Experiment(**{**SHARED, **CIFAR, "policy": "planned"})
    view = replace(fleet_view(described), rounds=described.rounds)
    for policy, round in (("prefix", 0), ("prefix", 59), (twins, 60), (twins, 99)):
        expected_parts = (POLICIES[policy] if isinstance(policy, str) else policy)(view)
        for part, theirs in zip(
            POLICIES["planned"](replace(view, round=round)), expected_parts, strict=True
        ):
            same(part.kept, theirs.kept)
    assert [copy_transform(replace(view, round=round)) is None for round in (0, 59, 61, 99)] == [
        True
    ] * 4
    setup = prepare(
        experiment(dataset="synthetic", model="wide_resnet(depth=28, widen=2)"),
        Machine().resolved(),
    )
    state = initial_state(setup)
    same(
        copy_transform(replace(view, round=60))(state.params),
        copy_first_half(view.groups, state).params,
    )


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 2),
        ({"fleet": "1x0.25"}, 4),
        ({"fleet": "1x0.3 + 1x0.1"}, 3),
        ({"fleet": "1x0.6 + 1x0.25"}, 1),
        (
            {"fleet": "1x0.25", "capacity": "parameters"},
            2,
        ),  # a quarter of the parameters is half of the width
        ({"model": "mlp(hidden=[8])", "dataset": "digits"}, 1),
        ({"model": "mlp(hidden=[8, 8])", "dataset": "digits"}, 2),
    ],
)
def test_planned_makes_as_many_copies_as_fit(changes, copies):
    described = experiment(**{"dataset": "cifar10", **changes})
    view = fleet_view(described)
    assert num_copies(view) == 1  # nothing is known of how long it will run
    view = replace(view, rounds=10, round=6)
    assert num_copies(view) == copies
    parts = POLICIES["planned"](view)
    for part, small in zip(parts, POLICIES["prefix"](view), strict=True):
        sizes = small.sizes(view.params)
        assert part.sizes(view.params) == sizes or copies == 1
    assert (copy_transform(view) is None) == (copies == 1)


@pytest.mark.parametrize(
    "wish", ["planned(copies=false)", "planned(gamma=1)", "planned(tolerate=1)"]
)
def test_planned_with_a_wish_does_not_copy(wish):
    run = fc.run(experiment(policy=wish, fleet="1x0.5", rounds=2))
    nested = fc.run(experiment(policy="prefix", fleet="1x0.5", rounds=2))
    assert run.setup.policy.grow(view_at(60)) is None
    assert fc.run(experiment(fleet="1x0.5", rounds=2)).setup.policy.grow(view_at(60)) is not None
    covered = [
        sum(int(t.sum()) for t in each.state.coverage.ever.values()) for each in (run, nested)
    ]
    assert covered[0] > covered[1]


def test_model_gives_the_same_answers_after_copying():
    """After three of five rounds the assembled model is as good as the half-width model that prefix
    has by then.
    """
    copied = fc.run(experiment())
    nested = fc.run(experiment(policy="prefix", rounds=3))
    common = replace(
        nested.state, params=coverage.covered_only(nested.state.params, nested.state.coverage)
    )
    score_before = evaluate(nested.setup.task, common, nested.setup.task.source.test)
    assert copied.metrics[2]["accuracy"] == pytest.approx(score_before.accuracy, abs=0.011)
    assert copied.metrics[1]["train_loss"] == nested.metrics[1]["train_loss"]
    between = copied.state.params["stages.1.0.conv2.weight"][:16, 16:]
    assert (
        float(between.abs().sum())
        == 0
        < float(nested.state.params["stages.1.0.conv2.weight"][:16, 16:].abs().sum())
    )


def test_statistics_and_velocity_are_copied_with_parameters():
    state = fc.run(
        experiment(norm="tracked", server="momentum", rounds=4), engine=idle_from(3)
    ).state
    for tensors in (state.params, state.server["velocity"], state.statistics["all"]):
        copied = {n: t for n, t in tensors.items() if t.ndim == 1 and len(t) in (16, 32, 64)}
        assert copied
        for name, tensor in copied.items():
            half = len(tensor) // 2
            assert torch.equal(tensor[:half], tensor[half:]), name
            assert float(tensor.abs().sum()) > 0, name


def idle_from(round):
    def engine(task, state, work, lr):
        return iter(()) if state.round >= round else ENGINES["sequential"](task, state, work, lr)

    return engine


def test_resumed_run_around_the_copy_is_bit_for_bit(tmp_path):
    machine = fc.Machine("sequential", "cpu", threads=1)

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    whole = fc.run(experiment(keep_rounds=(2, 3)), tmp_path / "whole", machine=machine)
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment(), tmp_path / "stopped", machine=machine, watch=stop)
    same(fc.resume(tmp_path / "stopped").state.params, whole.state.params)
    after, _ = fc.replay(tmp_path / "whole", 2)
    state, _ = fc.replay(tmp_path / "whole", 3)
    assert (after.round, state.round) == (3, 4)


@dataclass
class Own:
    """A policy of a user's own that has no hash, as dataclasses have none, and asks the planner."""

    options: dict

    def __call__(self, view):
        return POLICIES["planned"](view, **self.options)


def test_planned_called_directly_does_not_copy():
    one, other = (fc.run(experiment(), policy=Own(options)) for options in ({}, {"copies": False}))
    same(one.state.params, other.state.params)


@pytest.mark.parametrize(("fleet", "active"), [("1x0.25", 1), ("3x0.25", 3), ("1x0.5 + 3x0.25", 4)])
def test_every_unit_of_every_copy_is_trained_in_turn(fleet, active):
    view = view_at(60, fleet=fleet)
    parts = []
    for round in range(60, 64):
        parts += POLICIES["planned"](replace(view, round=round, cohort=view.cohort[:active]))
    for group in view.groups:
        assert {int(unit) for part in parts for unit in part.kept[group.name]} == set(
            range(group.size)
        )


def test_larger_device_holds_the_first_copy_and_part_of_the_next():
    run = fc.run(experiment(fleet="1x0.5", rounds=3, active=1))
    units = run.part(0.75).kept
    assert all(
        units[g.name].tolist() == list(range(3 * g.size // 4)) for g in run.setup.task.model.groups
    )


class Stream(nn.Module):
    """A model whose inputs run past its units, and are added to what they say."""

    def __init__(self):
        super().__init__()
        self.up, self.between, self.down, self.head = (
            nn.Linear(*s) for s in ((12, 16), (16, 16), (16, 12), (12, 5))
        )

    def forward(self, x):
        return self.head(
            torch.relu(x + self.down(torch.relu(self.between(torch.relu(self.up(x))))))
        )


def test_planned_makes_no_copies_that_meet_in_an_uncut_stream():
    plain = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    )
    data = "synthetic(shape=(12,), classes=5, samples=20, test_size=40)"
    for model, copied in ((Stream(), False), (plain, True)):
        setup = fc.run(experiment(dataset=data, fleet="1x0.5", rounds=1), model=model).setup
        view = view_of(setup, replace(initial_state(setup), round=1), cohort_of(setup, 1))
        assert (setup.policy.grow(view) is not None) == copied


def test_certificate_says_that_copying_is_outside_the_theorems(tmp_path):
    small = {
        "dataset": "digits",
        "model": "mlp(hidden=[4, 4])",
        "fleet": "1x0.5",
        "rounds": 3,
        "keep_rounds": (0,),
    }
    for policy, is_outside in (("planned", True), ("planned(copies=false)", False)):
        fc.run(experiment(**small, policy=policy), tmp_path / policy)
        outside = fc.certify(tmp_path / policy)["bounds"]["sharper"]["outside"]
        assert (
            any("changes the model between rounds, before round 2" in each for each in outside)
            == is_outside
        )


def test_planned_checks_options_that_copies_do_not_use():
    with pytest.raises(InvalidValue, match=r"share must be in \(0, 1\]; got 2"):
        POLICIES["planned"](view_at(0), share=2)


class WithShortcut(nn.Module):
    """A classifier that also reads the inputs, which nobody cuts."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(80, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.cat([self.second(self.first(x).relu()).relu(), x], dim=1))


def test_tensors_shared_by_copies_exist_once():
    """A device's part is what it was before the copying, however its classifier mixes cut and uncut
    inputs.
    """
    fields = {"dataset": "digits", "model": "mlp", "rounds": 10}
    setup = prepare(
        experiment(**fields), Machine().resolved(), overrides=Overrides(model=WithShortcut())
    )
    state = replace(initial_state(setup), round=6)
    view = view_of(setup, state, cohort_of(setup, 6))
    after = copy_transform(view)(state.params)
    assert torch.equal(after["head.weight"][:, 16:], state.params["head.weight"][:, 16:])
    [first_part] = [
        part
        for part, client in zip(setup.policy(view), view.cohort, strict=True)
        if client.slot == 0
    ]
    same(first_part.extract(after), windows(view.groups, 0.5).extract(state.params))
