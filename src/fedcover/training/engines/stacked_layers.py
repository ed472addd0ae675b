"""The layers of a whole crew in one kernel each, where torch would make them many small or one slow one.

A mode that stands around a crew's step and gives `conv2d` and `batch_norm` a meaning under `vmap` of their own. What
it does not know it leaves as it is.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

SUPPORTED_LAYERS = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
"""All that may have parameters in a model which is trained so."""


def has_stacked_kernels(module: nn.Module) -> bool:
    """Whether Triton is there, and a model has convolutions but no parameters of layers that are not known here."""
    own = [
        layer
        for layer in module.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    known = any(isinstance(layer, nn.Conv2d) for layer in own) and all(
        type(layer) in SUPPORTED_LAYERS for layer in own
    )
    return known and find_spec("triton") is not None


def uses_stacked_kernels(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a crew with such weights on such a device is trained so."""
    return device.type == "cuda" and dtype == torch.float32 and has_stacked_kernels(module)


class StackedLayers(TorchFunctionMode):
    """Inside it, a crew's convolutions and norms are made by `crew_kernels`, in what their inputs are computed in."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Replace what is known."""
        made = _OVERRIDES[func](*args, **(kwargs or {})) if func in _OVERRIDES else None
        return func(*args, **(kwargs or {})) if made is None else made


def _conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    how = [
        _pair(stride),
        _pair(0 if isinstance(padding, str) else padding),
        tuple(weight.shape[-2:]),
    ]
    square = all(down == across for down, across in how)
    if (
        not square
        or isinstance(padding, str)
        or _pair(dilation) != (1, 1)
        or groups != 1
        or x.ndim != 4
    ):
        narrow = None if bias is None else bias.to(x.dtype)
        return F.conv2d(x, weight.to(x.dtype), narrow, stride, padding, dilation, groups)
    made: Tensor = StackedConv2d.apply(x, weight, how[0][0], how[1][0])[0]  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias.to(x.dtype)[:, None, None]


