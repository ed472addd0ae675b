"""Define what models share: the scaler, a limit on layers, and tensors by name."""

from torch import Tensor, nn

from fedcover.errors import InvalidValue

MAX_LAYERS = 1000
"""Deeper models are typing errors, or files crafted to block the computer that opens them."""


class Scaler(nn.Module):
    """Divide by the width share during training, so that sub-models' activations match (HeteroFL).

    In the whole model the scaler is the identity. A sub-model sets `factor` from the tensor named
    by `of`.
    """

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale during training; return the input otherwise."""
        return x * self.factor if self.training and self.factor != 1.0 else x


def check_layer_count(model: str, **numbers: int) -> None:
    """Raise `InvalidValue` for a number of layers that no model has.

    >>> check_layer_count("wide_resnet", depth=10**9)
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: model wide_resnet: depth must be in 1..1000; got 1000000000
    """
    for name, number in numbers.items():
        if not 1 <= number <= MAX_LAYERS:
            raise InvalidValue(f"model {model}: {name} must be in 1..{MAX_LAYERS}; got {number}")


def params_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name, detached."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors}
