"""What a reduction costs, against figures worked out by hand."""

import pytest
import torch
from torch import nn

from fedcover.models import cnn, mlp, preact_resnet18, wide_resnet
from fedcover.submodels.cost import cost, memory_to_train, uses_of_weights
from fedcover.submodels.reductions import Masks, Slices, drawn, windows
from fedcover.types import Cut, Model, UnitGroup

MNIST = (1, 28, 28)


def params_of(model):
    return {name: p.detach() for name, p in model.module.named_parameters()}


def paid(model, reduction, shape):
    return cost(reduction, params_of(model), uses_of_weights(model.module, shape))


@pytest.mark.parametrize("hidden", [1, 50, 100, 150, 200])
def test_cost_of_mlp_sub_networks(hidden):
    model = mlp(MNIST, 10, "batch")
    cost = paid(model, windows(model.groups, hidden / 200), MNIST)
    assert cost.parameters == 795 * hidden + 10
    assert cost.multiply_adds == 794 * hidden
    assert cost.bytes_up == 4 * cost.parameters
    assert cost.bytes_down == 4 * cost.parameters + 9


def test_cost_of_the_cnn_by_hand():
    model = cnn(MNIST, 10, "batch")
    whole = paid(model, Masks({}), MNIST)
    assert whole.parameters == (9 * 32 + 32) + (9 * 32 * 64 + 64) + (64 * 49 * 128 + 128) + (
        128 * 10 + 10
    )
    assert whole.multiply_adds == 784 * 9 * 32 + 196 * 9 * 32 * 64 + 64 * 49 * 128 + 1280
    half = paid(model, windows(model.groups, 0.5), MNIST)
    assert half.parameters == (9 * 16 + 16) + (9 * 16 * 32 + 32) + (32 * 49 * 64 + 64) + (
        64 * 10 + 10
    )
    assert half.multiply_adds == 784 * 9 * 16 + 196 * 9 * 16 * 32 + 32 * 49 * 64 + 640


def test_cost_of_a_strided_convolution_by_hand():
    module = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 3 * 3, 2))
    assert uses_of_weights(module, (3, 8, 8)) == {"0.weight": 9, "2.weight": 1}
    group = UnitGroup(
        "c", 4, (Cut("0.weight", 0), Cut("0.bias", 0), Cut("2.weight", 1, per_unit=9))
    )
    cost = paid(
        Model(module, (group,), ()), Slices((group,), {"c": torch.tensor([0, 3])}), (3, 8, 8)
    )
    assert cost.parameters == 2 * 27 + 2 + 2 * 18 + 2
    assert cost.multiply_adds == 2 * 27 * 9 + 2 * 18
    assert cost.bytes_down == 4 * cost.parameters + 9  # units 3 and 0 are neighbours round the end


def test_uses_of_weights_in_a_grouped_convolution():
    assert uses_of_weights(nn.Sequential(nn.Conv2d(4, 8, 1, groups=4)), (4, 5, 6)) == {
        "0.weight": 30
    }


