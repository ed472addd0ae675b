"""Triton kernels for the convolutions of stacked clients, each with weights of its own.

The layer of one small client does not fill a GPU, and every kernel costs a launch. So one kernel
here computes a layer of all clients. Images have their channels last: [client, image, row, column,
channel]; weights are [client, tap, input, output], where a tap is a position of the filter. Sums
are in float32 and in a fixed order, so results repeat exactly.

Import this module only where Triton is installed (torch installs it for CUDA). Block sizes and
`CONV_CHUNKS` may be tuned for speed; a new order of summation changes the last bits of results.
`stacked_functions` defines the same operations in terms of torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CONV_CHUNKS = 32
"""The largest number of parts that the pixels of a weight's gradient are summed in."""

MIN_PROGRAMS = 264
"""Programs of a kernel that give each processor of a large GPU two."""


@triton.jit
def _convolve_kernel(
    x, weight, y, pixels, height, width, out_height, out_width, fan_in, fan_out,
    x_client_stride, in_blocks, weight_in_stride, weight_out_stride,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BACKWARD: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply pixels by weights.

    With `BACKWARD` it computes the gradient of the input from that of the output; a stride leaves
    gaps there. The matrix product is [m: pixels, k: channels in] x [k, n: channels out].
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    client = tl.program_id(2).to(tl.int64)
    image, position = m // (out_height * out_width), m % (out_height * out_width)
    row, column = position // out_width, position % out_width
    x += client * x_client_stride
    weight += client * fan_in * fan_out * SIDE * SIDE
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(SIDE * SIDE * in_blocks):
        tap, k = block // in_blocks, (block % in_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
        if BACKWARD:
            up, left = row + PADDING - tap // SIDE, column + PADDING - tap % SIDE
            inside = (up % STRIDE == 0) & (left % STRIDE == 0)
            up, left = up // STRIDE, left // STRIDE
        else:
            up, left = row * STRIDE - PADDING + tap // SIDE, column * STRIDE - PADDING + tap % SIDE
            inside = up > -1
        inside = inside & (m < pixels)
        inside = inside & (up >= 0) & (up < height) & (left >= 0) & (left < width)
        x_offset = ((image * height + up) * width + left) * fan_in
        x_mask = inside[:, None] & (k < fan_in)[None, :]
        x_tile = tl.load(x + x_offset[:, None] + k[None, :], mask=x_mask, other=0.0)
        k_offset = tap * fan_in * fan_out + k * weight_in_stride
        weight_offset = k_offset[:, None] + (n * weight_out_stride)[None, :]
        weight_mask = (k < fan_in)[:, None] & (n < fan_out)[None, :]
        weight_tile = tl.load(weight + weight_offset, mask=weight_mask, other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee" if EXACT else "tf32")
    y_offset = client * pixels * fan_out + m[:, None] * fan_out + n[None, :]
    y_mask = (m < pixels)[:, None] & (n < fan_out)[None, :]
    tl.store(y + y_offset, total.to(y.dtype.element_ty), mask=y_mask)


@triton.jit
def _weight_grad_kernel(
    x, y_grad, partial_sums, pixels, height, width, out_height, out_width, fan_in, fan_out,
    x_client_stride, grad_client_stride, chunk_pixels, in_tiles, out_tiles,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Sum part of a weight's gradient: one tap, some inputs and outputs, one chunk of pixels."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    tap, tile_of_tap = tile // (in_tiles * out_tiles), tile % (in_tiles * out_tiles)
    i = (tile_of_tap // out_tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    o = (tile_of_tap % out_tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    x += client * x_client_stride
    y_grad += client * grad_client_stride
    total = tl.zeros((BLOCK_I, BLOCK_O), tl.float32)
    for start in range(chunk * chunk_pixels, chunk * chunk_pixels + chunk_pixels, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        image, position = p // (out_height * out_width), p % (out_height * out_width)
        up = (position // out_width) * STRIDE - PADDING + tap // SIDE
        left = (position % out_width) * STRIDE - PADDING + tap % SIDE
        inside = (p < pixels) & (up >= 0) & (up < height) & (left >= 0) & (left < width)
        x_offset = ((image * height + up) * width + left) * fan_in
        x_mask = inside[:, None] & (i < fan_in)[None, :]
        x_tile = tl.load(x + x_offset[:, None] + i[None, :], mask=x_mask, other=0.0)
        grad_offset = (p * fan_out)[:, None] + o[None, :]
        grad_mask = inside[:, None] & (o < fan_out)[None, :]
        grad_tile = tl.load(y_grad + grad_offset, mask=grad_mask, other=0.0)
        total = tl.dot(
            tl.trans(x_tile), grad_tile, total, input_precision="ieee" if EXACT else "tf32"
        )
    clients = tl.num_programs(2)
    first = ((chunk * clients + client) * SIDE * SIDE + tap) * fan_in * fan_out
    offset = first + (i * fan_out)[:, None] + o[None, :]
    tl.store(partial_sums + offset, total, mask=(i < fan_in)[:, None] & (o < fan_out)[None, :])


def clamped_power_of_2(number: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least `number`, within limits."""
    return max(least, min(most, 1 << (number - 1).bit_length()))


def convolve(
    x_GBHWC: Tensor,
    weight_GTIO: Tensor,
    stride: int,
    padding: int,
    size: tuple[int, int],
    *,
    backward: bool,
) -> Tensor:
    """Convolve the images of each client with its own weights.

    Args:
        x_GBHWC: The input; with `backward`, the gradient of the output.
        weight_GTIO: The weights.
        stride: The stride in both directions.
        padding: The padding on all sides.
        size: Height and width of the result.
        backward: Whether to compute the gradient of the input instead of the output.
    """
    clients, images, height, width, fan_in = x_GBHWC.shape
    fan_out = weight_GTIO.shape[2 if backward else 3]
    y = x_GBHWC.new_empty(clients, images, *size, fan_out)
    pixels = images * size[0] * size[1]
    block_n, block_k = clamped_power_of_2(fan_out, 16, 128), clamped_power_of_2(fan_in, 16, 64)
    programs = triton.cdiv(pixels, 128) * triton.cdiv(fan_out, block_n) * clients
    block_m = 64 if programs < MIN_PROGRAMS else 128
    weight_strides = (1, fan_in) if backward else (fan_out, 1)
    grid = triton.cdiv(pixels, block_m), triton.cdiv(fan_out, block_n), clients
    _convolve_kernel[grid](
        x_GBHWC, weight_GTIO, y, pixels, height, width, *size, fan_in, fan_out,
        x_GBHWC.stride(0), triton.cdiv(fan_in, block_k), *weight_strides,
        SIDE=_side(weight_GTIO), STRIDE=stride, PADDING=padding, BACKWARD=backward,
        EXACT=_needs_exact_products(), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return y


def conv_weight_grad(
    x_GBHWC: Tensor, y_grad_GBHWC: Tensor, side: int, stride: int, padding: int
) -> Tensor:
    """Compute the gradient of a layer's weights, [client, tap, input, output] in float32."""
    clients, images, height, width, fan_in = x_GBHWC.shape
    *size, fan_out = y_grad_GBHWC.shape[2:]
    pixels = images * size[0] * size[1]
    taps = side * side
    large_tiles = taps * clients * (fan_in // 128) * (fan_out // 128)
    fills_gpu = max(large_tiles, pixels // 16) >= MIN_PROGRAMS
    max_block = 128 if fills_gpu and min(fan_in, fan_out) >= 128 else 64
    block_i = clamped_power_of_2(fan_in, 16, max_block)
    block_o = clamped_power_of_2(fan_out, 16, max_block)
    in_tiles, out_tiles = triton.cdiv(fan_in, block_i), triton.cdiv(fan_out, block_o)
    tiles = taps * in_tiles * out_tiles
    useful_chunks = min(4 * MIN_PROGRAMS // (tiles * clients), triton.cdiv(pixels, 256))
    chunks = max(1, min(CONV_CHUNKS, useful_chunks))
    chunk_pixels = triton.cdiv(triton.cdiv(pixels, chunks), 64) * 64
    shape = (chunks, clients, taps, fan_in, fan_out)
    partial_sums = torch.empty(shape, dtype=torch.float32, device=x_GBHWC.device)
    _weight_grad_kernel[tiles, chunks, clients](
        x_GBHWC, y_grad_GBHWC, partial_sums, pixels, height, width, *size, fan_in, fan_out,
        x_GBHWC.stride(0), y_grad_GBHWC.stride(0), chunk_pixels, in_tiles, out_tiles,
        SIDE=side, STRIDE=stride, PADDING=padding, EXACT=_needs_exact_products(),
        BLOCK_P=64, BLOCK_I=block_i, BLOCK_O=block_o,
        num_warps=8 if block_i * block_o > 8192 else 4,
    )  # fmt: skip
    return partial_sums[0] if chunks == 1 else partial_sums.sum(0)


def _side(weight_GTIO: Tensor) -> int:
    """Return the side of a square filter."""
    return round(weight_GTIO.shape[1] ** 0.5)


def _needs_exact_products() -> bool:
    """Return whether products must be in float32 rather than tf32."""
    return not torch.backends.cudnn.allow_tf32
