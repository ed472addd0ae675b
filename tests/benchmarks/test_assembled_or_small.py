"""The candidates of the trial: what they train, how a model is changed midway, and the whole
course.
"""

from dataclasses import replace

import pytest
import torch
from benchmarks.coverage import sheets
from benchmarks.coverage.candidates import copy_first_half, open_third_quarter, star, twins
from benchmarks.coverage.cells import CIFAR, SHARED, TUNING_SEED, Cell

from benchmarks import assembled_or_small as trial
from fedcover.analysis.plan_report import fleet_view
from fedcover.policies import POLICIES
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.round import initial_state
from fedcover.submodels import coverage

MACHINE = Machine(device="cpu", engine="sequential", threads=1).resolved()
DIGITS = {
    **SHARED,
    **CIFAR,
    "dataset": "digits",
    "model": "mlp(hidden=[16, 8])",
    "clients": 20,
    "rounds": 8,
    "epochs": 1,
}


@pytest.fixture(scope="module")
def setup():
    fields = {
        **DIGITS,
        "dataset": "synthetic(shape=(3, 8, 8), samples=20, test_size=40)",
        "validation": 0.0,
    }
    return prepare(Experiment(**{**fields, "model": "wide_resnet(depth=10, widen=1)"}), MACHINE)


@pytest.mark.parametrize("policy", [star, twins])
def test_candidate_parts_match_device_capacity(policy):
    view = fleet_view(Experiment(**DIGITS))
    prefix = POLICIES["prefix"](view)
    for part, same_size in zip(policy(view), prefix, strict=True):
        assert part.sizes(view.params) == same_size.sizes(view.params)


def test_star_fringes_and_twins_are_disjoint():
    view = fleet_view(Experiment(**DIGITS))
    weight = {"hidden2.weight": view.params["hidden2.weight"]}
    counts = coverage.count(weight, star(view))["hidden2.weight"]
    assert counts[2:4, 8:12].sum() == counts[4:6, 4:8].sum() == 0
    assert int(counts[:6, :12].max()) == 10
    counts = coverage.count(weight, twins(view))["hidden2.weight"]
    assert counts[:4, 8:].sum() == counts[4:, :8].sum() == 0
    assert min(int(counts[:4, :8].min()), int(counts[4:, 8:].min())) > 0


def test_doubled_model_gives_twice_the_logits_of_its_half(setup):
    state, groups = initial_state(setup), setup.task.model.groups
    half = twins(replace(fleet_view(Experiment(**DIGITS)), groups=groups))[0]
    small = {n: torch.zeros_like(t) for n, t in state.params.items()}
    half.add_into(small, half.extract(state.params), 1.0)
    one, two = (
        logits_of(setup, params) for params in (small, copy_first_half(groups, state).params)
    )
    bias = state.params[
        next(n for n in state.params if n.endswith("bias") and state.params[n].shape == (10,))
    ]
    torch.testing.assert_close(two - bias, 2 * (one - bias), rtol=1e-4, atol=1e-4)


def test_opened_quarter_does_not_affect_the_output(setup):
    state, groups = initial_state(setup), setup.task.model.groups
    changed = {n: t.clone() for n, t in open_third_quarter(groups, state).params.items()}
    before = logits_of(setup, changed)
    for group in groups:
        for cut in group.cuts:
            if cut.axis == 0 and cut.tensor in changed:
                quarter = slice(cut.start + group.size // 2, cut.start + 3 * group.size // 4)
                changed[cut.tensor][quarter] += 1.0
    torch.testing.assert_close(logits_of(setup, changed), before)


def logits_of(setup, params):
    return torch.func.functional_call(
        setup.task.model.module.train(), params, (setup.task.source.test.x[:8],)
    )


def test_trial_runs_from_start_to_table(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "PREFIX", Cell("cifar/prefix", {**DIGITS, "policy": "prefix"}))
    shorter = {n: replace(c, start=c.start // 16) for n, c in trial.CANDIDATES.items()}
    monkeypatch.setattr(trial, "CANDIDATES", shorter)
    trial.choose(tmp_path, MACHINE, (TUNING_SEED, 0))
    tried = {name: sheets.read(tmp_path, trial.cell_of(name))["tuning"] for name in shorter}
    assert all(len(lines) == 1 for lines in tried.values())
    assert [len(lines[0]["curve"]) for lines in tried.values()] == [8] * 5
    prefix = sheets.read(tmp_path, trial.PREFIX)
    assert [line["seed"] for line in prefix["runs"]] == [0]
    assert tried["twins60"][0]["curve"][:3] == prefix["tuning"][0]["curve"][:3]
    trial.judge(tmp_path, MACHINE, (0, 1))
    name = trial.best(tmp_path)
    assert [line["seed"] for line in sheets.read(tmp_path, trial.cell_of(name))["runs"]] == [0, 1]
    assert f"Chosen: `{name}`" in trial.table(tmp_path)
    assert "2 seeds" in trial.table(tmp_path)
