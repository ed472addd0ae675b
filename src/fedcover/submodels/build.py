"""Build a module of a client's own size: cut the tensors down and adapt the layers' sizes."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from fedcover.errors import InvalidValue
from fedcover.models import Scaler, params_and_buffers
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.reductions import Slices
from fedcover.types import Reduction


def meta_submodel(module: nn.Module, reduction: Reduction, *, scaler: bool = False) -> nn.Module:
    """Build a client's part of a model in its own shapes, without values (on the `meta` device).

    Args:
        module: The whole model.
        reduction: The client's part.
        scaler: Whether `Scaler` layers scale by the inverse of the width share.

    Returns:
        A new module.

    Raises:
        InvalidValue: If a layer cannot be cut in this way.

    >>> from fedcover.models import mlp
    >>> from fedcover.submodels.reductions import window_slices
    >>> model = mlp((1, 28, 28), 10, "batch")
    >>> meta_submodel(model.module, window_slices(model.groups, 0.5)).hidden1
    Linear(in_features=784, out_features=100, bias=True)
    """
    small = _copy_to_meta(module)
    whole = params_and_buffers(small)
    part = reduction.extract(whole)
    for name in whole.keys() - part.keys():
        _replace_by_identity(small, name)
    load_tensors(small, part)
    if isinstance(reduction, Slices):
        _reduce_counts(small, reduction)
    for path, layer in small.named_modules():
        if scaler and isinstance(layer, Scaler):
            layer.factor = whole[layer.of].shape[0] / part[layer.of].shape[0]
        for layer_type, resize in _RESIZERS.items():
            if isinstance(layer, layer_type) and size_follows_tensors(layer):
                resize(path, layer)
    return small


def submodel(
    module: nn.Module, reduction: Reduction, values: Mapping[str, Tensor], *, scaler: bool = False
) -> nn.Module:
    """Build a client's part of a model as an ordinary module, ready to run, train and save.

    Args:
        module: The whole model.
        reduction: The client's part.
        values: Tensors in full shapes by name, such as a run's global parameters. Missing ones are
            taken from the module. A `PartialParams` gives its tensors away: they become the
            parameters without a copy.
        scaler: Whether `Scaler` layers scale by the inverse of the width share.

    Returns:
        A new module.

    Raises:
        InvalidValue: If a layer cannot be cut in this way.
    """
    module_values = {
        name: tensor for name, tensor in params_and_buffers(module).items() if name not in values
    }
    is_partial = isinstance(values, PartialParams)
    given_values = values if isinstance(values, PartialParams) else dict(values)
    part = {**reduction.extract(module_values), **reduction.extract(given_values)}
    small = meta_submodel(module, reduction, scaler=scaler)
    return load_tensors(small, part, copied=not is_partial)


def without_parameters(module: nn.Module) -> nn.Module:
    """Copy a module with its buffers, but with parameters without values (on `meta`)."""
    return copy.deepcopy(module, _parameters_without_values(module))


def _copy_to_meta(module: nn.Module) -> nn.Module:
    """Copy a module without the values of its parameters and buffers."""
    buffers = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, {**buffers, **_parameters_without_values(module)})


def _parameters_without_values(module: nn.Module) -> dict[int, Any]:
    """Return a memo for `deepcopy` that replaces each parameter."""
    return {
        id(w): nn.Parameter(torch.empty_like(w, device="meta"), w.requires_grad)
        for w in module.parameters()
    }


def _replace_by_identity(module: nn.Module, tensor_name: str) -> None:
    """Replace the layer that owns a tensor, because the client holds nothing of it."""
    layer_path = tensor_name.rpartition(".")[0]
    parent_path, _, layer_name = layer_path.rpartition(".")
    module.get_submodule(parent_path)._modules[layer_name] = nn.Identity()


def load_tensors(
    module: nn.Module, values: Mapping[str, Tensor], *, copied: bool = True
) -> nn.Module:
    """Put tensors of any shapes into a module, in place.

    Args:
        module: The module to change.
        values: Parameters and buffers by name.
        copied: Whether to copy the parameters. Buffers are always copied, as modules write to them.

    Returns:
        The same module.
    """
    slots_by_id = _tensor_slots(module)
    # All slots are looked up before the first tensor is replaced.
    targets: dict[str, tuple[nn.Parameter | None, list[tuple[dict[str, Any], str]]]] = {}
    for name in values:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        old_parameter = owner._parameters.get(leaf)
        old_tensor = owner._buffers.get(leaf) if old_parameter is None else old_parameter
        slots = slots_by_id.get(id(old_tensor), [(owner._buffers, leaf)])
        targets[name] = (old_parameter, slots)
    for name, (old_parameter, slots) in targets.items():
        tensor: Tensor = values[name].detach()
        if copied or old_parameter is None:
            tensor = tensor.clone()
        if old_parameter is not None:
            tensor = nn.Parameter(tensor, requires_grad=old_parameter.requires_grad)
        for table, leaf in slots:
            table[leaf] = tensor
    return module


def _tensor_slots(module: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Map the id of each tensor to where it is stored; a tied tensor has several slots."""
    slots = defaultdict(list)
    for layer in module.modules():
        tables: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is not None:
                    slots[id(tensor)].append((table, leaf))
    return slots


