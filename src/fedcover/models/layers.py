"""What models share: the scaler's place, and the tensors of a module by name."""

from torch import Tensor, nn

from fedcover.errors import InvalidValue

MAX_LAYERS = 1000
"""Deeper models are typing errors, or made up to keep whoever opens a file at work for ever."""


class Scaler(nn.Module):
    """HeteroFL's scaler: divides by the width share while training, so that sub-models' activations match.

    It stands in the model as the identity; a sub-model sets `factor` from the tensor named by `of`.
    """

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale while training; the identity otherwise."""
        return x * self.factor if self.training and self.factor != 1.0 else x


def check_layer_count(model: str, **numbers: int) -> None:
    """Complain about numbers of layers that no model has.

    >>> check_layer_count("wide_resnet", depth=10**9)
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: model wide_resnet: depth must be in 1..1000; got 1000000000
    """
    for name, number in numbers.items():
        if not 1 <= number <= MAX_LAYERS:
            raise InvalidValue(f"model {model}: {name} must be in 1..{MAX_LAYERS}; got {number}")


def params_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name, detached."""
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}