def _batch_norm(
    x: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    single = (
        x.ndim == 4 and x.numel() == x.shape[1]
    )  # of which there is no statistic: torch refuses it
    if (
        not training
        or running_mean is not None
        or weight is None
        or bias is None
        or x.ndim != 4
        or single
    ):
        return None
    made: tuple[Tensor, ...] = StackedBatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return made[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


_OVERRIDES: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: _conv2d, F.batch_norm: _batch_norm, F.linear: _linear,
}  # fmt: skip


# ── what they compute, for one client by torch and for a crew by kernels ────────────────────────────────


class StackedConv2d(Function):
    """A convolution without bias, and its weights as they were computed with, which may be narrower."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        """Of one client."""
        narrow = weight.to(x.dtype)
        return F.conv2d(x, narrow, None, stride, padding), to_taps(narrow)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """What the way back needs."""
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, back: Tensor, _: Any) -> tuple[Any, ...]:
        """Gradients of input and weight."""
        x, weight_TIO = ctx.saved_tensors
        how = ctx.stride, ctx.padding, ctx.needs_input_grad[0]
        inputs, weights = StackedConv2dBackward.apply(back, x, weight_TIO, *how)  # type: ignore[no-untyped-call]
        return inputs if how[-1] else None, weights.to(ctx.dtype), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, stride: int, padding: int
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Of a crew."""
        from fedcover.training.engines.triton_kernels import convolve

        x, weight = _batch_dim_first(info, in_dims, x, weight)
        high, wide = ((n + 2 * padding - weight.shape[-1]) // stride + 1 for n in x.shape[-2:])
        weight_GTIO = to_taps(weight).to(x.dtype).contiguous()
        made = convolve(_channels_last(x), weight_GTIO, stride, padding, (high, wide), back=False)
        return (made.movedim(-1, 2), weight_GTIO), (0, 0)


class StackedConv2dBackward(Function):
    """The gradients of a convolution's input and weight, the latter in float32 or wider."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        back: Tensor, x: Tensor, weight_TIO: Tensor, stride: int, padding: int, inputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Of one client."""
        weight, pair = from_taps(weight_TIO), ([stride, stride], [padding, padding])
        gradients = torch.ops.aten.convolution_backward(
            back, x, weight, None, *pair, [1, 1], False, [0, 0], 1, [inputs, True, False]
        )
        return gradients[0] if inputs else x.new_empty(()), gradients[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing follows."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        back: Tensor,
        x: Tensor,
        weight_TIO: Tensor,
        stride: int,
        padding: int,
        inputs: bool,
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Of a crew."""
        from fedcover.training.engines.triton_kernels import convolve, weigh

        back, x, weight_GTIO = _batch_dim_first(info, in_dims, back, x, weight_TIO)
        back_last = _channels_last(back)
        if inputs:
            gradient = convolve(
                back_last, weight_GTIO, stride, padding, (x.shape[-2], x.shape[-1]), back=True
            )
            gradient = gradient.movedim(-1, 2)
        else:
            gradient = x.new_empty(info.batch_size)
        weights = weigh(
            _channels_last(x), back_last, round(weight_GTIO.shape[1] ** 0.5), stride, padding
        )
        return (gradient, from_taps(weights)), (0, 0)


class StackedBatchNorm(Function):
    """Batch norm by the batch's own statistics."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of one client."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        scale = (variance + epsilon).rsqrt()
        made = (wide - mean[:, None, None]) * (scale * weight)[:, None, None] + bias[:, None, None]
        return made.to(x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """What the way back needs."""
        x, weight, _, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, back: Tensor, *_: Any) -> tuple[Any, ...]:
        """Gradients of input, weight and bias."""
        return (*StackedBatchNormBackward.apply(back, *ctx.saved_tensors), None)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Of a crew."""
        from fedcover.training.engines.triton_kernels import normalise

        x, weight, bias = _batch_dim_first(info, in_dims, x, weight, bias)
        made, mean, scale = normalise(
            _channels_last(x), weight.contiguous(), bias.contiguous(), epsilon
        )
        return (made.movedim(-1, 2), mean, scale), (0, 0, 0)


class StackedBatchNormBackward(Function):
    """The gradients of a batch norm's input, weight and bias."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        back: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of one client."""
        slope = back.to(mean.dtype)
        value = (x.to(mean.dtype) - mean[:, None, None]) * scale[:, None, None]
        bias, own = slope.sum((0, 2, 3)), (slope * value).sum((0, 2, 3))
        number = x.numel() // x.shape[1]
        made = slope - (bias / number)[:, None, None] - value * (own / number)[:, None, None]
        return (
            (made * (weight * scale)[:, None, None]).to(x.dtype),
            own.to(weight.dtype),
            bias.to(weight.dtype),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing follows."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        back: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Of a crew."""
        from fedcover.training.engines.triton_kernels import normalise_back

        back, x, weight, mean, scale = _batch_dim_first(info, in_dims, back, x, weight, mean, scale)
        made, own, bias = normalise_back(
            _channels_last(back), _channels_last(x), weight.contiguous(), mean, scale
        )
        return (made.movedim(-1, 2), own.to(weight.dtype), bias.to(weight.dtype)), (0, 0, 0)


def _batch_dim_first(info: Any, in_dims: Sequence[Any], *tensors: Tensor) -> list[Tensor]:
    """Tensors with the crew's axis first; what all clients share is there once for each."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
        for tensor, at in zip(tensors, in_dims, strict=False)
    ]


def _channels_last(x_GBCHW: Tensor) -> Tensor:
    """The same with its channels last, also in memory."""
    return x_GBCHW.movedim(2, -1).contiguous()


def to_taps(weight: Tensor) -> Tensor:
    """Weights [..., output, input, row, column] as [..., tap, input, output].

    >>> to_taps(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([25, 3, 8])
    """
    return weight.movedim((-2, -1, -3, -4), (-4, -3, -2, -1)).flatten(-4, -3)


def from_taps(weight_TIO: Tensor) -> Tensor:
    """The way back.

    >>> weight = torch.rand(8, 3, 5, 5)
    >>> torch.equal(from_taps(to_taps(weight)), weight)
    True
    """
    *lead, number, inputs, outputs = weight_TIO.shape
    side = round(number**0.5)
    return weight_TIO.view(*lead, side, side, inputs, outputs).movedim(
        (-4, -3, -2, -1), (-2, -1, -3, -4)
    )
