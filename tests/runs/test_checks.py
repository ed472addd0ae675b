"""What is asked for is done or refused: no setting is silently ignored, no evaluation depends on
another.
"""

import logging
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import fedcover as fc
from fedcover.data.datasets import load
from fedcover.errors import InvalidValue
from fedcover.models import Scaler
from fedcover.runs.export import export
from fedcover.runs.setup import Overrides, prepare
from fedcover.submodels.reductions import Masks, Slices, windows

SMALL = {"clients": 20, "active": 4, "rounds": 1, "epochs": 1}
HERE = fc.Machine("sequential", "cpu", 1)


def net(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *layers, nn.ReLU(), nn.Linear(16, 10))


def prepared(own=None, **fields):
    return prepare(
        fc.Experiment(**SMALL, **fields), HERE.resolved(), overrides=Overrides(model=own)
    )


# ── settings that a model or recipe knows nothing of ──────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (net(), {"norm": "tracked"}, "norm 'tracked' keeps statistics of batch norms"),
        (net(), {"norm": "per-width"}, "has none: use 'batch'"),
        (net(nn.BatchNorm1d(16)), {"norm": "group"}, "norm is 'group', but model"),
        (net(), {"scaler": True}, "scaler needs a model with places for it"),
        (None, {"model": "softmax", "scaler": True}, "model 'softmax' has none"),
        (
            fc.Model(net(), ()),
            {"label_rows": True},
            "label_rows needs a model whose last layer is known",
        ),
        (fc.Model(net(), ()), {"policy": "magnitude"}, "names none"),
        (
            None,
            {"policy": "prunefl(every=2)", "recipe": "prunefl(every=3)"},
            "same every; got 2 and 3",
        ),
        (
            None,
            {"policy": "rolling", "recipe": "fiarse", "fleet": "1x0.5"},
            "recipe fiarse trains within masks",
        ),
        (None, {"policy": "exclude(below=0)"}, "policy exclude: below must be in"),
    ],
)
def test_settings_without_effect_are_refused(model, fields, message):
    with pytest.raises(InvalidValue, match=message):
        fc.run(fc.Experiment(**SMALL, **fields), model=model, machine=HERE)


def test_settings_with_effect_are_accepted():
    assert prepared(net(Scaler("1.weight")), scaler=True).task.scaler
    assert prepared(net(nn.BatchNorm1d(16)), norm="tracked").task.norm == "tracked"
    for name in ("mlp", "cnn"):
        assert prepared(model=name, scaler=True).task.scaler


def test_prunefl_without_its_recipe_warns(caplog):
    prepared(policy="prunefl")
    assert "policy prunefl keeps its first masks" in caplog.text


# ── models of one's own ───────────────────────────────────────────────────────────────────────────


class Tempered(nn.Module):
    """A temperature and ten rows that are not labels."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.places = nn.Parameter(torch.zeros(10, 16))
        self.embed, self.last = nn.Linear(6, 16), nn.Linear(16, 10)

    def forward(self, x):
        patches = x.flatten(1)[:, :60].reshape(len(x), 10, 6)
        return self.last((self.embed(patches) + self.places).relu().mean(1)) * self.temperature


def test_scalar_parameter_is_trained_and_no_classifier():
    setup = prepared(Tempered())
    assert setup.task.model.classifier == ("last.weight", "last.bias")
    run = fc.run(
        fc.Experiment(**SMALL, policy="prefix", fleet="1x0.5"), model=Tempered(), machine=HERE
    )
    assert run.model().temperature.item() != 1.0


class Recurrent(nn.Module):
    """Its recurrent layer cannot be cut: a softmax mixes its units."""

    def __init__(self):
        super().__init__()
        self.reader, self.last = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.reader(x.reshape(len(x), 8, 8))[0][:, -1].softmax(-1))


def test_uncuttable_module_is_trained_whole(tmp_path):
    module = Recurrent()
    run = fc.run(fc.Experiment(**SMALL, lr=0.1), tmp_path / "run", model=module, machine=HERE)
    assert run.gamma_min == 4
    assert (
        run.metrics[-1]["multiply_adds"] == 8 * 4 * 16 * (8 + 16) + 160
    )  # eight steps of four gates, and the head
    assert not torch.equal(run.model().reader.weight_hh_l0, module.reader.weight_hh_l0)
    export(run, 1.0, tmp_path / "part.safetensors")
    part = fc.load_part(tmp_path / "part.safetensors", model=Recurrent())
    assert torch.equal(part.reader.weight_hh_l0, run.model().reader.weight_hh_l0)
    with pytest.raises(
        InvalidValue,
        match=r"'softmax'.*fc\.Model\(module, fc\.trace\(module, example, whole=\('reader',",
    ):
        prepared(Recurrent(), policy="rolling")


def test_buffers_that_change_are_warned_of(caplog):
    first = nn.Sequential(
        nn.Flatten(), spectral_norm(nn.Linear(64, 16)), nn.ReLU(), nn.Linear(16, 10)
    )
    prepared(fc.Model(first, ()))
    assert "changes while the model computes; such buffers are not averaged" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        prepared(net(nn.BatchNorm1d(16)))
    assert not caplog.records


class Counting(nn.Module):
    """Cools down with every call, as it counts them in a buffer and in Python."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shown", torch.zeros(1).expand(3))  # cannot be written into
        self.again = 0

    def forward(self, x):
        self.calls += 1
        self.again += 1
        return self.net(x) / (1 + 0.05 * self.calls + 0.03 * self.again)


