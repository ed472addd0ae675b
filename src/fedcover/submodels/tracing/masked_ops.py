"""How functions that average over units, or draw at random, run while sliced and masked models are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedcover.submodels.tracing.arguments import normalize_arguments

MaskedOp = Callable[[Tensor, Sequence[Any], Mapping[str, Any], Tensor], Tensor]


class Float64Mode(TorchFunctionMode):
    """Runs a module in float64 and without drop-out, whose draws depend on shapes."""

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
        """Call a function, or what stands for it, and remember what came out if that is asked for."""
        self.last_function, given = func.__name__, dict(kwargs or {})
        if "dropout_p" in given:
            given["dropout_p"] = 0.0
        if "dropout" in self.last_function:
            out = args[0] if args else given["input"]
        else:
            out = self.call(func, args, given)
        if isinstance(out, Tensor):
            out = out.double() if out.is_floating_point() else out
            if self.recorded is not None:
                self.recorded.append(out)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call any other function as it is."""
        return func(*args, **kwargs)


class MaskedMode(Float64Mode):
    """Runs a masked model: averages over units are taken over those that are kept."""

    def __init__(self, present: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.present = iter(present)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or its masked twin where some of what it averages is cut."""
        twin = MASKED_OPS.get(func.__name__)
        present = next(self.present, None) if twin else None
        if twin is None or present is None:
            return func(*args, **kwargs)
        placed, named = normalize_arguments(func.__name__, args, kwargs)
        return twin(placed[0], placed[1:], named, present)


def _mean(x: Tensor, axes: list[int], present: Tensor) -> Tensor:
    shown = present.expand(x.shape)
    number = shown.sum(axes, keepdim=True).clamp(min=1)  # of nothing, the mean is nothing
    return torch.where(shown, x, 0).sum(axes, keepdim=True) / number


def masked_mean(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """The mean over what is there."""
    given = {**dict(zip(("dim", "keepdim"), args, strict=False)), **kwargs}
    axes = _axes(x, given.get("dim"))
    return _drop_reduced_axes(_mean(x, axes, present), axes, given)


def masked_var(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """The variance of what is there."""
    given = {**dict(zip(("dim", "unbiased", "keepdim"), args, strict=False)), **kwargs}
    axes = _axes(x, given.get("dim"))
    number = present.expand(x.shape).sum(axes, keepdim=True)
    spread = _mean((x - _mean(x, axes, present)).square(), axes, present)
    return _drop_reduced_axes(
        spread * number / (number - given.get("correction", int(given.get("unbiased", True)))),
        axes,
        given,
    )


def masked_std(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """The standard deviation of what is there."""
    return masked_var(x, args, kwargs, present).sqrt()


def _axes(x: Tensor, dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim or range(x.ndim))


def _drop_reduced_axes(x: Tensor, axes: Sequence[int], given: Mapping[str, Any]) -> Tensor:
    return x if given.get("keepdim", False) else x.squeeze(tuple(axes))


def masked_layer_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Layer norm with the moments of what is there."""
    given = {
        **dict(zip(("normalized_shape", "weight", "bias", "eps"), args, strict=False)),
        **kwargs,
    }
    axes = list(range(x.ndim - len(given["normalized_shape"]), x.ndim))
    centred = x - _mean(x, axes, present)
    out = centred * torch.rsqrt(_mean(centred.square(), axes, present) + given.get("eps", 1e-5))
    return torch.where(present, _affine(out, given.get("weight"), given.get("bias")), 0)


def masked_rms_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """RMS norm with the second moment of what is there."""
    given = {**dict(zip(("normalized_shape", "weight", "eps"), args, strict=False)), **kwargs}
    axes = list(range(x.ndim - len(given["normalized_shape"]), x.ndim))
    eps = given.get("eps")
    scale = torch.rsqrt(
        _mean(x.square(), axes, present) + (torch.finfo(x.dtype).eps if eps is None else eps)
    )
    return torch.where(present, _affine(x * scale, given.get("weight"), None), 0)


def masked_batch_norm(
    x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Standardise weights by the moments of what is there; with running statistics channels are independent."""
    names = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given["running_mean"] is not None:
        return F.batch_norm(x, **given)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    centred = x - _mean(x, axes, present)
    out = centred * torch.rsqrt(_mean(centred.square(), axes, present) + given.get("eps", 1e-5))
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    weight, bias = (
        None if each is None else each.view(shape)
        for each in (given.get("weight"), given.get("bias"))
    )
    return torch.where(present, _affine(out, weight, bias), 0)


def masked_weight_norm(
    v: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], present: Tensor
) -> Tensor:
    """Give directions their lengths; a row that is cut has no direction and stays zero."""
    given = {**dict(zip(("g", "dim"), args, strict=False)), **kwargs}
    kept_axis = given.get("dim", 0)
    axes = [axis for axis in range(v.ndim) if axis != kept_axis % v.ndim or kept_axis == -1]
    shown = present.expand(v.shape)
    squares = torch.where(shown, v, 0).square().sum(axes, keepdim=True)
    alone = shown.any(axes[0], keepdim=True)
    for axis in axes[1:]:
        alone = alone.any(axis, keepdim=True)
    return torch.where(shown, v * given["g"] / torch.where(alone, squares, 1).sqrt(), 0)


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
"""Functions that average over units, and how they run where some of these are masked."""
