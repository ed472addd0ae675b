"""Stacked layers lead to the same rounds as `sequential`.

Here a slow twin replaces the Triton kernels. tests/test_cuda.py compares the kernels with the twin
on a GPU.
"""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fedcover.training.engines import stacked_layers
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import eager_backend
from fedcover.training.engines.stacked_layers import StackedLayers
from tests.helpers import kernel_twin
from tests.helpers.engines import agree
from tests.helpers.worlds import same, world

LAYERS = {
    "plain": nn.Conv2d(3, 5, 3, padding=1, bias=False),
    "stride": nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False),
    "one": nn.Conv2d(3, 5, 1, stride=2, bias=False),
    "bias": nn.Conv2d(3, 5, 3),
    "uneven": nn.Conv2d(3, 5, (3, 1), padding=(1, 0)),
    "same": nn.Conv2d(3, 5, 3, padding="same"),
    "grouped": nn.Conv2d(3, 6, 3, groups=3),
    "dilated": nn.Conv2d(3, 5, 2, dilation=2),
    "norm": nn.BatchNorm2d(3, track_running_stats=False),
    "tracked": nn.BatchNorm2d(3).eval(),
    "bare": nn.BatchNorm2d(3, affine=False, track_running_stats=False),
}


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The twin in the kernels' place, and how often each of them was asked."""
    calls = dict.fromkeys(("convolve", "conv_weight_grad", "batch_norm", "batch_norm_backward"), 0)

    def counted(name):
        def call(*args, **kwargs):
            calls[name] += 1
            return getattr(kernel_twin, name)(*args, **kwargs)

        return call

    stand_in = type(sys)("stacked_kernels")
    for name in calls:
        setattr(stand_in, name, counted(name))
    for module in ("triton_conv", "triton_norm"):
        monkeypatch.setitem(sys.modules, f"fedcover.training.engines.{module}", stand_in)
    return calls


@pytest.mark.parametrize("policy", ["prefix", "magnitude", "rolling(spread=true)"])
def test_stacked_layers_equal_sequential(policy, asked, monkeypatch):
    monkeypatch.setattr(stacked_layers, "uses_stacked_kernels", lambda *_: True)
    agree(
        *world("wide_resnet", policy=policy, epochs=1, assignment="slot"),
        partial(batched, backend=eager_backend),
    )
    assert all(asked.values())


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_stacked_layer_has_the_gradients_of_its_clients(layer):
    layer = layer.double()
    torch.manual_seed(0)
    x = torch.rand(4, 2, 3, 7, 7, dtype=torch.double)
    params = {
        name: torch.rand(4, *p.shape, dtype=torch.double) for name, p in layer.named_parameters()
    }

    def loss(params, x):
        return torch.func.functional_call(layer, params, (x,)).sin().square().sum()

    both = grad(loss, argnums=(0, 1))
    expected = [
        both({name: p[client] for name, p in params.items()}, x[client]) for client in range(4)
    ]
    with StackedLayers():
        weights, inputs = vmap(both)(params, x)
    same({"x": inputs}, {"x": torch.stack([each[1] for each in expected])}, 1e-10)
    same(
        weights, {name: torch.stack([each[0][name] for each in expected]) for name in params}, 1e-10
    )


def test_stacked_layer_keeps_float32_weights_in_bf16(asked):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    params = {name: torch.rand(2, *p.shape) - 0.5 for name, p in layer.named_parameters()}
    x = torch.rand(2, 5, 3, 6, 6).bfloat16()

    def loss(params, x):
        return torch.func.functional_call(layer, params, (x,)).float().square().mean()

    with StackedLayers():
        result = vmap(grad(loss))(params, x)
    assert asked["convolve"] == 1  # the images need no gradient
    for client in range(2):
        expected = grad(loss)({name: p[client] for name, p in params.items()}, x[client].float())
        for name, gradient in expected.items():
            assert result[name].dtype == torch.float32
            distance = (result[name][client] - gradient).norm() / gradient.norm()
            assert 0 < distance < 0.02  # bf16 has eight bits


def test_stacked_norm_of_a_single_value_is_refused():
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    with StackedLayers(), pytest.raises(ValueError, match="more than 1 value"):
        vmap(norm)(torch.rand(2, 1, 3, 1, 1))


@pytest.mark.parametrize(
    ("module", "usable"),
    [
        (
            nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
            ),
            True,
        ),
        (nn.Sequential(nn.Linear(4, 2)), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv1d(3, 4, 3)), False),
    ],
    ids=["images", "no images", "another norm", "another convolution"],
)
def test_stacked_kernels_are_used_for_known_layers_only(module, usable, monkeypatch):
    monkeypatch.setattr(stacked_layers, "find_spec", lambda name: name)
    assert stacked_layers.has_stacked_kernels(module) == usable
    monkeypatch.setattr(stacked_layers, "find_spec", lambda name: None)
    assert not stacked_layers.has_stacked_kernels(module)