def size_follows_tensors(layer: nn.Module) -> bool:
    """Return whether a layer's sizes (such as `out_features`) follow from its tensors."""
    if not any(isinstance(layer, kind) for kind in _RESIZERS):
        return False
    if is_parametrized(layer):
        return True
    candidates = (*layer._parameters.values(), getattr(layer, "running_mean", None))
    return any(isinstance(tensor, Tensor) for tensor in candidates)


def _reduce_counts(module: nn.Module, reduction: Slices) -> None:
    """Decrease the numbers that count a group's units by the removed units, in place."""
    for group in reduction.groups:
        num_removed = group.size - len(reduction.kept[group.name])
        for count in group.counts:
            path = count.attribute.split(".")
            _decrease_attribute(module, path, num_removed * count.per_unit)


def _decrease_attribute(module: nn.Module, path: list[str], by: int) -> None:
    """Decrease the number at a path of attributes; the last part may index a list or tuple."""
    index = int(path[-1]) if path[-1].isdigit() else None
    *owner_path, leaf = path if index is None else path[:-1]
    owner: Any = reduce(getattr, owner_path, module)
    attributes = vars(owner)
    if index is None:
        attributes[leaf] -= by
        return
    numbers = list(attributes[leaf])
    numbers[index] -= by
    attributes[leaf] = type(attributes[leaf])(numbers)


def _resize_linear(path: str, layer: Any) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


def _resize_convolution(path: str, layer: Any) -> None:
    out_channels, in_channels_per_group = layer.weight.shape[:2]
    _set_channels(path, layer, out_channels, in_channels_per_group * layer.groups)


def _resize_transposed_convolution(path: str, layer: Any) -> None:
    in_channels, out_channels_per_group = layer.weight.shape[:2]
    _set_channels(path, layer, out_channels_per_group * layer.groups, in_channels)


def _set_channels(path: str, layer: Any, out_channels: int, in_channels: int) -> None:
    """Set the channels of a convolution.

    A grouped convolution loses whole groups only: inputs and outputs then shrink by the same
    factor, and a `Count` has decreased `groups`.
    """
    if layer.groups != 1 and out_channels * layer.in_channels != in_channels * layer.out_channels:
        raise InvalidValue(
            f"layer {path!r}: a grouped convolution cannot be cut; groups is {layer.groups}"
        )
    layer.out_channels, layer.in_channels = out_channels, in_channels


def _resize_batch_norm(path: str, layer: Any) -> None:
    per_channel = layer.running_mean if layer.weight is None else layer.weight
    if per_channel is not None:
        layer.num_features = len(per_channel)


def _resize_group_norm(path: str, layer: Any) -> None:
    num_channels = len(layer.weight)
    if layer.num_groups * num_channels % layer.num_channels:
        raise InvalidValue(
            f"layer {path!r}: {layer.num_groups} norm groups over {layer.num_channels} channels "
            f"cannot keep {num_channels}; "
            "give the unit group whole norm groups as units (Cut.per_unit)"
        )
    layer.num_groups = layer.num_groups * num_channels // layer.num_channels
    layer.num_channels = num_channels


def _resize_layer_norm(path: str, layer: Any) -> None:
    layer.normalized_shape = tuple(layer.weight.shape)


def _resize_embedding(path: str, layer: Any) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


def _resize_attention(path: str, layer: Any) -> None:
    if layer.in_proj_weight is None:
        width = len(layer.q_proj_weight)
    else:
        width = len(layer.in_proj_weight) // 3
    if width % layer.head_dim:
        raise InvalidValue(
            f"layer {path!r}: attention keeps or cuts whole heads of {layer.head_dim} features; "
            f"got {width} features"
        )
    layer.embed_dim = width
    layer.num_heads = width // layer.head_dim
    layer.kdim = width if layer.k_proj_weight is None else layer.k_proj_weight.shape[1]
    layer.vdim = width if layer.v_proj_weight is None else layer.v_proj_weight.shape[1]


def _resize_prelu(path: str, layer: Any) -> None:
    layer.num_parameters = len(layer.weight)


def _resize_rnn(path: str, layer: Any) -> None:
    num_gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
    layer.input_size = layer.weight_ih_l0.shape[1]
    layer.hidden_size = len(layer.weight_hh_l0) // num_gates
    if layer.proj_size:
        layer.proj_size = layer.weight_hh_l0.shape[1]


def _resize_rnn_cell(path: str, layer: Any) -> None:
    layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], layer.weight_hh.shape[1]


_RESIZERS: Mapping[type[nn.Module], Callable[[str, Any], None]] = {
    nn.Linear: _resize_linear,
    nn.Conv1d: _resize_convolution,
    nn.Conv2d: _resize_convolution,
    nn.Conv3d: _resize_convolution,
    nn.ConvTranspose1d: _resize_transposed_convolution,
    nn.ConvTranspose2d: _resize_transposed_convolution,
    nn.ConvTranspose3d: _resize_transposed_convolution,
    _NormBase: _resize_batch_norm,
    nn.GroupNorm: _resize_group_norm,
    nn.LayerNorm: _resize_layer_norm,
    nn.RMSNorm: _resize_layer_norm,
    nn.Embedding: _resize_embedding,
    nn.EmbeddingBag: _resize_embedding,
    nn.MultiheadAttention: _resize_attention,
    nn.PReLU: _resize_prelu,
    nn.RNNBase: _resize_rnn,
    nn.RNNCellBase: _resize_rnn_cell,
}
"""How to set a layer's sizes from its tensors; other layers change only through a `Count`."""
