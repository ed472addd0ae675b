"""The averaged model: its values, its place in a run, and that nothing else changes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.export import export
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.averaging import AVERAGES, MEAN
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import initial_state, run_round
from fedcover.types import Params
from tests.helpers.runs import assert_same_end, tiny
from tests.helpers.worlds import same

pytestmark = pytest.mark.usefixtures("only_the_cpu")

ON_CPU = Machine("sequential", "cpu", 1)
COPYING = {
    "dataset": "synthetic(shape=(3, 8, 8), samples=20, test_size=100)",
    "model": "wide_resnet(depth=10, widen=1)",
    "policy": "planned",
    "fleet": "1x0.5 + 1x0.25",
    "assignment": "slot",
    "clients": 20,
    "active": 4,
    "epochs": 1,
    "rounds": 5,
}
"""A run whose model is copied before round 3."""


def models_and_average(experiment: fc.Experiment) -> tuple[list[Params], Params]:
    """Return the parameters after each round, and the average at the end."""
    setup = prepare(experiment, ON_CPU.resolved())
    state = initial_state(setup)
    models = []
    for _ in range(experiment.rounds):
        state, _ = run_round(setup, state)
        models.append(state.params)
    return models, state.average[MEAN]


def mean_of(models: list[Params]) -> Params:
    return {
        name: torch.stack([model[name].double() for model in models]).mean(0).float()
        for name in models[0]
    }


@pytest.mark.parametrize(
    ("average", "first"),
    [
        ("window(rounds=3)", 4),
        ("window(rounds=2)", 5),
        ("window(rounds=50)", 0),
        ("window(rounds=50, start=3)", 2),
        ("window(rounds=1)", 6),
    ],
)
def test_a_window_is_the_mean_of_the_last_models(average, first):
    models, averaged = models_and_average(tiny(rounds=7, average=average))
    same(averaged, mean_of(models[first:]), 1e-6)


def test_an_ema_is_a_plain_mean_that_turns_into_a_weighted_one():
    models, averaged = models_and_average(tiny(rounds=7, average="ema(decay=0.75, start=2)"))
    expected = mean_of(models[1:5])
    for model in models[5:]:
        expected = {name: 0.75 * expected[name] + 0.25 * model[name] for name in expected}
    same(averaged, expected, 1e-6)


@pytest.mark.parametrize("name", sorted(set(AVERAGES) - {"none"}))
def test_an_average_counts_every_model_between_nought_and_whole(name):
    schedule = AVERAGES[name](start=3)
    rates = [schedule(round, 40) for round in range(1, 41)]
    assert rates[:2] == [None, None]
    assert rates[2] == 1
    assert all(0 < rate <= 1 for rate in rates[2:])


def test_an_average_changes_nothing_but_its_own_metrics():
    plain = fc.run(tiny(validation=0.2), machine=ON_CPU)
    with_average = fc.run(tiny(validation=0.2, average="window(rounds=2)"), machine=ON_CPU)
    same(with_average.state.params, plain.state.params, 0)
    for old, new in zip(plain.metrics, with_average.metrics, strict=True):
        added = set(new) - set(old)
        assert added == {
            "accuracy_averaged",
            "loss_averaged",
            "validation_accuracy_averaged",
            "validation_loss_averaged",
        }
        assert {key: new[key] for key in old if key != "seconds"} == {
            key: old[key] for key in old if key != "seconds"
        }


def test_metrics_and_models_of_the_average_agree():
    run = fc.run(tiny(average="ema"), machine=ON_CPU)
    test = run.setup.task.source.test
    with torch.no_grad():
        predictions: Tensor = run.model(averaged=True)(test.x).argmax(1)
    accuracy = float((predictions == test.y).double().mean())
    assert run.summary["accuracy_averaged"] == pytest.approx(accuracy)
    assert run.summary["accuracy_averaged"] == run.metrics[-1]["accuracy_averaged"]


def test_there_is_no_average_before_its_start():
    run = fc.run(tiny(average="window(rounds=2, start=3)"), machine=ON_CPU)
    assert ["accuracy_averaged" in line for line in run.metrics] == [False, False, True, True]


@pytest.mark.parametrize("fields", [{}, COPYING], ids=["plain", "copying"])
def test_a_resumed_run_has_the_same_average(tmp_path, fields):
    experiment = tiny(**{**fields, "average": "ema(decay=0.5)"})

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    whole = fc.run(experiment, tmp_path / "whole", machine=ON_CPU)
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment, tmp_path / "stopped", machine=ON_CPU, watch=stop)
    resumed = fc.resume(tmp_path / "stopped", machine=ON_CPU)
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")
    same(resumed.state.average[MEAN], whole.state.average[MEAN], 0)
    same(fc.load(tmp_path / "whole").state.average[MEAN], whole.state.average[MEAN], 0)


def test_the_average_is_copied_with_the_model():
    models, averaged = models_and_average(tiny(**{**COPYING, "average": "window(rounds=50)"}))
    setup = prepare(tiny(**COPYING), ON_CPU.resolved())
    copied_state = replace(initial_state(setup), round=3, params=mean_of(models[:2]))
    copy = setup.policy.grow(view_of(setup, copied_state, cohort_of(setup, 3)))
    mean_after_copying = copy(copied_state.params)
    same(averaged, mean_of([mean_after_copying, mean_after_copying, *models[2:]]), 1e-5)


@pytest.mark.parametrize("machine", [Machine(device="cpu", processes=2)], ids=["two processes"])
def test_processes_have_the_average_of_one(machine):
    experiment = tiny(average="ema(decay=0.5)")
    alone = fc.run(experiment, machine=ON_CPU)
    together = fc.run(experiment, machine=machine)
    same(together.state.average[MEAN], alone.state.average[MEAN], 1e-6)
    assert together.summary["accuracy_averaged"] == pytest.approx(
        alone.summary["accuracy_averaged"], abs=0.01
    )


@pytest.mark.system
def test_runs_side_by_side_have_the_averages_of_single_runs():
    variants = [tiny(seed=seed, average="ema(decay=0.5)", name=f"s{seed}") for seed in (0, 1)]
    machine = Machine("batched", "cpu", 1)
    finished = list(fc.sweep(variants, machine=machine))
    assert len(finished) == 2
    for run in finished:
        alone = fc.run(run.experiment, machine=machine)
        losses = [line["loss_averaged"] for line in run.metrics]
        assert losses == pytest.approx([line["loss_averaged"] for line in alone.metrics], rel=1e-3)


def test_privacy_costs_the_same_with_an_average():
    pytest.importorskip("cryptography")
    fields = {"clip_updates": 1.0, "privacy": "gaussian(noise=1.0)"}
    plain = fc.run(tiny(**fields), machine=ON_CPU)
    averaged = fc.run(tiny(**fields, average="ema"), machine=ON_CPU)
    assert averaged.summary["epsilon"] == plain.summary["epsilon"]


def test_an_experiment_without_an_average_has_its_old_digest():
    assert fc.Experiment(average="none").digest == fc.Experiment().digest == "9fdb84df8a121f5d"
    assert fc.Experiment(average="ema").digest != fc.Experiment().digest


def test_an_exported_average_loads_as_the_averaged_part(tmp_path):
    run = fc.run(tiny(average="ema(decay=0.5)"), machine=ON_CPU)
    export(run, 0.5, tmp_path / "part.safetensors", averaged=True)
    x = run.setup.task.source.test.x[:8]
    loaded = fc.load_part(tmp_path / "part.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(x), run.submodel(0.5, averaged=True)(x))
        assert not torch.equal(loaded(x), run.submodel(0.5)(x))


def test_a_run_without_an_average_says_so():
    run = fc.run(tiny(rounds=1), machine=ON_CPU)
    with pytest.raises(RunError, match="no averaged model: see the field average"):
        run.model(averaged=True)


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ("window(start=9)", r"must begin within the 4 rounds of the run; got 'window\(start=9\)'"),
        ("window(rounds=0)", "rounds must be at least 1; got 0"),
        ("window(start=0)", "start is a round, counted from 1; got 0"),
        ("ema(decay=1.0)", "decay must be between 0 and 1; got 1"),
        ("ema(weight=1)", "its options are: decay, start"),
        ("mean", "average must be one of ema, none, window"),
    ],
)
def test_options_of_an_average_are_checked(average, message):
    with pytest.raises(InvalidValue, match=message):
        fc.run(tiny(average=average), machine=ON_CPU)


def halving():
    """A user's schedule: every model counts one half."""
    return lambda round, rounds: 0.5


def of_one_number():
    """A schedule that does not take the number of rounds."""
    return lambda round: 1.0


def nonsense():
    """A schedule that returns no rate."""
    return lambda round, rounds: round


def test_an_average_of_ones_own_is_named_by_its_path():
    own = fc.run(tiny(average=f"{__name__}:halving"), machine=ON_CPU)
    same(
        own.state.average[MEAN],
        models_and_average(tiny(average="ema(decay=0.5)"))[1],
        1e-6,
    )
    with pytest.raises(
        InvalidValue, match=r"must return a number in \(0, 1\], or None; got 4 for round 4"
    ):
        fc.run(tiny(average=f"{__name__}:nonsense"), machine=ON_CPU)
    with pytest.raises(InvalidValue, match="must make a function of a round and the number of"):
        fc.run(tiny(average=f"{__name__}:of_one_number"), machine=ON_CPU)
