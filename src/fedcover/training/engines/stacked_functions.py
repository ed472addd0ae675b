"""Convolution and batch norm as autograd functions with their own rule for `vmap`.

`forward` defines each function for one client, in terms of torch. `vmap` computes it for all
stacked clients with one Triton kernel. Both must give equal results: change them together.

Shape suffixes: G stacked clients, B images, C channels, H rows, W columns; weights are [T, I, O]:
tap (a position of the filter), input, output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


class StackedConv2d(Function):
    """A convolution without bias.

    It also returns the weights that it used: as taps, in the dtype of the input.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        """Compute the output for one client."""
        cast_weight = weight.to(x.dtype)
        return F.conv2d(x, cast_weight, None, stride, padding), to_taps(cast_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what `backward` needs."""
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor, _: Any) -> tuple[Any, ...]:
        """Compute the gradients of input and weight."""
        x, weight_TIO = ctx.saved_tensors
        needs_x_grad = ctx.needs_input_grad[0]
        x_grad, weight_grad = StackedConv2dBackward.apply(  # type: ignore[no-untyped-call]
            y_grad, x, weight_TIO, ctx.stride, ctx.padding, needs_x_grad
        )
        return x_grad if needs_x_grad else None, weight_grad.to(ctx.weight_dtype), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, stride: int, padding: int
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Compute the output for all clients."""
        from fedcover.training.engines.triton_conv import convolve

        x, weight = _clients_first(info, in_dims, x, weight)
        side = weight.shape[-1]
        height, width = ((length + 2 * padding - side) // stride + 1 for length in x.shape[-2:])
        weight_GTIO = to_taps(weight).to(x.dtype).contiguous()
        y = convolve(
            _channels_last(x), weight_GTIO, stride, padding, (height, width), backward=False
        )
        return (_channels_first(y), weight_GTIO), (0, 0)


class _Gradient(Function):
    """A function that is not differentiated itself."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing: there is no second derivative."""


class StackedConv2dBackward(_Gradient):
    """The gradients of a convolution's input and weight, the latter in float32 or wider."""

    @staticmethod
    def forward(
        y_grad: Tensor,
        x: Tensor,
        weight_TIO: Tensor,
        stride: int,
        padding: int,
        needs_x_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients for one client."""
        x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
            y_grad,
            x,
            from_taps(weight_TIO),
            None,
            [stride, stride],
            [padding, padding],
            [1, 1],
            False,
            [0, 0],
            1,
            [needs_x_grad, True, False],
        )
        return x_grad if needs_x_grad else x.new_empty(()), weight_grad

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        y_grad: Tensor,
        x: Tensor,
        weight_TIO: Tensor,
        stride: int,
        padding: int,
        needs_x_grad: bool,
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Compute the gradients for all clients."""
        from fedcover.training.engines.triton_conv import conv_weight_grad, convolve

        y_grad, x, weight_GTIO = _clients_first(info, in_dims, y_grad, x, weight_TIO)
        y_grad_last = _channels_last(y_grad)
        if needs_x_grad:
            size = (x.shape[-2], x.shape[-1])
            x_grad = _channels_first(
                convolve(y_grad_last, weight_GTIO, stride, padding, size, backward=True)
            )
        else:
            x_grad = x.new_empty(info.batch_size)
        side = _side(weight_GTIO.shape[1])
        weight_grad = conv_weight_grad(_channels_last(x), y_grad_last, side, stride, padding)
        return (x_grad, from_taps(weight_grad)), (0, 0)


class StackedBatchNorm(Function):
    """Batch norm by batch statistics. It also returns the mean and the scale that it used."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output for one client."""
        wide_x = x.float() if x.dtype == torch.bfloat16 else x
        variance, mean = torch.var_mean(wide_x, (0, 2, 3), correction=0)
        scale = (variance + epsilon).rsqrt()
        gain = _per_channel(scale * weight)
        y = (wide_x - _per_channel(mean)) * gain + _per_channel(bias)
        return y.to(x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what `backward` needs."""
        x, weight, _, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor, *_: Any) -> tuple[Any, ...]:
        """Compute the gradients of input, weight and bias."""
        gradients = StackedBatchNormBackward.apply(  # type: ignore[no-untyped-call]
            y_grad, *ctx.saved_tensors
        )
        return (*gradients, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Compute the output for all clients."""
        from fedcover.training.engines.triton_norm import batch_norm

        x, weight, bias = _clients_first(info, in_dims, x, weight, bias)
        y, mean, scale = batch_norm(
            _channels_last(x), weight.contiguous(), bias.contiguous(), epsilon
        )
        return (_channels_first(y), mean, scale), (0, 0, 0)


class StackedBatchNormBackward(_Gradient):
    """The gradients of a batch norm's input, weight and bias."""

    @staticmethod
    def forward(
        y_grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients for one client."""
        wide_grad = y_grad.to(mean.dtype)
        normalised = (x.to(mean.dtype) - _per_channel(mean)) * _per_channel(scale)
        bias_grad = wide_grad.sum((0, 2, 3))
        weight_grad = (wide_grad * normalised).sum((0, 2, 3))
        count = x.numel() // x.shape[1]
        mean_term = _per_channel(bias_grad / count)
        scale_term = normalised * _per_channel(weight_grad / count)
        x_grad = (wide_grad - mean_term - scale_term) * _per_channel(weight * scale)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), bias_grad.to(weight.dtype)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        y_grad: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Compute the gradients for all clients."""
        from fedcover.training.engines.triton_norm import batch_norm_backward

        y_grad, x, weight, mean, scale = _clients_first(
            info, in_dims, y_grad, x, weight, mean, scale
        )
        x_grad, weight_grad, bias_grad = batch_norm_backward(
            _channels_last(y_grad), _channels_last(x), weight.contiguous(), mean, scale
        )
        gradients = (
            _channels_first(x_grad),
            weight_grad.to(weight.dtype),
            bias_grad.to(weight.dtype),
        )
        return gradients, (0, 0, 0)


def _clients_first(info: Any, in_dims: Sequence[Any], *tensors: Tensor) -> list[Tensor]:
    """Move the axis of clients to the front; expand tensors that all clients share."""
    moved = []
    for tensor, client_dim in zip(tensors, in_dims, strict=False):
        if client_dim is None:
            moved.append(tensor.expand(info.batch_size, *tensor.shape))
        else:
            moved.append(tensor.movedim(client_dim, 0))
    return moved


def _channels_last(x_GBCHW: Tensor) -> Tensor:
    """Move the channels to the end, also in memory."""
    return x_GBCHW.movedim(2, -1).contiguous()


def _channels_first(x_GBHWC: Tensor) -> Tensor:
    """Move the channels back before the rows, as a view."""
    return x_GBHWC.movedim(-1, 2)


def _per_channel(values_C: Tensor) -> Tensor:
    """Return a view of one value for each channel that broadcasts over an image."""
    return values_C[:, None, None]


def _side(taps: int) -> int:
    """Return the side of a square filter."""
    side: int = round(taps**0.5)
    return side


def to_taps(weight: Tensor) -> Tensor:
    """Rearrange weights [..., output, input, row, column] to [..., tap, input, output].

    >>> to_taps(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([25, 3, 8])
    """
    return weight.movedim((-2, -1, -3, -4), (-4, -3, -2, -1)).flatten(-4, -3)


def from_taps(weight_TIO: Tensor) -> Tensor:
    """Undo `to_taps`.

    >>> weight = torch.rand(8, 3, 5, 5)
    >>> torch.equal(from_taps(to_taps(weight)), weight)
    True
    """
    *leading_axes, taps, inputs, outputs = weight_TIO.shape
    side = _side(taps)
    weight = weight_TIO.view(*leading_axes, side, side, inputs, outputs)
    return weight.movedim((-4, -3, -2, -1), (-2, -1, -3, -4))