def test_evaluations_are_independent_of_earlier_ones(tmp_path):
    module = Counting()
    fields = {**SMALL, "rounds": 4}
    model = fc.Model(module, ())
    whole = fc.run(fc.Experiment(**fields), tmp_path / "whole", model=model, machine=HERE)

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(fc.Experiment(**fields), tmp_path / "cut", model=model, machine=HERE, watch=stop)
    resumed = fc.resume(tmp_path / "cut", model=fc.Model(Counting(), ()), machine=HERE)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    again = fc.run(fc.Experiment(**fields), model=model, machine=HERE)
    assert [line["loss"] for line in again.metrics] == losses[0]


# ── policies of one's own ─────────────────────────────────────────────────────────────────────────

UNITS = torch.arange(4)


@pytest.mark.parametrize(
    ("reductions", "message"),
    [
        (
            lambda view: Slices(view.groups, {"hidden1": torch.tensor([3, 16])}),
            "values in 0..15",
        ),
        (
            lambda view: Slices(view.groups, {"hidden1": torch.tensor([-1, 2])}),
            "invalid units in group",
        ),
        (
            lambda view: Slices(view.groups, {"hidden1": torch.tensor([2, 1])}),
            "invalid units in group",
        ),
        (lambda view: Slices(view.groups, {"hidden1": (0, 1)}), "invalid units in group"),
        (
            lambda view: Slices(view.groups, {"hidden1": torch.zeros(0, dtype=torch.int64)}),
            "invalid units in group",
        ),
        (
            lambda view: Slices(view.groups, {"hidden1": torch.ones(16, dtype=torch.bool)}),
            "invalid units in group",
        ),
        (
            lambda view: Slices(view.groups, {"other": UNITS}),
            r"the groups \['other'\]; this model has",
        ),
        (lambda view: Masks({"nowhere": UNITS.bool()}), "'nowhere', which is not a tensor"),
        (lambda view: Masks({"hidden1.weight": torch.ones(2, 2).bool()}), "booleans of shape"),
        (lambda view: Masks({"hidden1.weight": torch.ones(16, 64)}), "booleans of shape"),
    ],
)
def test_policy_parts_that_do_not_fit_the_model_are_refused(reductions, message):
    def policy(view):
        return [reductions(view) for _ in view.cohort]

    with pytest.raises(InvalidValue, match=message):
        fc.run(
            fc.Experiment(**SMALL, model="mlp(hidden=[16])", fleet="1x0.5"),
            policy=policy,
            machine=HERE,
        )


def test_policy_that_returns_no_list_is_refused():
    with pytest.raises(InvalidValue, match="policy must give a list of 4 reductions; got int"):
        fc.run(fc.Experiment(**SMALL), policy=lambda view: 3, machine=HERE)


class Precise(nn.Module):
    """Remembers how many rows it was shown, and wants them in its own type."""

    shown: ClassVar[list[int]] = []

    def __init__(self, dtype):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        ).to(dtype)

    def forward(self, x):
        self.shown.append(len(x))
        return self.body(x)


def digits_in(dtype):
    digits = load("digits")
    return fc.Dataset(
        "mine", *(fc.Samples(part.x.to(dtype), part.y) for part in (digits.train, digits.test)), 10
    )


@pytest.mark.parametrize("policy", ["prefix", "rolling", "random", "magnitude", "planned"])
def test_float64_module_trains_on_float64_data_under_cutting_policies(policy):
    experiment = fc.Experiment(**SMALL, policy=policy, fleet="1x1.0 + 1x0.5", window=2)
    run = fc.run(
        experiment, model=Precise(torch.float64), dataset=digits_in(torch.float64), machine=HERE
    )
    assert {tensor.dtype for tensor in run.state.params.values()} == {torch.float64}


@pytest.mark.parametrize("policy", ["full", "prefix"])
def test_data_of_another_dtype_than_the_module_is_refused(policy):
    cure = (
        r"; the data is float64 and the parameters are float32: give "
        r"module\.double\(\), or x\.float\(\)$"
    )
    with pytest.raises(InvalidValue, match=cure):
        fc.run(
            fc.Experiment(**SMALL, policy=policy),
            model=Precise(torch.float32),
            dataset=digits_in(torch.float64),
        )


