"""What models share: the scaler's place, and the tensors of a module by name."""

from torch import Tensor, nn


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


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name, detached."""
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}
