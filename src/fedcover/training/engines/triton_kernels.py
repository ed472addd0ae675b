"""Convolutions and batch norms of many clients at once, each with weights of its own: kernels in Triton.

A small client's layer is over before it has filled a GPU, and each of its kernels must be launched. So a kernel here
does one layer of a whole crew. Images lie with their channels last: [client, image, row, column, channel]. All sums are
made in float32 and in a fixed order, so results repeat bit for bit.

Imported only where Triton is (torch brings it for CUDA); `crew_layers` says what these compute, in torch's words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS = 32
"""Parts that the pixels of a norm, or of a weight's gradient, are summed in before the parts are."""

PROGRAMS = 264
"""Programs of a kernel that give each processor of a large GPU two."""


@triton.jit
def _convolve(
    x, weight, y, pixels, height, width, out_height, out_width, fan_in, fan_out, x_client, taps_in, w_in, w_out,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BACK: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pixels times weights; `BACK` from a gradient to that of the input, where a stride leaves gaps."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    client = tl.program_id(2).to(tl.int64)
    image, place = m // (out_height * out_width), m % (out_height * out_width)
    row, column = place // out_width, place % out_width
    x += client * x_client
    weight += client * fan_in * fan_out * SIDE * SIDE
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for turn in range(SIDE * SIDE * taps_in):
        tap, k = turn // taps_in, (turn % taps_in) * BLOCK_K + tl.arange(0, BLOCK_K)
        if BACK:
            up, left = row + PADDING - tap // SIDE, column + PADDING - tap % SIDE
            there = (up % STRIDE == 0) & (left % STRIDE == 0)
            up, left = up // STRIDE, left // STRIDE
        else:
            up, left = row * STRIDE - PADDING + tap // SIDE, column * STRIDE - PADDING + tap % SIDE
            there = up > -1
        there = there & (m < pixels) & (up >= 0) & (up < height) & (left >= 0) & (left < width)
        at = ((image * height + up) * width + left) * fan_in
        a = tl.load(
            x + at[:, None] + k[None, :], mask=there[:, None] & (k < fan_in)[None, :], other=0.0
        )
        at_k = tap * fan_in * fan_out + k * w_in
        known = (k < fan_in)[:, None] & (n < fan_out)[None, :]
        b = tl.load(weight + at_k[:, None] + (n * w_out)[None, :], mask=known, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")
    at = client * pixels * fan_out + m[:, None] * fan_out + n[None, :]
    tl.store(
        y + at, total.to(y.dtype.element_ty), mask=(m < pixels)[:, None] & (n < fan_out)[None, :]
    )


@triton.jit
def _weigh(
    x, back, parts, pixels, height, width, out_height, out_width, fan_in, fan_out, x_client, back_client, share,
    tiles_in, tiles_out,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """A part of the gradient of a weight: one tap, some inputs and outputs, some of the pixels."""
    tile, part = tl.program_id(0), tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    tap, rest = tile // (tiles_in * tiles_out), tile % (tiles_in * tiles_out)
    i = (rest // tiles_out) * BLOCK_I + tl.arange(0, BLOCK_I)
    o = (rest % tiles_out) * BLOCK_O + tl.arange(0, BLOCK_O)
    x += client * x_client
    back += client * back_client
    total = tl.zeros((BLOCK_I, BLOCK_O), tl.float32)
    for start in range(part * share, part * share + share, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        image, place = p // (out_height * out_width), p % (out_height * out_width)
        up = (place // out_width) * STRIDE - PADDING + tap // SIDE
        left = (place % out_width) * STRIDE - PADDING + tap % SIDE
        there = (p < pixels) & (up >= 0) & (up < height) & (left >= 0) & (left < width)
        at = ((image * height + up) * width + left) * fan_in
        a = tl.load(
            x + at[:, None] + i[None, :], mask=there[:, None] & (i < fan_in)[None, :], other=0.0
        )
        b = tl.load(
            back + (p * fan_out)[:, None] + o[None, :],
            mask=there[:, None] & (o < fan_out)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee" if EXACT else "tf32")
    clients = tl.num_programs(2)
    first = ((part * clients + client) * SIDE * SIDE + tap) * fan_in * fan_out
    at = first + (i * fan_out)[:, None] + o[None, :]
    tl.store(parts + at, total, mask=(i < fan_in)[:, None] & (o < fan_out)[None, :])


@triton.jit
def _moments(
    x, means, squares, pixels, channels, share, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Mean, and sum of squares about it, of one chunk of the pixels."""
    chunk, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += client * pixels * channels
    mean = tl.zeros((BLOCK_C,), tl.float32)
    square = tl.zeros((BLOCK_C,), tl.float32)
    seen = 0.0
    for start in range(chunk * share, tl.minimum(chunk * share + share, pixels), BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = ((p < pixels) & (p < chunk * share + share))[:, None] & (c < channels)[None, :]
        value = tl.load(x + (p * channels)[:, None] + c[None, :], mask=here, other=0.0).to(
            tl.float32
        )
        number = tl.minimum(BLOCK_P, tl.minimum(pixels, chunk * share + share) - start).to(
            tl.float32
        )
        own = tl.sum(value, 0) / number
        off = tl.where(here, value - own[None, :], 0.0)
        gap, both = own - mean, seen + number
        square += tl.sum(off * off, 0) + gap * gap * (seen * number / both)
        mean += gap * (number / both)
        seen = both
    at = (client * tl.num_programs(0) + chunk) * channels + c
    tl.store(means + at, mean, mask=c < channels)
    tl.store(squares + at, square, mask=c < channels)


@triton.jit
def _normalise(
    x, y, means, squares, weight, bias, mean_out, scale_out, pixels, channels, share, epsilon,
    CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The chunks' moments together, and the pixels by them."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    client = tl.program_id(2).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    number = tl.minimum(tl.maximum(pixels - chunk * share, 0), share).to(tl.float32)[:, None]
    at = (client * CHUNKS + chunk)[:, None] * channels + c[None, :]
    own = tl.load(means + at, mask=(c < channels)[None, :] & (number > 0), other=0.0)
    square = tl.load(squares + at, mask=(c < channels)[None, :] & (number > 0), other=0.0)
    mean = tl.sum(own * number, 0) / pixels
    off = own - mean[None, :]
    scale = 1.0 / tl.sqrt((tl.sum(square, 0) + tl.sum(off * off * number, 0)) / pixels + epsilon)
    known = client * channels + c
    if tl.program_id(0) == 0:
        tl.store(mean_out + known, mean, mask=c < channels)
        tl.store(scale_out + known, scale, mask=c < channels)
    times = tl.load(weight + known, mask=c < channels, other=0.0).to(tl.float32)
    plus = tl.load(bias + known, mask=c < channels, other=0.0).to(tl.float32)
    here = (p < pixels)[:, None] & (c < channels)[None, :]
    at = client * pixels * channels + (p * channels)[:, None] + c[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    made = (value - mean[None, :]) * (scale * times)[None, :] + plus[None, :]
    tl.store(y + at, made.to(y.dtype.element_ty), mask=here)


@triton.jit
def _norm_sums(
    x, back, mean, scale, sums, products, pixels, channels, share, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Sums, over one chunk of the pixels, of a gradient and of its product with what was normalised."""
    chunk, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    middle = tl.load(mean + client * channels + c, mask=c < channels, other=0.0)
    times = tl.load(scale + client * channels + c, mask=c < channels, other=0.0)
    x += client * pixels * channels
    back += client * pixels * channels
    total = tl.zeros((BLOCK_C,), tl.float32)
    product = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(chunk * share, tl.minimum(chunk * share + share, pixels), BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = ((p < pixels) & (p < chunk * share + share))[:, None] & (c < channels)[None, :]
        at = (p * channels)[:, None] + c[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        slope = tl.load(back + at, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(slope, 0)
        product += tl.sum(slope * (value - middle[None, :]) * times[None, :], 0)
    at = (client * tl.num_programs(0) + chunk) * channels + c
    tl.store(sums + at, total, mask=c < channels)
    tl.store(products + at, product, mask=c < channels)


@triton.jit
def _norm_backward(
    x, back, out, mean, scale, weight, sums, products, weight_out, bias_out, pixels, channels,
    CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input, weight and bias."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    client = tl.program_id(2).to(tl.int64)
    known = client * channels + c
    at = (client * CHUNKS + tl.arange(0, CHUNKS))[:, None] * channels + c[None, :]
    total = tl.sum(tl.load(sums + at, mask=(c < channels)[None, :], other=0.0), 0)
    product = tl.sum(tl.load(products + at, mask=(c < channels)[None, :], other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(bias_out + known, total, mask=c < channels)
        tl.store(weight_out + known, product, mask=c < channels)
    middle = tl.load(mean + known, mask=c < channels, other=0.0)
    times = tl.load(scale + known, mask=c < channels, other=0.0)
    slope_of = tl.load(weight + known, mask=c < channels, other=0.0).to(tl.float32) * times
    here = (p < pixels)[:, None] & (c < channels)[None, :]
    at = client * pixels * channels + (p * channels)[:, None] + c[None, :]
    value = (tl.load(x + at, mask=here, other=0.0).to(tl.float32) - middle[None, :]) * times[
        None, :
    ]
    slope = tl.load(back + at, mask=here, other=0.0).to(tl.float32)
    made = (slope - (total / pixels)[None, :] - value * (product / pixels)[None, :]) * slope_of[
        None, :
    ]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=here)


# ── how they are called ─────────────────────────────────────────────────────────────────────────────────


def clamped_power_of_2(number: int, least: int, most: int) -> int:
    """The power of two that holds a number, within limits."""
    return max(least, min(most, 1 << (number - 1).bit_length()))


def convolve(
    x_GBHWC: Tensor,
    weight_GTIO: Tensor,
    stride: int,
    padding: int,
    size: tuple[int, int],
    *,
    back: bool,
) -> Tensor:
    """A layer's output; or, `back`, the gradient of its input of some size from that of its output."""
    clients, images, height, width, fan_in = x_GBHWC.shape
    fan_out = weight_GTIO.shape[2 if back else 3]
    y = x_GBHWC.new_empty(clients, images, *size, fan_out)
    pixels = images * size[0] * size[1]
    block_n, block_k = clamped_power_of_2(fan_out, 16, 128), clamped_power_of_2(fan_in, 16, 64)
    few = triton.cdiv(pixels, 128) * triton.cdiv(fan_out, block_n) * clients < PROGRAMS
    block_m = 64 if few else 128
    grid = triton.cdiv(pixels, block_m), triton.cdiv(fan_out, block_n), clients
    _convolve[grid](
        x_GBHWC, weight_GTIO, y, pixels, height, width, *size, fan_in, fan_out, x_GBHWC.stride(0),
        triton.cdiv(fan_in, block_k), *((1, fan_in) if back else (fan_out, 1)),
        SIDE=_side(weight_GTIO), STRIDE=stride, PADDING=padding, BACK=back, EXACT=_exact(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return y


def weigh(x_GBHWC: Tensor, back_GBHWC: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """The gradient of a layer's weights, [client, tap, input, output] in float32."""
    clients, images, height, width, fan_in = x_GBHWC.shape
    *size, fan_out = back_GBHWC.shape[2:]
    pixels = images * size[0] * size[1]
    large = (
        max(side * side * clients * (fan_in // 128) * (fan_out // 128), pixels // 16) >= PROGRAMS
    )
    most = 128 if large and min(fan_in, fan_out) >= 128 else 64
    block_i, block_o = clamped_power_of_2(fan_in, 16, most), clamped_power_of_2(fan_out, 16, most)
    tiles_in, tiles_out = triton.cdiv(fan_in, block_i), triton.cdiv(fan_out, block_o)
    tiles = side * side * tiles_in * tiles_out
    parts = max(1, min(CHUNKS, 4 * PROGRAMS // (tiles * clients), triton.cdiv(pixels, 256)))
    share = triton.cdiv(triton.cdiv(pixels, parts), 64) * 64
    found = torch.empty(
        parts, clients, side * side, fan_in, fan_out, dtype=torch.float32, device=x_GBHWC.device
    )
    _weigh[tiles, parts, clients](
        x_GBHWC, back_GBHWC, found, pixels, height, width, *size, fan_in, fan_out, x_GBHWC.stride(0),
        back_GBHWC.stride(0), share, tiles_in, tiles_out,
        SIDE=side, STRIDE=stride, PADDING=padding, EXACT=_exact(), BLOCK_P=64, BLOCK_I=block_i, BLOCK_O=block_o,
        num_warps=8 if block_i * block_o > 8192 else 4,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0)


def normalise(
    x_GBHWC: Tensor, weight_GC: Tensor, bias_GC: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the batch's own statistics; also its mean and its scale."""
    clients, channels = weight_GC.shape
    pixels = x_GBHWC[0].numel() // channels
    share, block_c, block_p = _chunks(pixels, channels)
    tiles = triton.cdiv(channels, block_c)
    means, squares = x_GBHWC.new_empty(2, clients, CHUNKS, channels, dtype=torch.float32)
    mean, scale = x_GBHWC.new_empty(2, clients, channels, dtype=torch.float32)
    y = torch.empty_like(x_GBHWC)
    _moments[CHUNKS, tiles, clients](
        x_GBHWC, means, squares, pixels, channels, share, BLOCK_P=block_p, BLOCK_C=block_c
    )
    _normalise[triton.cdiv(pixels, block_p), tiles, clients](
        x_GBHWC, y, means, squares, weight_GC, bias_GC, mean, scale, pixels, channels, share, epsilon,
        CHUNKS=CHUNKS, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    return y, mean, scale


def normalise_back(
    back_GBHWC: Tensor, x_GBHWC: Tensor, weight_GC: Tensor, mean_GC: Tensor, scale_GC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a batch norm's input, weight and bias."""
    clients, channels = weight_GC.shape
    pixels = x_GBHWC[0].numel() // channels
    share, block_c, block_p = _chunks(pixels, channels)
    tiles = triton.cdiv(channels, block_c)
    sums, products = x_GBHWC.new_empty(2, clients, CHUNKS, channels, dtype=torch.float32)
    weight, bias = x_GBHWC.new_empty(2, clients, channels, dtype=torch.float32)
    out = torch.empty_like(x_GBHWC)
    _norm_sums[CHUNKS, tiles, clients](
        x_GBHWC, back_GBHWC, mean_GC, scale_GC, sums, products, pixels, channels, share,
        BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    _norm_backward[triton.cdiv(pixels, block_p), tiles, clients](
        x_GBHWC, back_GBHWC, out, mean_GC, scale_GC, weight_GC, sums, products, weight, bias, pixels, channels,
        CHUNKS=CHUNKS, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip
    return out, weight, bias


def _chunks(pixels: int, channels: int) -> tuple[int, int, int]:
    """Pixels of a chunk, channels of a tile and pixels that are looked at together."""
    block_c = clamped_power_of_2(channels, 8, 64)
    return triton.cdiv(pixels, CHUNKS), block_c, 4096 // block_c


def _side(weight_GTIO: Tensor) -> int:
    return round(weight_GTIO.shape[1] ** 0.5)


def _exact() -> bool:
    """Whether float32 products are to be float32 to the last bit."""
    return not torch.backends.cudnn.allow_tf32