def test_errors_name_python_models_by_their_class():
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(63, 10))
    message = r"^model Sequential \(given in Python\) cannot take data 'digits': "
    with pytest.raises(InvalidValue, match=message):
        prepared(fc.Model(wrong, ()))
    message = r"^model Sequential \(given in Python\) cannot take data 'mine' \(given in Python\): "
    with pytest.raises(InvalidValue, match=message):
        fc.run(
            fc.Experiment(**SMALL),
            model=fc.Model(wrong, ()),
            dataset=digits_in(torch.float32),
            machine=HERE,
        )
    with pytest.raises(
        InvalidValue, match=r"^model 'mlp' cannot take data 'mine' \(given in Python\): "
    ):
        fc.run(fc.Experiment(**SMALL, model="mlp"), dataset=digits_in(torch.float64), machine=HERE)
    with pytest.raises(
        InvalidValue, match=r"^scaler needs .* model Sequential \(given in Python\) has none$"
    ):
        prepared(fc.Model(net(), ()), scaler=True)


def test_warning_says_how_much_of_a_model_devices_hold(caplog):
    stiff = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.GroupNorm(1, 32), nn.Linear(32, 64), nn.Linear(64, 10)
    )
    share = (64 * 32 + 32 + 64 + 32 * 32 + 32 + 32 * 10 + 10) / (
        64 * 32 + 32 + 64 + 32 * 64 + 64 + 64 * 10 + 10
    )
    with caplog.at_level(logging.WARNING):
        prepared(stiff, policy="rolling", fleet="1x1.0 + 1x0.5")
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        f"a device holds more of its parameters: {100 * share:.1f} % at "
        "0.5; with capacity = 'parameters'"
    ) in line
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        prepared(net(), policy="rolling", fleet="1x1.0 + 1x0.5")
        prepared(stiff, policy="rolling", fleet="1x1.0 + 1x0.9", capacity="parameters")
    assert not caplog.records


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        (net(nn.BatchNorm1d(16)), {}),
        (net(nn.BatchNorm1d(16)), {"norm": "tracked"}),
        (None, {"model": "wide_resnet(depth=10, widen=1)", "norm": "tracked"}),
        (None, {"model": "mlp(hidden=[16])", "recipe": "fedmask"}),
    ],
    ids=["traced", "tracked", "declared", "fedmask"],
)
def test_policy_view_has_cuts_of_visible_tensors_only(own, fields):
    def half(view):
        assert all(cut.tensor in view.params for group in view.groups for cut in group.cuts)
        tensors.update(cut.tensor for group in view.groups for cut in group.buffers)
        return [windows(view.groups, 0.5)] * len(view.cohort)

    tensors = set()
    data = (
        {"dataset": "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)"}
        if "norm" in fields
        else {}
    )
    data = data if own is None else {}
    run = fc.run(
        fc.Experiment(**SMALL, **fields, **data, fleet="1x0.5"),
        model=own,
        policy=half,
        machine=HERE,
    )
    assert tensors
    assert run.state.round == 1
    if fields.get("norm") == "tracked":
        assert any(name.endswith("running_mean") for name in run.state.statistics["all"])


def test_policy_may_cut_the_groups_that_tracing_gave():
    module = net(nn.BatchNorm1d(16))
    model = fc.Model(module, fc.trace(module, torch.randn(4, 1, 8, 8)))
    experiment = fc.Experiment(**SMALL, fleet="1x0.5")
    run = fc.run(
        experiment,
        model=model,
        machine=HERE,
        policy=lambda view: [windows(model.groups, 0.5)] * len(view.cohort),
    )
    assert run.submodel(0.5)[2].running_mean.shape == (8,)


def test_tracing_uses_enough_rows_for_batch_norm():
    Precise.shown.clear()
    prepared(Precise(torch.float32), policy="rolling")
    assert Precise.shown[0] == 4


# ── weights that a rule does not use ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", ["median", "trimmed_mean(share=0.2)"])
def test_weights_that_the_rule_ignores_are_warned_of_once(rule, caplog, no_warnings_yet):
    for _ in range(2):
        prepared(rule=rule, weights="samples")
    (warning,) = [line for line in caplog.messages if line.startswith("weights: ")]
    assert (
        f"'samples' does not change the parameters under rule '{rule.partition('(')[0]}'" in warning
    )


@pytest.mark.parametrize(("rule", "weights"), [("median", "uniform"), ("coverage_mean", "samples")])
def test_weights_that_count_are_not_warned_of(rule, weights, caplog, no_warnings_yet):
    prepared(rule=rule, weights=weights)
    assert not [line for line in caplog.messages if line.startswith("weights: ")]
