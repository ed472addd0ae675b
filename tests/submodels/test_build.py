"""Sub-models are ordinary modules of their own size: attributes, values and behaviour, and what is
refused.
"""

import copy

import pytest
import torch
from torch import nn

from fedcover.errors import InvalidValue
from fedcover.models import MODELS, Scaler, params_and_buffers
from fedcover.submodels.build import load_tensors, meta_submodel, submodel
from fedcover.submodels.reductions import Masks, Slices, drawn, windows
from fedcover.types import Cut, Model, UnitGroup

SHAPE = (3, 8, 8)
SMALL = [
    ("mlp", {"hidden": [12, 8]}, "batch"),
    ("cnn", {"channels": [8, 12], "hidden": 16}, "batch"),
    ("wide_resnet", {"depth": 10, "widen": 1}, "batch"),
    ("wide_resnet", {"depth": 10, "widen": 1}, "group"),
    ("preact_resnet18", {"width": 8}, "batch"),
    ("preact_resnet18", {"width": 8}, "group"),
]
models = pytest.mark.parametrize(
    ("name", "options", "norm"), SMALL, ids=lambda part: str(part)[:12]
)


def build(name, options, norm) -> Model:
    torch.manual_seed(0)
    return MODELS[name](SHAPE, 5, norm, **options)


def parts(model):
    for share in (0.05, 0.25, 0.5, 0.75, 1.0):
        yield windows(model.groups, share, {group.name: 3 for group in model.groups})
        yield drawn(model.groups, share, key=1)
    yield Masks(
        {
            name: torch.rand(params_and_buffers(model.module)[name].shape) < 0.5
            for name in model.prunable
        }
    )
    yield Masks({})


@models
def test_sub_models_run_forward_and_backward(name, options, norm):
    model = build(name, options, norm)
    x = torch.randn(4, *SHAPE)
    for reduction in parts(model):
        part = submodel(model.module, reduction, {}).train()
        out = part(x)
        assert out.shape == (4, 5)
        nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 3])).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in part.parameters())
        assert any(bool(p.grad.any()) for p in part.parameters())


@models
def test_sub_model_layers_have_their_size(name, options, norm):
    model = build(name, options, norm)
    for reduction in parts(model):
        part = submodel(model.module, reduction, {})
        for path, layer in part.named_modules():
            whole = model.module.get_submodule(path)
            if isinstance(layer, nn.Linear):
                assert (layer.out_features, layer.in_features) == tuple(layer.weight.shape)
            if isinstance(layer, nn.Conv2d):
                assert (layer.out_channels, layer.in_channels) == tuple(layer.weight.shape[:2])
            if isinstance(layer, nn.BatchNorm2d):
                assert (
                    layer.num_features
                    == len(layer.weight)
                    == len(layer.running_mean)
                    == len(layer.running_var)
                )
            if isinstance(layer, nn.GroupNorm):
                assert layer.num_channels == len(layer.weight)
                assert (
                    layer.num_channels / layer.num_groups == whole.num_channels / whole.num_groups
                )


@models
def test_sub_model_values_are_those_of_the_reduction(name, options, norm):
    model = build(name, options, norm)
    before = {n: t.clone() for n, t in params_and_buffers(model.module).items()}
    values = {n: torch.randn_like(t) for n, t in model.module.named_parameters()}
    for reduction in parts(model):
        part = submodel(model.module, reduction, values)
        expected = reduction.extract({**before, **values})
        tensors = params_and_buffers(part)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[n], expected[n]) for n in expected)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(7)
        assert all(
            torch.equal(t, before[n]) for n, t in params_and_buffers(model.module).items()
        )  # the module is untouched
        assert not any(bool((t == 7).all()) for t in values.values())  # and so are the values


@models
def test_sub_model_is_saved_and_loaded_like_any_module(name, options, norm):
    model = build(name, options, norm)
    reduction = windows(model.groups, 0.5)
    part = submodel(model.module, reduction, {}).eval()
    other = submodel(
        build(name, options, norm).module,
        reduction,
        {n: t + 1 for n, t in params_and_buffers(model.module).items()},
    )
    other.load_state_dict(part.state_dict())
    x = torch.randn(2, *SHAPE)
    assert torch.equal(other.eval()(x), part(x))
    assert torch.equal(copy.deepcopy(part)(x), part(x))


@models
def test_meta_sub_model_has_shapes_and_no_values(name, options, norm):
    model = build(name, options, norm)
    reduction = windows(model.groups, 0.25)
    hollow = meta_submodel(model.module, reduction)
    assert all(t.is_meta for t in params_and_buffers(hollow).values())
    expected = reduction.extract(params_and_buffers(model.module))
    assert {n: t.shape for n, t in params_and_buffers(hollow).items()} == {
        n: t.shape for n, t in expected.items()
    }
    assert not any(t.is_meta for t in params_and_buffers(model.module).values())


