"""Triton kernels for the batch norms of stacked clients, each with weights of its own.

One kernel computes a layer of all clients; `triton_conv` says why. Images have their channels
last: [client, image, row, column, channel]. Pixels are summed in chunks, in float32 and in a fixed
order, so results repeat exactly. Import this module only where Triton is installed.
`stacked_functions` defines the same operations in terms of torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedcover.training.engines.triton_conv import clamped_power_of_2

NORM_CHUNKS = 32
"""Chunks that the pixels of a channel are summed in before the sums are combined."""


@triton.jit
def _moments_kernel(
    x, means, squares, pixels, channels, chunk_pixels,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the mean of one chunk of pixels, and the sum of squares about it."""
    chunk, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += client * pixels * channels
    mean = tl.zeros((BLOCK_C,), tl.float32)
    square = tl.zeros((BLOCK_C,), tl.float32)
    count = 0.0
    chunk_end = tl.minimum(pixels, chunk * chunk_pixels + chunk_pixels)
    for start in range(chunk * chunk_pixels, chunk_end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < chunk_end)[:, None] & (c < channels)[None, :]
        offset = (p * channels)[:, None] + c[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        block_count = tl.minimum(BLOCK_P, chunk_end - start).to(tl.float32)
        block_mean = tl.sum(value, 0) / block_count
        deviation = tl.where(mask, value - block_mean[None, :], 0.0)
        # combine the moments of the block with those so far (Chan et al.)
        gap, new_count = block_mean - mean, count + block_count
        square += tl.sum(deviation * deviation, 0) + gap * gap * (count * block_count / new_count)
        mean += gap * (block_count / new_count)
        count = new_count
    offset = (client * tl.num_programs(0) + chunk) * channels + c
    tl.store(means + offset, mean, mask=c < channels)
    tl.store(squares + offset, square, mask=c < channels)


@triton.jit
def _normalise_kernel(
    x, y, means, squares, weight, bias, mean_out, scale_out, pixels, channels, chunk_pixels,
    epsilon, CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Combine the moments of all chunks and normalise pixels by them."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    client = tl.program_id(2).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    count = tl.minimum(tl.maximum(pixels - chunk * chunk_pixels, 0), chunk_pixels)
    count = count.to(tl.float32)[:, None]
    chunk_offset = (client * CHUNKS + chunk)[:, None] * channels + c[None, :]
    chunk_mask = (c < channels)[None, :] & (count > 0)
    chunk_mean = tl.load(means + chunk_offset, mask=chunk_mask, other=0.0)
    square = tl.load(squares + chunk_offset, mask=chunk_mask, other=0.0)
    mean = tl.sum(chunk_mean * count, 0) / pixels
    deviation = chunk_mean - mean[None, :]
    total_square = tl.sum(square, 0) + tl.sum(deviation * deviation * count, 0)
    scale = 1.0 / tl.sqrt(total_square / pixels + epsilon)
    channel = client * channels + c
    if tl.program_id(0) == 0:
        tl.store(mean_out + channel, mean, mask=c < channels)
        tl.store(scale_out + channel, scale, mask=c < channels)
    gain = tl.load(weight + channel, mask=c < channels, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=c < channels, other=0.0).to(tl.float32)
    mask = (p < pixels)[:, None] & (c < channels)[None, :]
    offset = client * pixels * channels + (p * channels)[:, None] + c[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    normalised = (value - mean[None, :]) * (scale * gain)[None, :] + shift[None, :]
    tl.store(y + offset, normalised.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _grad_sums_kernel(
    x, y_grad, mean, scale, sums, products, pixels, channels, chunk_pixels,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum, over one chunk of pixels, a gradient and its product with the normalised input."""
    chunk, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel_mean = tl.load(mean + client * channels + c, mask=c < channels, other=0.0)
    channel_scale = tl.load(scale + client * channels + c, mask=c < channels, other=0.0)
    x += client * pixels * channels
    y_grad += client * pixels * channels
    total = tl.zeros((BLOCK_C,), tl.float32)
    product = tl.zeros((BLOCK_C,), tl.float32)
    chunk_end = tl.minimum(pixels, chunk * chunk_pixels + chunk_pixels)
    for start in range(chunk * chunk_pixels, chunk_end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < chunk_end)[:, None] & (c < channels)[None, :]
        offset = (p * channels)[:, None] + c[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(y_grad + offset, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(slope, 0)
        product += tl.sum(slope * (value - channel_mean[None, :]) * channel_scale[None, :], 0)
    offset = (client * tl.num_programs(0) + chunk) * channels + c
    tl.store(sums + offset, total, mask=c < channels)
    tl.store(products + offset, product, mask=c < channels)


@triton.jit
def _backward_kernel(
    x, y_grad, x_grad, mean, scale, weight, sums, products, weight_grad, bias_grad, pixels,
    channels, CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Combine the sums of all chunks into the gradients of input, weight and bias."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    client = tl.program_id(2).to(tl.int64)
    channel = client * channels + c
    chunk_offset = (client * CHUNKS + tl.arange(0, CHUNKS))[:, None] * channels + c[None, :]
    chunk_mask = (c < channels)[None, :]
    total = tl.sum(tl.load(sums + chunk_offset, mask=chunk_mask, other=0.0), 0)
    product = tl.sum(tl.load(products + chunk_offset, mask=chunk_mask, other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(bias_grad + channel, total, mask=c < channels)
        tl.store(weight_grad + channel, product, mask=c < channels)
    channel_mean = tl.load(mean + channel, mask=c < channels, other=0.0)
    channel_scale = tl.load(scale + channel, mask=c < channels, other=0.0)
    gain = tl.load(weight + channel, mask=c < channels, other=0.0).to(tl.float32) * channel_scale
    mask = (p < pixels)[:, None] & (c < channels)[None, :]
    offset = client * pixels * channels + (p * channels)[:, None] + c[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    value = (value - channel_mean[None, :]) * channel_scale[None, :]
    slope = tl.load(y_grad + offset, mask=mask, other=0.0).to(tl.float32)
    centred = slope - (total / pixels)[None, :] - value * (product / pixels)[None, :]
    gradient = centred * gain[None, :]
    tl.store(x_grad + offset, gradient.to(x_grad.dtype.element_ty), mask=mask)


def batch_norm(
    x_GBHWC: Tensor, weight_GC: Tensor, bias_GC: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each client's images by its batch statistics.

    Returns:
        The output, the mean, and the scale: the reciprocal of the standard deviation.
    """
    clients, channels = weight_GC.shape
    pixels = x_GBHWC[0].numel() // channels
    chunk_pixels, block_c, block_p = _block_sizes(pixels, channels)
    tiles = triton.cdiv(channels, block_c)
    means, squares = x_GBHWC.new_empty(2, clients, NORM_CHUNKS, channels, dtype=torch.float32)
    mean, scale = x_GBHWC.new_empty(2, clients, channels, dtype=torch.float32)
    y = torch.empty_like(x_GBHWC)
    _moments_kernel[NORM_CHUNKS, tiles, clients](
        x_GBHWC, means, squares, pixels, channels, chunk_pixels, BLOCK_P=block_p, BLOCK_C=block_c
    )
    _normalise_kernel[triton.cdiv(pixels, block_p), tiles, clients](
        x_GBHWC, y, means, squares, weight_GC, bias_GC, mean, scale, pixels, channels,
        chunk_pixels, epsilon, CHUNKS=NORM_CHUNKS, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    return y, mean, scale


def batch_norm_backward(
    y_grad_GBHWC: Tensor, x_GBHWC: Tensor, weight_GC: Tensor, mean_GC: Tensor, scale_GC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a batch norm's input, weight and bias."""
    clients, channels = weight_GC.shape
    pixels = x_GBHWC[0].numel() // channels
    chunk_pixels, block_c, block_p = _block_sizes(pixels, channels)
    tiles = triton.cdiv(channels, block_c)
    sums, products = x_GBHWC.new_empty(2, clients, NORM_CHUNKS, channels, dtype=torch.float32)
    weight_grad, bias_grad = x_GBHWC.new_empty(2, clients, channels, dtype=torch.float32)
    x_grad = torch.empty_like(x_GBHWC)
    _grad_sums_kernel[NORM_CHUNKS, tiles, clients](
        x_GBHWC, y_grad_GBHWC, mean_GC, scale_GC, sums, products, pixels, channels,
        chunk_pixels, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    _backward_kernel[triton.cdiv(pixels, block_p), tiles, clients](
        x_GBHWC, y_grad_GBHWC, x_grad, mean_GC, scale_GC, weight_GC, sums, products,
        weight_grad, bias_grad, pixels, channels,
        CHUNKS=NORM_CHUNKS, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    return x_grad, weight_grad, bias_grad


def _block_sizes(pixels: int, channels: int) -> tuple[int, int, int]:
    """Return the pixels of a chunk, the channels of a tile, and the pixels of a tile."""
    block_c = clamped_power_of_2(channels, 8, 64)
    return triton.cdiv(pixels, NORM_CHUNKS), block_c, 4096 // block_c
