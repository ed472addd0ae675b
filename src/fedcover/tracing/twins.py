"""How functions that average over units, or draw at random, run while sliced and masked models are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Twin = Callable[[Tensor, Sequence[Any], Mapping[str, Any], Tensor], Tensor]


class Quiet(TorchFunctionMode):
    """Runs a module without drop-out, whose draws depend on shapes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, or what stands for it."""
        given = dict(kwargs or {})
        if "dropout" in func.__name__:
            return args[0] if args else given["input"]
        if "dropout_p" in given:
            given["dropout_p"] = 0.0
        return self.call(func, args, given)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call any other function as it is."""
        return func(*args, **kwargs)


class Masked(Quiet):
    """Runs a masked model: averages over units are taken over those that are kept."""

    def __init__(self, present: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.present = iter(present)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or its masked twin where some of what it averages is cut."""
        twin = TWINS.get(func.__name__)
        present = next(self.present) if twin else None
        return func(*args, **kwargs) if twin is None or present is None else twin(args[0], args[1:], kwargs, present)


def _mean(x: Tensor, axes: Sequence[int], present: Tensor) -> Tensor:
    shown = present.expand(x.shape)
    return torch.where(shown, x, 0).sum(axes, keepdim=True) / shown.sum(axes, keepdim=True)


def masked_mean(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor) -> Tensor:
    """The mean over what is there."""
    dim = args[0] if args else kwargs.get("dim")
    axes = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    # where nothing is there, nothing comes out
    mean = _mean(x, axes, present).nan_to_num()
    return mean if keep else mean.squeeze(axes)


def masked_layer_norm(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor) -> Tensor:
    """Layer norm with the moments of what is there."""
    given = {**dict(zip(("normalized_shape", "weight", "bias", "eps"), args, strict=False)), **kwargs}
    axes = list(range(x.ndim - len(given["normalized_shape"]), x.ndim))
    centred = x - _mean(x, axes, present)
    out = centred * torch.rsqrt(_mean(centred.square(), axes, present) + given.get("eps", 1e-5))
    return torch.where(present, _affine(out, given.get("weight"), given.get("bias")), 0)


def masked_rms_norm(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor) -> Tensor:
    """RMS norm with the second moment of what is there."""
    given = {**dict(zip(("normalized_shape", "weight", "eps"), args, strict=False)), **kwargs}
    axes = list(range(x.ndim - len(given["normalized_shape"]), x.ndim))
    eps = given.get("eps")
    scale = torch.rsqrt(_mean(x.square(), axes, present) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return torch.where(present, _affine(x * scale, given.get("weight"), None), 0)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


TWINS: dict[str, Twin] = {"mean": masked_mean, "layer_norm": masked_layer_norm, "rms_norm": masked_rms_norm}
"""Functions that average over units, and how they run where some of these are masked."""
