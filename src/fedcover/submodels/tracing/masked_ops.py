"""Masked forms of averaging functions, and the modes that run sliced and masked models.

A sliced model averages over the units it has. The masked model must do the same with the units that
are kept, so its averages are replaced while it runs. Random functions are switched off in both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedcover.submodels.tracing.arguments import normalize_arguments

MaskedOp = Callable[[Tensor, Sequence[Any], Mapping[str, Any], Tensor], Tensor]


class Float64Mode(TorchFunctionMode):
    """Run a module in float64 and without dropout, whose random numbers depend on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.last_function = ""
        self.recorded: list[Tensor] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function or its replacement, and record the result if `recorded` is a list."""
        self.last_function = func.__name__
        arguments = dict(kwargs or {})
        if "dropout_p" in arguments:
            arguments["dropout_p"] = 0.0
        if "dropout" in self.last_function:
            out = args[0] if args else arguments["input"]
        else:
            out = self.call(func, args, arguments)
        if isinstance(out, Tensor):
            out = out.double() if out.is_floating_point() else out
            if self.recorded is not None:
                self.recorded.append(out)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call any other function unchanged."""
        return func(*args, **kwargs)


class MaskedMode(Float64Mode):
    """Run a masked model whose averages are over the units that are kept.

    Args:
        present: For each call of a function in `MASKED_OPS`, the mask of its input; None if nothing
            of it is cut.
    """

    def __init__(self, present: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.present = iter(present)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or its masked form if part of what it averages is cut."""
        masked_op = MASKED_OPS.get(func.__name__)
        present = next(self.present, None) if masked_op else None
        if masked_op is None or present is None:
            return func(*args, **kwargs)
        positional, named = normalize_arguments(func.__name__, args, kwargs)
        return masked_op(positional[0], positional[1:], named, present)


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return positional and named arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _mean(x: Tensor, axes: list[int], present: Tensor) -> Tensor:
    mask = present.expand(x.shape)
    number = mask.sum(axes, keepdim=True).clamp(min=1)  # the mean of nothing is zero
    return torch.where(mask, x, 0).sum(axes, keepdim=True) / number


def masked_mean(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Return the mean over the elements that are present."""
    arguments = _bind(("dim", "keepdim"), args, kwargs)
    axes = _axes(x, arguments.get("dim"))
    return _drop_reduced_axes(_mean(x, axes, present), axes, arguments)


def masked_var(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Return the variance of the elements that are present."""
    arguments = _bind(("dim", "unbiased", "keepdim"), args, kwargs)
    axes = _axes(x, arguments.get("dim"))
    number = present.expand(x.shape).sum(axes, keepdim=True)
    variance = _mean((x - _mean(x, axes, present)).square(), axes, present)
    correction = arguments.get("correction", int(arguments.get("unbiased", True)))
    return _drop_reduced_axes(variance * number / (number - correction), axes, arguments)


def masked_std(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Return the standard deviation of the elements that are present."""
    return masked_var(x, args, kwargs, present).sqrt()


def _axes(x: Tensor, dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim or range(x.ndim))


def _drop_reduced_axes(x: Tensor, axes: Sequence[int], arguments: Mapping[str, Any]) -> Tensor:
    return x if arguments.get("keepdim", False) else x.squeeze(tuple(axes))


def masked_layer_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Apply layer norm with the moments of the elements that are present."""
    arguments = _bind(("normalized_shape", "weight", "bias", "eps"), args, kwargs)
    axes = list(range(x.ndim - len(arguments["normalized_shape"]), x.ndim))
    out = _standardize(x, axes, present, arguments.get("eps", 1e-5))
    out = _affine(out, arguments.get("weight"), arguments.get("bias"))
    return torch.where(present, out, 0)


def _standardize(x: Tensor, axes: list[int], present: Tensor, eps: float) -> Tensor:
    centred = x - _mean(x, axes, present)
    return centred * torch.rsqrt(_mean(centred.square(), axes, present) + eps)


def masked_rms_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Apply RMS norm with the second moment of the elements that are present."""
    arguments = _bind(("normalized_shape", "weight", "eps"), args, kwargs)
    axes = list(range(x.ndim - len(arguments["normalized_shape"]), x.ndim))
    eps = arguments.get("eps")
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    scale = torch.rsqrt(_mean(x.square(), axes, present) + eps)
    return torch.where(present, _affine(x * scale, arguments.get("weight"), None), 0)


def masked_batch_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Apply batch norm with the moments of the elements that are present.

    Only weight standardisation needs this. With running statistics channels are independent, and
    the ordinary function is called.
    """
    names = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    arguments = _bind(names, args, kwargs)
    if arguments["running_mean"] is not None:
        return F.batch_norm(x, **arguments)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    out = _standardize(x, axes, present, arguments.get("eps", 1e-5))
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    weight, bias = arguments.get("weight"), arguments.get("bias")
    weight = None if weight is None else weight.view(shape)
    bias = None if bias is None else bias.view(shape)
    return torch.where(present, _affine(out, weight, bias), 0)


def masked_weight_norm(
    v: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Apply weight norm; a row that is cut has no direction and stays zero."""
    arguments = _bind(("g", "dim"), args, kwargs)
    dim = arguments.get("dim", 0)
    axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim or dim == -1]
    mask = present.expand(v.shape)
    squares = torch.where(mask, v, 0).square().sum(axes, keepdim=True)
    row_present = mask.any(axes[0], keepdim=True)
    for axis in axes[1:]:
        row_present = row_present.any(axis, keepdim=True)
    norms = torch.where(row_present, squares, 1).sqrt()
    return torch.where(mask, v * arguments["g"] / norms, 0)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


MASKED_OPS: dict[str, MaskedOp] = {
    "mean": masked_mean,
    "var": masked_var,
    "std": masked_std,
    "layer_norm": masked_layer_norm,
    "rms_norm": masked_rms_norm,
    "batch_norm": masked_batch_norm,
    "_weight_norm": masked_weight_norm,
}
"""Functions that average over units, with their masked forms."""
