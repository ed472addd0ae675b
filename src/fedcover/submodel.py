"""An ordinary module of a client's own size: the model with its tensors cut down and its layers told so."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.errors import InvalidValue
from fedcover.models import Scaler, tensors
from fedcover.types import Reduction


def skeleton(module: nn.Module, reduction: Reduction, *, scaler: bool = False) -> nn.Module:
    """The client's part of a model in its own shapes, without values (on the `meta` device).

    >>> from fedcover.models import mlp
    >>> from fedcover.reduction import windows
    >>> model = mlp((1, 28, 28), 10, "batch")
    >>> skeleton(model.module, windows(model.groups, 0.5)).hidden1
    Linear(in_features=784, out_features=100, bias=True)
    """
    small = _hollow(module)
    whole = tensors(small)
    part = reduction.extract(whole)
    fill(small, part)
    for path, layer in small.named_modules():
        if scaler and isinstance(layer, Scaler):
            layer.factor = whole[layer.of].shape[0] / part[layer.of].shape[0]
        for kind, tell in _TELL.items():
            if isinstance(layer, kind):
                tell(path, layer)
    return small


def submodel(
    module: nn.Module, reduction: Reduction, values: Mapping[str, Tensor], *, scaler: bool = False
) -> nn.Module:
    """The client's part of a model as an ordinary module that can be run, trained, saved and exported.

    `values` are full-sized tensors by name (such as a run's global parameters); what is not among them is taken
    from the module itself.
    """
    full = {**tensors(module), **values}
    return fill(skeleton(module, reduction, scaler=scaler), reduction.extract(full))


def _hollow(module: nn.Module) -> nn.Module:
    """A copy of a module without values."""
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    return copy.deepcopy(module, memo)


def fill(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Put copies of tensors into a module, whatever shapes were there (changes the module, returns it)."""
    homes: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # a tied weight has several
    for layer in module.modules():
        for leaf, weight in layer._parameters.items():
            homes[id(weight)].append((layer, leaf))
    for name, tensor in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if leaf in owner._parameters:
            old = owner.get_parameter(leaf)
            new = nn.Parameter(tensor.detach().clone(), requires_grad=old.requires_grad)
            for home, known_as in homes[id(old)]:
                home._parameters[known_as] = new
        else:
            owner._buffers[leaf] = tensor.detach().clone()
    return module


def _tell_linear(path: str, layer: Any) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


def _tell_convolution(path: str, layer: Any) -> None:
    out_channels, in_channels = layer.weight.shape[:2]
    if layer.groups != 1 and (out_channels, in_channels * layer.groups) != (
        layer.out_channels,
        layer.in_channels,
    ):
        raise InvalidValue(f"layer {path!r}: a grouped convolution cannot be cut; groups is {layer.groups}")
    layer.out_channels, layer.in_channels = out_channels, in_channels * layer.groups


def _tell_batch_norm(path: str, layer: Any) -> None:
    known = layer.running_mean if layer.weight is None else layer.weight
    if known is not None:
        layer.num_features = len(known)


def _tell_group_norm(path: str, layer: Any) -> None:
    kept = len(layer.weight)
    if layer.num_groups * kept % layer.num_channels:
        raise InvalidValue(
            f"layer {path!r}: {layer.num_groups} norm groups over {layer.num_channels} channels cannot keep {kept}; "
            "give the unit group whole norm groups as units (Cut.per_unit)"
        )
    layer.num_groups, layer.num_channels = layer.num_groups * kept // layer.num_channels, kept


_TELL: Mapping[type[nn.Module], Callable[[str, Any], None]] = {
    nn.Linear: _tell_linear,
    nn.Conv1d: _tell_convolution,
    nn.Conv2d: _tell_convolution,
    nn.Conv3d: _tell_convolution,
    _BatchNorm: _tell_batch_norm,
    nn.GroupNorm: _tell_group_norm,
}
