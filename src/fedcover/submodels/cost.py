"""What a reduction costs a device: parameters, multiply-adds, memory to train, bytes up and down."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedcover.submodels.build import meta_submodel
from fedcover.submodels.encoding import encode
from fedcover.submodels.reductions import Masks, TrainedSubset
from fedcover.types import Model, Reduction

BYTES_PER_WEIGHT = 4
"""Weights travel and train in float32."""
WEIGHT_COPIES = 4
"""Tensors as large as its part that a client holds in a step: weights as sent and as trained, gradients, momentum."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one client pays in one round (multiply-adds: one forward pass of one sample)."""

    parameters: int
    multiply_adds: int
    bytes_down: int
    bytes_up: int


def uses_of_weights(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype | None = None
) -> dict[str, int]:
    """How many times each weight of a linear, convolutional or recurrent layer is multiplied for one sample.

    `dtype` is that of the inputs, if it is not that of the weights (characters are integers). What attention multiplies
    is not a weight and does not count.

    >>> from fedcover.models import cnn
    >>> uses_of_weights(cnn((1, 28, 28), 10, "batch").module, (1, 28, 28))
    {'conv1.weight': 784, 'conv2.weight': 196, 'hidden.weight': 1, 'head.weight': 1}
    """
    uses: dict[str, int] = {}
    matrices: dict[nn.Module, list[str]] = {}

    def remember(name: str) -> Any:
        def hook(layer: nn.Module, inputs: object, output: Tensor) -> None:
            assert isinstance(layer.weight, Tensor)
            # a layer that is called twice multiplies twice
            uses[name] = uses.get(name, 0) + output.numel() // layer.weight.shape[0]

        return hook

    def remember_steps(layer: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        for name in matrices[layer]:
            uses[name] = uses.get(name, 0) + _steps(layer, inputs[0])

    def count(copy: nn.Module) -> None:
        names = {
            id(weight): name for name, weight in copy.named_parameters()
        }  # a tied weight has one name
        for layer in copy.modules():
            if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
                matrices[layer] = [
                    names[id(weight)]
                    for weight in layer.parameters(recurse=False)
                    if weight.ndim == 2
                ]
                layer.register_forward_hook(remember_steps)
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                name = names.get(id(_trainable_weight(layer)))
                if name is not None:
                    layer.register_forward_hook(remember(name))
        weight = next(copy.parameters())
        with torch.no_grad():
            copy.eval()(torch.zeros((1, *shape), device=weight.device, dtype=dtype or weight.dtype))

    try:
        count(meta_submodel(module, Masks({})))  # no values, so it costs nothing
    except (
        Exception
    ):  # a model may look at values, or make tensors of its own, which are somewhere else
        uses.clear()
        count(deepcopy(module))
    return uses


def _steps(layer: nn.Module, x: Tensor) -> int:
    """How often a recurrent layer multiplies by each of its matrices for one sequence."""
    if isinstance(layer, nn.RNNCellBase):
        return 1
    return x.shape[1 if layer.batch_first and x.ndim == 3 else 0]


def _trainable_weight(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    """What is learned of a layer's weight: itself, or what it is made of that has its shape (weight norm: v, not g)."""
    if not parametrize.is_parametrized(layer, "weight"):
        return layer.weight
    made_of = layer.parametrizations.weight.parameters()  # type: ignore[union-attr]
    return next((p for p in made_of if p.shape == layer.weight.shape), layer.weight)


def cost(
    reduction: Reduction,
    params: Mapping[str, Tensor],
    uses: Mapping[str, int],
    trained: Reduction | None = None,
) -> Cost:
    """The cost of a reduction of a model with these parameters and uses of its weights.

    The mask travels down with the sub-model; the server knows it, so it need not come back, unless the client chose
    itself what of it it `trained`: then one bit per entry says so.
    """
    sizes = reduction.sizes(params)
    back = reduction if trained is None else trained
    chosen = (
        sum(-(-bits.numel() // 8) for bits in back.bits.values())
        if isinstance(back, TrainedSubset)
        else 0
    )
    parameters = sum(sizes.values())
    return Cost(
        parameters=parameters,
        multiply_adds=sum(sizes.get(name, 0) * times for name, times in uses.items()),
        bytes_down=BYTES_PER_WEIGHT * parameters + len(encode(reduction)),
        bytes_up=BYTES_PER_WEIGHT * sum(back.sizes(params).values()) + chosen,
    )


def memory_to_train(
    model: Model,
    reduction: Reduction,
    shape: Sequence[int],
    *,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes a device needs for a training step: weights as sent and trained, gradients, momentum, what backward keeps.

    Counted on a sub-model without values, so it costs nothing; masks save no memory, slices do. Python, torch, the data
    and what a recipe remembers of a client's part (`prox`: as much again as its weights) come on top.
    """
    part = meta_submodel(model.module, reduction).train()
    weights = sum(p.numel() for p in part.parameters())
    own = {p.untyped_storage()._cdata for p in part.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in own:
            kept[place] = tensor
        return tensor

    x = torch.zeros((batch_size, *shape), device="meta", dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = part(x)
        labels = torch.zeros((len(logits), *logits.shape[2:]), dtype=torch.int64, device="meta")
        loss = nn.functional.cross_entropy(logits, labels)
    activations = sum(t.untyped_storage().nbytes() for t in kept.values())
    del loss
    return BYTES_PER_WEIGHT * weights * WEIGHT_COPIES + activations
