"""The slow twin of `engines.triton_conv` and `engines.triton_norm`: torch, client by client."""

import torch
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from fedcover.training.engines.stacked_functions import from_taps, to_taps


def first(x_BHWC):
    """Channels before rows, as torch wants them."""
    return x_BHWC.movedim(-1, 1)


def convolve(x_GBHWC, weight_GTIO, stride, padding, size, *, backward):
    outputs = []
    for x_BHWC, weight_TIO in zip(x_GBHWC, weight_GTIO, strict=True):
        x, weight = first(x_BHWC), from_taps(weight_TIO)
        if backward:
            outputs.append(
                conv2d_input((len(x), weight.shape[1], *size), weight, x, stride, padding)
            )
        else:
            outputs.append(F.conv2d(x, weight, None, stride, padding))
    return torch.stack(outputs).movedim(2, -1).contiguous()


def conv_weight_grad(x_GBHWC, back_GBHWC, side, stride, padding):
    gradients = []
    for x_BHWC, back_BHWC in zip(x_GBHWC, back_GBHWC, strict=True):
        shape = back_BHWC.shape[-1], x_BHWC.shape[-1], side, side
        gradients.append(
            to_taps(conv2d_weight(first(x_BHWC), shape, first(back_BHWC), stride, padding))
        )
    return torch.stack(gradients)


def batch_norm(x_GBHWC, weight_GC, bias_GC, epsilon):
    variance_GC, mean_GC = torch.var_mean(x_GBHWC, (1, 2, 3), correction=0)
    scale_GC = (variance_GC + epsilon).rsqrt()
    y = torch.stack(
        [
            F.batch_norm(first(x), None, None, weight, bias, True, 0.1, epsilon)
            for x, weight, bias in zip(x_GBHWC, weight_GC, bias_GC, strict=True)
        ]
    )
    return y.movedim(2, -1).contiguous(), mean_GC, scale_GC


def batch_norm_backward(back_GBHWC, x_GBHWC, weight_GC, mean_GC, scale_GC):
    """By torch's own gradients: the statistics are made again from the input."""
    results = []
    epsilon = (scale_GC**-2 - torch.var(x_GBHWC, (1, 2, 3), correction=0)).mean().item()
    for back, x, weight in zip(back_GBHWC, x_GBHWC, weight_GC, strict=True):
        leaves = [
            tensor.detach().requires_grad_() for tensor in (x, weight, torch.zeros_like(weight))
        ]
        with torch.enable_grad():
            y = F.batch_norm(first(leaves[0]), None, None, leaves[1], leaves[2], True, 0.1, epsilon)
            results.append(torch.autograd.grad(y, leaves, first(back)))
    gradient, weights, biases = (torch.stack(kind) for kind in zip(*results, strict=True))
    return gradient.contiguous(), weights, biases