class Twice(nn.Module):
    """Uses one layer two times."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_uses_of_weights_in_a_layer_called_twice():
    assert uses_of_weights(Twice(), (4,)) == {"layer.weight": 2}


def test_uses_of_weights_leaves_the_model_unchanged():
    model = wide_resnet((3, 8, 8), 10, "batch", depth=10, widen=1)
    model.module.train()
    before = {name: t.clone() for name, t in model.module.state_dict().items()}
    uses_of_weights(model.module, (3, 8, 8))
    assert all(torch.equal(t, before[name]) for name, t in model.module.state_dict().items())
    assert model.module.training
    assert not any(layer._forward_hooks for layer in model.module.modules())


def test_pruning_saves_weights_and_their_uses():
    model = mlp(MNIST, 10, "batch")
    keep = torch.arange(156_800).view(200, 784) < 39_200
    cost = paid(model, Masks({"hidden1.weight": keep}), MNIST)
    assert cost.parameters == 159_010 - 3 * 39_200
    assert cost.multiply_adds == 158_800 - 3 * 39_200
    assert cost.bytes_up == 4 * cost.parameters
    assert cost.bytes_down == 4 * cost.parameters + 1 + 156_800 // 8


def test_cost_in_bytes_of_every_encoding():
    model = cnn(MNIST, 10, "batch")
    scattered = {group.name: torch.arange(0, group.size, 2) for group in model.groups}
    encoded_sizes = {
        "whole": (Masks({}), 1),
        "windows": (windows(model.groups, 0.5), 1 + 3 * 8),
        "draw": (drawn(model.groups, 0.5, 1), 17),
        "units": (Slices(model.groups, scattered), 1 + 32 // 8 + 64 // 8 + 128 // 8),
    }
    for reduction, mask_bytes in encoded_sizes.values():
        cost = paid(model, reduction, MNIST)
        assert cost.bytes_down - cost.bytes_up == mask_bytes


def test_cost_of_the_papers_wide_resnet():
    cost = paid(wide_resnet((3, 32, 32), 10, "batch"), Masks({}), (3, 32, 32))
    assert cost.parameters == 1_467_610
    # stem, then per stage: first convolution, the other seven, the shortcut; head
    by_hand = 1024 * 27 * 16
    for places, fan_in, width in ((1024, 16, 32), (256, 32, 64), (64, 64, 128)):
        by_hand += places * (9 * fan_in * width + 7 * 9 * width * width + fan_in * width)
    assert cost.multiply_adds == by_hand + 128 * 10


def memory(model, reduction, shape=(3, 8, 8), batch_size=10):
    return memory_to_train(model, reduction, shape, batch_size=batch_size)


MODELS = {
    "mlp": mlp((3, 8, 8), 10, "batch"),
    "cnn": cnn((3, 8, 8), 10, "batch"),
    "wide_resnet": wide_resnet((3, 8, 8), 10, "batch", depth=10, widen=1),
    "group": wide_resnet((3, 8, 8), 10, "group", depth=10, widen=1),
    "preact_resnet18": preact_resnet18((3, 8, 8), 10, "batch", width=8),
}


@pytest.mark.parametrize("name", MODELS)
def test_memory_grows_with_batch_and_width(name):
    model = MODELS[name]
    widths = [memory(model, windows(model.groups, share)) for share in (0.25, 0.5, 0.75, 1.0)]
    assert widths == sorted(set(widths))
    batches = [memory(model, Masks({}), batch_size=size) for size in (2, 4, 8)]
    assert batches[2] - batches[1] == 2 * (batches[1] - batches[0]) > 0
    weights = sum(p.numel() for p in model.module.parameters())
    assert batches[0] > 16 * weights


@pytest.mark.parametrize("name", MODELS)
def test_masks_save_no_memory(name):
    model = MODELS[name]
    nothing = Masks(
        {n: torch.zeros(params_of(model)[n].shape, dtype=torch.bool) for n in model.prunable}
    )
    assert (
        memory(model, nothing)
        == memory(model, Masks({}))
        == memory(model, windows(model.groups, 1.0))
    )


def test_memory_of_an_mlp_by_hand():
    model = mlp((4,), 3, "batch", hidden=[5])
    weights = 4 * 5 + 5 + 5 * 3 + 3
    batch = 7
    # kept for backward: the input, the hidden layer after its ReLU, the log-softmax, the labels
    # (and one weight sum)
    activation_bytes = 4 * batch * 4 + 4 * batch * 5 + 4 * batch * 3 + 8 * batch + 4
    assert memory(model, Masks({}), (4,), batch) == 16 * weights + activation_bytes


class Odd(nn.Module):
    """What an ordinary module may do: look at values, make a tensor of its own, learn a weight by
    parts.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(784, 6))
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        h = self.first(x.flatten(1)) + torch.zeros(len(x), 6)
        return self.head(h if h.mean() > 0.4 else 2 * h)


def test_uses_of_weights_of_a_parametrized_module():
    module = Odd()
    assert uses_of_weights(module, MNIST) == {
        "first.parametrizations.weight.original1": 1,
        "head.weight": 1,
    }
    assert not module.first._forward_hooks  # it was counted on a copy
