"""An ordinary module of a client's own size: the model with its tensors cut down and its layers told so."""

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
    """The client's part of a model in its own shapes, without values (on the `meta` device).

    >>> from fedcover.models import mlp
    >>> from fedcover.submodels.reductions import windows
    >>> model = mlp((1, 28, 28), 10, "batch")
    >>> meta_submodel(model.module, windows(model.groups, 0.5)).hidden1
    Linear(in_features=784, out_features=100, bias=True)
    """
    small = _copy_to_meta(module)
    whole = params_and_buffers(small)
    part = reduction.extract(whole)
    for name in whole.keys() - part.keys():  # a layer that the client has nothing of
        path, _, leaf = name.rpartition(".")[0].rpartition(".")
        small.get_submodule(path)._modules[leaf] = nn.Identity()
    load_tensors(small, part)
    if isinstance(reduction, Slices):
        _reduce_counts(small, reduction)
    for path, layer in small.named_modules():
        if scaler and isinstance(layer, Scaler):
            layer.factor = whole[layer.of].shape[0] / part[layer.of].shape[0]
        for kind, tell in _RESIZERS.items():
            if isinstance(layer, kind) and size_follows_tensors(layer):
                tell(path, layer)
    return small


def submodel(
    module: nn.Module, reduction: Reduction, values: Mapping[str, Tensor], *, scaler: bool = False
) -> nn.Module:
    """The client's part of a model as an ordinary module that can be run, trained, saved and exported.

    `values` are full-sized tensors by name (such as a run's global parameters); what is not among them is taken
    from the module itself. A `PartialParams` gives its tensors away: they become the parameters, without a copy.
    """
    own = {
        name: tensor for name, tensor in params_and_buffers(module).items() if name not in values
    }
    given = values if isinstance(values, PartialParams) else dict(values)
    part = {**reduction.extract(own), **reduction.extract(given)}
    return load_tensors(
        meta_submodel(module, reduction, scaler=scaler),
        part,
        copied=not isinstance(values, PartialParams),
    )


def without_parameters(module: nn.Module) -> nn.Module:
    """A copy of a module with its buffers, but without the values of its parameters (on the `meta` device)."""
    return copy.deepcopy(module, _parameters_without_values(module))


def _copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a module without values."""
    buffers = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, {**buffers, **_parameters_without_values(module)})


def _parameters_without_values(module: nn.Module) -> dict[int, Any]:
    """What `deepcopy` shall take for each parameter."""
    return {
        id(w): nn.Parameter(torch.empty_like(w, device="meta"), w.requires_grad)
        for w in module.parameters()
    }


def load_tensors(
    module: nn.Module, values: Mapping[str, Tensor], *, copied: bool = True
) -> nn.Module:
    """Put tensors into a module, whatever shapes were there (changes the module, returns it).

    Buffers are always copies, because a module writes to them.
    """
    homes: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(
        list
    )  # a tied tensor has several
    for layer in module.modules():
        tables: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is not None:
                    homes[id(tensor)].append((table, leaf))
    places = {}
    for name in values:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        old = owner._parameters.get(leaf)
        known = owner._buffers.get(leaf) if old is None else old
        places[name] = old, homes.get(id(known), [(owner._buffers, leaf)])
    for name, (old, found) in places.items():
        new: Tensor = values[name].detach()
        if copied or old is None:
            new = new.clone()
        if old is not None:
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for table, known_as in found:
            table[known_as] = new
    return module


def size_follows_tensors(layer: nn.Module) -> bool:
    """Whether a layer's own numbers (such as `out_features`) follow from the tensors that it holds."""
    if not any(isinstance(layer, kind) for kind in _RESIZERS):
        return False
    if is_parametrized(layer):
        return True
    held = (*layer._parameters.values(), getattr(layer, "running_mean", None))
    return any(isinstance(tensor, Tensor) for tensor in held)


def _reduce_counts(module: nn.Module, reduction: Slices) -> None:
    """Lower the numbers that count a group's units by what is cut (changes the module)."""
    for group in reduction.groups:
        cut = group.size - len(reduction.kept[group.name])
        for count in group.counts:
            _decrease_attribute(module, count.attribute.split("."), cut * count.per_unit)


def _decrease_attribute(module: nn.Module, path: list[str], by: int) -> None:
    """Lower a number at a path of attributes; the last part may be a place in a list or tuple."""
    place = int(path[-1]) if path[-1].isdigit() else None
    *way, leaf = path if place is None else path[:-1]
    owner: Any = reduce(getattr, way, module)
    if place is None:
        vars(owner)[leaf] -= by
        return
    sizes = list(vars(owner)[leaf])
    sizes[place] -= by
    vars(owner)[leaf] = type(vars(owner)[leaf])(sizes)


def _resize_linear(path: str, layer: Any) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


def _resize_convolution(path: str, layer: Any) -> None:
    out_channels, inside = layer.weight.shape[:2]
    _set_channels(path, layer, out_channels, inside * layer.groups)


def _resize_transposed_convolution(path: str, layer: Any) -> None:
    in_channels, inside = layer.weight.shape[:2]
    _set_channels(path, layer, inside * layer.groups, in_channels)


def _set_channels(path: str, layer: Any, out_channels: int, in_channels: int) -> None:
    """Of a grouped convolution whole groups are cut; then both sides shrink alike, and a `Count` lowers `groups`."""
    if layer.groups != 1 and out_channels * layer.in_channels != in_channels * layer.out_channels:
        raise InvalidValue(
            f"layer {path!r}: a grouped convolution cannot be cut; groups is {layer.groups}"
        )
    layer.out_channels, layer.in_channels = out_channels, in_channels


def _resize_batch_norm(path: str, layer: Any) -> None:
    known = layer.running_mean if layer.weight is None else layer.weight
    if known is not None:
        layer.num_features = len(known)


def _resize_group_norm(path: str, layer: Any) -> None:
    kept = len(layer.weight)
    if layer.num_groups * kept % layer.num_channels:
        raise InvalidValue(
            f"layer {path!r}: {layer.num_groups} norm groups over {layer.num_channels} channels cannot keep {kept}; "
            "give the unit group whole norm groups as units (Cut.per_unit)"
        )
    layer.num_groups, layer.num_channels = layer.num_groups * kept // layer.num_channels, kept


def _resize_layer_norm(path: str, layer: Any) -> None:
    layer.normalized_shape = tuple(layer.weight.shape)


def _resize_embedding(path: str, layer: Any) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


def _resize_attention(path: str, layer: Any) -> None:
    inside = (
        len(layer.q_proj_weight) if layer.in_proj_weight is None else len(layer.in_proj_weight) // 3
    )
    if inside % layer.head_dim:
        raise InvalidValue(
            f"layer {path!r}: attention keeps or cuts whole heads of {layer.head_dim} features; got {inside} features"
        )
    layer.embed_dim, layer.num_heads = inside, inside // layer.head_dim
    layer.kdim = inside if layer.k_proj_weight is None else layer.k_proj_weight.shape[1]
    layer.vdim = inside if layer.v_proj_weight is None else layer.v_proj_weight.shape[1]


def _resize_prelu(path: str, layer: Any) -> None:
    layer.num_parameters = len(layer.weight)


def _resize_rnn(path: str, layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    layer.hidden_size = len(layer.weight_hh_l0) // {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
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
"""How a layer learns its size from its tensors; what is not here keeps its numbers, unless a group counts them."""
