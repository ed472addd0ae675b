"""Compute a layer of all stacked clients in one kernel, where torch would launch many or slow ones.

`StackedLayers` is a mode: inside it, torch's `conv2d`, `batch_norm` and `linear` go to functions of
this file, and the first two have their own rule for `vmap` (`stacked_functions`). Calls that the
kernels do not support stay torch's. To support another layer, add a function to `_OVERRIDES` and,
if it has parameters, its type to `SUPPORTED_LAYERS`.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fedcover.training.engines.stacked_functions import StackedBatchNorm, StackedConv2d

SUPPORTED_LAYERS = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
"""The only layers that may have parameters in a model that uses the stacked kernels."""


def has_stacked_kernels(module: nn.Module) -> bool:
    """Return whether the kernels support a model: it has convolutions, and Triton is installed."""
    layers = [
        layer
        for layer in module.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    has_convolution = any(isinstance(layer, nn.Conv2d) for layer in layers)
    supported = all(type(layer) in SUPPORTED_LAYERS for layer in layers)
    return has_convolution and supported and find_spec("triton") is not None


def uses_stacked_kernels(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether stacked clients of a model train with these kernels."""
    return device.type == "cuda" and dtype == torch.float32 and has_stacked_kernels(module)


class StackedLayers(TorchFunctionMode):
    """A mode in which convolutions and norms under `vmap` are single kernels.

    They compute in the dtype of their inputs.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the override of a function, or the function if there is none for this call."""
        override = _OVERRIDES.get(func)
        if override is not None:
            result = override(*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if not _is_plain_convolution(x, weight, stride, padding, dilation, groups):
        cast_bias = None if bias is None else bias.to(x.dtype)
        return F.conv2d(x, weight.to(x.dtype), cast_bias, stride, padding, dilation, groups)
    y: Tensor
    y, _ = StackedConv2d.apply(  # type: ignore[no-untyped-call]
        x, weight, _pair(stride)[0], _pair(padding)[0]
    )
    return y if bias is None else y + bias.to(x.dtype)[:, None, None]


def _is_plain_convolution(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Return whether a convolution is square, ungrouped and undilated, as the kernels need it."""
    if isinstance(padding, str) or _pair(dilation) != (1, 1) or groups != 1 or x.ndim != 4:
        return False
    pairs = (_pair(stride), _pair(padding), tuple(weight.shape[-2:]))
    return all(vertical == horizontal for vertical, horizontal in pairs)


def _batch_norm(
    x: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    uses_batch_statistics = training and running_mean is None
    if not uses_batch_statistics or weight is None or bias is None or x.ndim != 4:
        return None
    if x.numel() == x.shape[1]:  # one value for each channel: torch raises the right error
        return None
    y: Tensor
    y, _, _ = StackedBatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, eps
    )
    return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


_OVERRIDES: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    F.linear: _linear,
}
