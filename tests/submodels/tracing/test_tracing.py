"""Tracing finds the groups that our models declare, refuses what it cannot cut, and changes
nothing.
"""

import copy
import importlib.util
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.models import MODELS
from fedcover.runs.export import export_onnx
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import Slices, drawn
from fedcover.submodels.tracing import trace
from fedcover.submodels.tracing.size_constraints import SIZE_CONSTRAINTS
from fedcover.submodels.tracing.tracer import record_trace
from fedcover.submodels.tracing.verify import verify_groups
from fedcover.types import Model, UnitGroup
from tests.helpers.idioms import ACCEPTED, REFUSED, Written
from tests.helpers.repository import ROOT
from tests.helpers.zoo import zoo

IMAGE = (3, 16, 16)


DECLARED = {
    "mlp": [(IMAGE, "batch", {"hidden": [8, 6]})],
    "cnn": [(IMAGE, "batch", {"channels": [4, 6], "hidden": 8})],
    "wide_resnet": [(IMAGE, norm, {"depth": 10, "widen": 1}) for norm in ("batch", "group")],
    "preact_resnet18": [(IMAGE, norm, {"width": 8}) for norm in ("batch", "group")],
    "transformer": [((6,), "batch", {"width": 8, "heads": 4, "blocks": 2, "hidden": 8})],
    "lstm": [
        ((6,), "batch", {"hidden": 8, **more}) for more in ({}, {"labels": "last"}, {"layers": 3})
    ],
    "lora": [((5,), "batch", {"hidden": [8], "rank": 4})],
}
"""Models of ours whose groups are widths, in a size for tests."""


FROZEN = {"lora": ("hidden1.up",)}
"""What a model leaves whole on purpose: the hidden units of a network of which only adapters are
learned.
"""


def places(groups):
    """What groups cut, whatever they are called and in whichever order."""
    return {(group.size, frozenset(group.cuts)) for group in groups}


class TestOurModels:
    """Tracing and declaring agree."""

    @pytest.mark.parametrize("name", DECLARED)
    def test_traced_groups_equal_declared_ones(self, name):
        for shape, norm, options in DECLARED[name]:
            model = MODELS[name](shape, 5, norm, **options)
            example = (
                torch.randint(5, (3, *shape))
                if name in ("transformer", "lstm")
                else torch.randn(3, *shape)
            )
            assert places(trace(model.module, example, whole=FROZEN.get(name, ()))) == places(
                model.groups
            )

    def test_depth_model_can_be_cut_in_width(self):
        model = MODELS["depth_resnet"](IMAGE, 5, "batch", width=4, stages=2, blocks=1)
        assert all(
            cut.axis is not None
            for group in trace(model.module, torch.randn(3, *IMAGE))
            for cut in group.cuts
        )

    def test_declared_groups_cover_every_model(self):
        assert set(MODELS) == {
            *DECLARED,
            "depth_resnet",
            "softmax",
        }  # softmax has no hidden units: it cuts its inputs


@pytest.mark.parametrize("name", REFUSED)
def test_uncuttable_model_is_refused_by_name(name):
    make, shape, sentence = REFUSED[name]
    with pytest.raises(InvalidValue, match=rf"^tracing: .*{sentence}"):
        trace(make(), torch.randn(shape))


@pytest.mark.parametrize("name", ACCEPTED)
def test_cuttable_model_is_traced(name):
    make, shape, expected = ACCEPTED[name]
    module = make()
    groups = trace(module, torch.randn(shape))
    assert {group.name: group.size for group in groups} == expected