@models
def test_scaler_divides_by_the_width(name, options, norm):
    model = build(name, options, norm)
    reduction = windows(model.groups, 0.5)
    on, off = (submodel(model.module, reduction, {}, scaler=scaler) for scaler in (True, False))
    scalers = [layer for layer in on.modules() if isinstance(layer, Scaler)]
    assert scalers
    assert all(layer.factor == 2.0 for layer in scalers)
    assert all(layer.factor == 1.0 for layer in off.modules() if isinstance(layer, Scaler))
    assert all(layer.factor == 1.0 for layer in model.module.modules() if isinstance(layer, Scaler))
    x = torch.ones(2, 3)
    assert torch.equal(scalers[0].train()(x), 2 * x)
    assert torch.equal(scalers[0].eval()(x), x)
    whole = submodel(model.module, windows(model.groups, 1.0), {}, scaler=True)
    assert all(layer.factor == 1.0 for layer in whole.modules() if isinstance(layer, Scaler))


def test_group_norm_groups_are_kept_whole():
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8))
    cuts = (Cut("0.weight", 0), Cut("0.bias", 0), Cut("1.weight", 0), Cut("1.bias", 0))
    with pytest.raises(
        InvalidValue,
        match=r"^layer '1': 2 norm groups over 8 channels cannot keep 3; .*Cut.per_unit",
    ):
        meta_submodel(module, Slices((UnitGroup("c", 8, cuts),), {"c": torch.tensor([0, 1, 2])}))
    whole = tuple(Cut(cut.tensor, 0, per_unit=4) for cut in cuts)
    part = submodel(module, Slices((UnitGroup("c", 2, whole),), {"c": torch.tensor([1])}), {})
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(
        part(x), module(x)[:, 4:]
    )  # the kept half computes what it did in the whole


def test_grouped_convolutions_are_refused_only_where_they_are_cut():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2))
    with pytest.raises(
        InvalidValue, match=r"^layer '0': a grouped convolution cannot be cut; groups is 2$"
    ):
        meta_submodel(
            module, windows((UnitGroup("c", 8, (Cut("0.weight", 0), Cut("0.bias", 0))),), 0.5)
        )
    part = submodel(module, Masks({}), {})
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(part(x), module(x))
    assert (part[0].in_channels, part[0].out_channels) == (4, 8)


@pytest.mark.parametrize(
    ("convolution", "norm", "shape"),
    [(nn.Conv1d, nn.BatchNorm1d, (3, 6)), (nn.Conv3d, nn.BatchNorm3d, (3, 4, 4, 4))],
)
def test_layers_of_other_dimensions_have_their_size(convolution, norm, shape):
    module = nn.Sequential(convolution(3, 8, 3), norm(8))
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    part = submodel(module, windows((UnitGroup("c", 8, tuple(Cut(n, 0) for n in names)),), 0.5), {})
    assert part[0].out_channels == part[1].num_features == 4
    assert part(torch.randn(2, *shape)).shape[1] == 4


def test_norm_without_scale_is_cut_by_its_statistics():
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=False))
    names = ["0.weight", "0.bias", "1.running_mean", "1.running_var"]
    part = submodel(
        module, windows((UnitGroup("c", 8, tuple(Cut(n, 0) for n in names)),), 0.25), {}
    )
    assert part[1].num_features == 2
    submodel(
        nn.Sequential(nn.BatchNorm2d(8, affine=False, track_running_stats=False)), Masks({}), {}
    )


def test_frozen_weights_stay_frozen():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    part = submodel(
        module,
        windows(
            (UnitGroup("h", 4, (Cut("0.weight", 0), Cut("0.bias", 0), Cut("1.weight", 1))),), 0.5
        ),
        {},
    )
    assert {n: p.requires_grad for n, p in part.named_parameters()} == {
        "0.weight": False, "0.bias": True, "1.weight": True, "1.bias": True,
    }  # fmt: skip


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.into(x))


def test_tied_weights_stay_tied_in_sub_models():
    module = Tied()
    group = UnitGroup("h", 4, (Cut("into.weight", 0), Cut("into.weight", 1)))
    part = submodel(module, windows((group,), 0.5), {})
    assert part.into.weight is part.out.weight
    small = module.into.weight[:2, :2]
    x = torch.randn(3, 2)
    torch.testing.assert_close(part(x), x @ small.T @ small.T)


def test_load_tensors_copies():
    module, values = nn.Linear(2, 2), {"weight": torch.ones(3, 5), "bias": torch.ones(3)}
    assert load_tensors(module, values) is module
    values["weight"].zero_()
    assert module.weight.shape == (3, 5)
    assert bool((module.weight == 1).all())
