"""Compute what a part of a model costs a device: parameters, multiply-adds, memory, traffic."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedcover.submodels.build import meta_submodel
from fedcover.submodels.encoding import encode
from fedcover.submodels.reductions import Masks, TrainedSubset
from fedcover.types import Model, Reduction

BYTES_PER_WEIGHT = 4
"""Weights are float32, in training and in messages."""

WEIGHT_COPIES = 4
"""Tensors as large as the part in a training step: weights sent, weights, gradients, momentum."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the cost of one client in one round.

    Attributes:
        parameters: The number of parameters in the client's part.
        multiply_adds: Multiply-adds of one forward pass of one sample.
        bytes_down: Bytes sent to the client.
        bytes_up: Bytes sent by the client.
    """

    parameters: int
    multiply_adds: int
    bytes_down: int
    bytes_up: int


class WeightUses(Mapping[str, int]):
    """How often each weight of a model is multiplied for one sample, counted when first read.

    The first count of a process imports much of torch: seconds, and 70 MB. Nodes of a federation,
    and readers of a finished run, never need it.
    """

    def __init__(
        self, module: nn.Module, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        self._count: Callable[[], dict[str, int]] | None = partial(
            uses_of_weights, module, shape, dtype
        )
        self._uses: dict[str, int] = {}

    def _counted(self) -> dict[str, int]:
        if self._count is not None:
            self._uses = self._count()
            self._count = None  # it holds the module
        return self._uses

    def __getitem__(self, name: str) -> int:
        """Return the uses of a weight."""
        return self._counted()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the weights that count."""
        return iter(self._counted())

    def __len__(self) -> int:
        """Return how many weights count."""
        return len(self._counted())


def uses_of_weights(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Count how often each weight is multiplied for one sample.

    Weights of linear, convolutional and recurrent layers count. Products inside attention involve
    no weights and do not count.

    Args:
        module: The model.
        shape: The shape of one sample.
        dtype: The type of the inputs, if not that of the weights (characters are integers).

    Returns:
        The number of uses by parameter name.

    >>> from fedcover.models import cnn
    >>> uses_of_weights(cnn((1, 28, 28), 10, "batch").module, (1, 28, 28))
    {'conv1.weight': 784, 'conv2.weight': 196, 'hidden.weight': 1, 'head.weight': 1}
    """
    try:
        return _count_uses(meta_submodel(module, Masks({})), shape, dtype)  # without values: cheap
    except Exception:
        # A model may look at values, or create tensors of its own on another device.
        return _count_uses(deepcopy(module), shape, dtype)


def _count_uses(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype | None
) -> dict[str, int]:
    """Run one sample through a module and count the uses of its weights; adds hooks to it."""
    uses: dict[str, int] = {}

    def add_uses(name: str, number: int) -> None:
        uses[name] = uses.get(name, 0) + number  # a layer that is called twice multiplies twice

    def count_layer(name: str, layer: nn.Module, inputs: object, output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        add_uses(name, output.numel() // layer.weight.shape[0])

    def count_recurrent_layer(
        names: Sequence[str], layer: nn.Module, inputs: tuple[Any, ...], output: object
    ) -> None:
        for name in names:
            add_uses(name, _num_steps(layer, inputs[0]))

    names = {id(weight): name for name, weight in module.named_parameters()}  # tied: one name
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            matrices = [w for w in layer.parameters(recurse=False) if w.ndim == 2]
            matrix_names = [names[id(weight)] for weight in matrices]
            layer.register_forward_hook(partial(count_recurrent_layer, matrix_names))
        elif isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            name = names.get(id(_trainable_weight(layer)))
            if name is not None:
                layer.register_forward_hook(partial(count_layer, name))
    weight = next(module.parameters())
    sample = torch.zeros((1, *shape), device=weight.device, dtype=dtype or weight.dtype)
    with torch.no_grad():
        module.eval()(sample)
    return uses


def _num_steps(layer: nn.Module, x: Tensor) -> int:
    """Return how often a recurrent layer multiplies by each of its matrices for one sequence."""
    if isinstance(layer, nn.RNNCellBase):
        return 1
    time_axis = 1 if layer.batch_first and x.ndim == 3 else 0
    return x.shape[time_axis]


def _trainable_weight(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    """Return the parameter behind a layer's weight that has its shape (weight norm: v, not g)."""
    if not parametrize.is_parametrized(layer, "weight"):
        return layer.weight
    originals = layer.parametrizations.weight.parameters()  # type: ignore[union-attr]
    return next((p for p in originals if p.shape == layer.weight.shape), layer.weight)


def cost(
    reduction: Reduction,
    params: Mapping[str, Tensor],
    uses: Mapping[str, int],
    trained: Reduction | None = None,
) -> Cost:
    """Compute the cost of a part of a model.

    The description of the part is sent to the client. The client sends none back, unless it chose
    itself what it trained; then it sends one bit per entry.

    Args:
        reduction: The part that is sent to the client.
        params: The parameters of the model; only their shapes are read.
        uses: How often each weight is multiplied, from `uses_of_weights`.
        trained: What the client trained, if not the whole part.

    Returns:
        The cost of one round.
    """
    sizes = reduction.sizes(params)
    num_parameters = sum(sizes.values())
    returned = reduction if trained is None else trained
    mask_bytes = 0
    if isinstance(returned, TrainedSubset):
        mask_bytes = sum(-(-bits.numel() // 8) for bits in returned.bits.values())
    return Cost(
        parameters=num_parameters,
        multiply_adds=sum(sizes.get(name, 0) * times for name, times in uses.items()),
        bytes_down=BYTES_PER_WEIGHT * num_parameters + len(encode(reduction)),
        bytes_up=BYTES_PER_WEIGHT * sum(returned.sizes(params).values()) + mask_bytes,
    )


def memory_to_train(
    model: Model,
    reduction: Reduction,
    shape: Sequence[int],
    *,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Compute the bytes that a device needs for a training step.

    This covers the weights as sent and as trained, gradients, momentum and saved activations. It is
    measured on a sub-model without values, so it costs nothing. Masks save no memory; slices do.
    Python, torch, the data and what a recipe remembers come on top (`prox`: another copy of the
    weights).

    Args:
        model: The whole model.
        reduction: The client's part.
        shape: The shape of one sample.
        batch_size: The number of samples per step.
        dtype: The type of the inputs.

    Returns:
        The number of bytes.
    """
    part = meta_submodel(model.module, reduction).train()
    num_weights = sum(p.numel() for p in part.parameters())
    weight_storages = {p.untyped_storage()._cdata for p in part.parameters()}
    saved_tensors: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weight_storages:
            saved_tensors[storage] = tensor
        return tensor

    x = torch.zeros((batch_size, *shape), device="meta", dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logits = part(x)
        labels = torch.zeros((len(logits), *logits.shape[2:]), dtype=torch.int64, device="meta")
        loss = nn.functional.cross_entropy(logits, labels)
    activation_bytes = sum(t.untyped_storage().nbytes() for t in saved_tensors.values())
    del loss  # the graph, and with it the saved tensors, must live until they are counted
    return BYTES_PER_WEIGHT * num_weights * WEIGHT_COPIES + activation_bytes