class TestManners:
    """Tracing leaves no trace."""

    def test_tracing_leaves_module_and_random_state_unchanged(self):
        module, example = zoo("gpt")
        module.eval()
        before, hooks = copy.deepcopy(module), len(module._forward_hooks)
        state, units = torch.get_rng_state(), example.clone()
        trace(module, example)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(example, units)
        assert all(
            torch.equal(tensor, before.state_dict()[key])
            for key, tensor in module.state_dict().items()
        )
        assert (module.training, type(module.h[0].attn.n_head), len(module._forward_hooks)) == (
            False,
            int,
            hooks,
        )

    def test_tracing_is_deterministic(self, traced):
        assert trace(*zoo("unet")) == traced("unet")

    def test_layers_named_whole_are_not_cut(self):
        module = nn.Sequential(
            nn.Linear(5, 6), nn.Softmax(-1), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2)
        )
        assert [group.name for group in trace(module, torch.randn(3, 5), whole=("0",))] == ["2"]
        with pytest.raises(InvalidValue, match=r"^whole must be one of 0, 2; got '9'$"):
            trace(module, torch.randn(3, 5), whole=("9",))

    def test_untraceable_call_is_reported_as_fedcovers_limit(self, monkeypatch):
        monkeypatch.setitem(SIZE_CONSTRAINTS, "chunk", lambda labels, args, kwargs, out: args[9])
        make, shape, _ = ACCEPTED["halves"]
        with pytest.raises(
            InvalidValue, match=r"^tracing: fedcover cannot follow operation 'chunk' in the model"
        ):
            trace(make(), torch.randn(shape))

    def test_weight_norm_layers_have_their_size(self):
        make, shape, _ = ACCEPTED["weight norm of linear layers"]
        module = make()
        part = submodel(module, drawn(trace(module, torch.randn(shape)), 0.5, key=0), {})
        assert (part[0].out_features, part[2].in_features) == (3, 3)
        assert part[0].parametrizations.weight.original1.shape == (3, 5)

    def test_refusal_hint_works(self):
        make, shape, _ = REFUSED["recurrent layer that reads units along time"]
        assert [group.name for group in trace(make(), torch.randn(shape), whole=("a",))] == ["r"]
        vit, example = zoo("vit")
        assert all(
            not g.name.startswith("blocks.0") for g in trace(vit, example, whole=("blocks.0",))
        )

    def test_bfloat16_module_is_verified_in_float64(self):
        module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).bfloat16()
        assert [group.size for group in trace(module, torch.randn(3, 5).bfloat16())] == [6]

    def alike(self, difference):
        """A batch norm of two rows that hardly differ, and these rows."""
        module = nn.Sequential(
            nn.Linear(50, 64),
            nn.Tanh(),
            nn.Linear(64, 6),
            nn.BatchNorm1d(6, eps=1e-30),
            nn.Linear(6, 2),
        )
        return module.double(), torch.randn(1, 50).double() + difference * torch.randn(
            2, 50
        ).double()

    def test_rounding_does_not_cause_a_refusal(self):
        assert [group.size for group in trace(*self.alike(1e-3))] == [64, 6]

    def test_missing_cut_is_noticed_behind_rounding(self):
        module, example = self.alike(1e-3)
        first, second = trace(module, example)
        for at in range(len(first.cuts)):
            broken = UnitGroup(first.name, first.size, first.cuts[:at] + first.cuts[at + 1 :])
            with pytest.raises(InvalidValue, match=r"cutting '0'"):
                verify_groups(
                    module, (example,), (broken, second), record_trace(module, (example,))
                )

    def test_rounding_noise_alone_asks_for_more_rows(self):
        with pytest.raises(
            InvalidValue, match=r"^tracing: rounding alone changes .* give an example of more rows$"
        ):
            trace(*self.alike(1e-9))

    def test_tracing_with_several_inputs(self):
        module = Written(
            lambda m, x, y: m.b(torch.cat([m.a(x), y], 1)), a=nn.Linear(5, 6), b=nn.Linear(8, 2)
        )
        (group,) = trace(module, (torch.randn(3, 5), torch.randn(3, 2)))
        assert [(cut.tensor, cut.start) for cut in group.cuts] == [
            ("a.weight", 0),
            ("a.bias", 0),
            ("b.weight", 0),
        ]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=12)
def test_random_networks_are_cut(seed):
    """Chains of layers, residuals, concatenations and halves: whatever is found can be sliced and
    agrees.
    """
    draw = torch.Generator().manual_seed(seed)
    module = Chain([int(kind) for kind in torch.randint(5, (5,), generator=draw)])
    example = torch.randn(4, 6, generator=draw)
    groups = trace(module, example)
    assert groups
    units = {
        g.name: torch.randperm(g.size, generator=draw)[: max(1, g.size // 2)].sort().values
        for g in groups
    }
    assert submodel(module, Slices(groups, units), {})(example).shape == (4, 3)


class Chain(nn.Module):
    """A network drawn from five kinds of steps."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.layers, width = kinds, nn.ModuleList([nn.Linear(6, 8)]), 8
        for kind in kinds:
            out = width + 4 if kind == 2 else width
            self.layers.append(
                nn.Linear(width, 4 if kind == 2 else 2 * width if kind == 3 else width)
            )
            self.layers.append(nn.BatchNorm1d(out) if kind != 4 else nn.LayerNorm(out))
            width = out
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.layers[0](x)
        for i, kind in enumerate(self.kinds):
            y = self.layers[2 * i + 1](x.relu())
            if kind == 1:
                y = x + y
            elif kind == 2:
                y = torch.cat([x, y], dim=-1)
            elif kind == 3:
                value, gate = y.chunk(2, dim=-1)
                y = value * gate.sigmoid()
            x = self.layers[2 * i + 2](y)
        return self.head(x)


def test_traced_model_trains_in_a_federation():
    module = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Flatten(),
        nn.Linear(216, 10),
    )
    model = Model(module, trace(module, torch.randn(2, 1, 8, 8)))
    experiment = fc.Experiment(
        fleet="1x1.0 + 1x0.5", policy="rolling", clients=20, active=4, rounds=2, epochs=1
    )
    run = fc.run(experiment, model=model)
    assert run.submodel(0.5)[3].groups == 3
    assert run.accuracy > 0.1


def test_onnx_export_without_packages_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InvalidValue, match=r"^writing ONNX needs onnx and onnxscript; .*: pip install"
    ):
        export_onnx(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "no.onnx")


def test_tracing_page_code_runs():
    names: dict[str, object] = {}
    text = (ROOT / "docs" / "tracing.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "tracing.md", "exec"), names)
    assert names["half"][3].groups == 8
