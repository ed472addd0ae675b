"""Draw who trained what in a round as tiny text images, small enough for metrics.jsonl.

There is one image per layer and part. An image shrinks a weight tensor to at most 12 x 12 pixels:
the first axis down, the second across, the others averaged. A pixel is a digit for the share of
selected weights: 0 is exactly none, 9 exactly all, 1 to 8 are between. A letter repeats the digit
before it (`a` once, `b` twice, ...). A single digit fills the whole image. Two strips with a slash
between them, `rows/columns`, stand for the image of their products. That is what slicing leaves of
a matrix.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedcover.submodels.indexing import Index
from fedcover.submodels.reductions import Slices
from fedcover.types import Params, Reduction, Update

SIDE = 12
MAX_MAPPED_LAYERS = 64
MAX_MAPPED_CLIENTS = 32
_DIGITS_BETWEEN = "12345678"
_REPEATED_DIGIT = re.compile(r"(\d)\1{1,26}")


def round_coverage_maps(counts: Params, updates: Sequence[Update]) -> dict[str, Any]:
    """Draw the images of a round.

    They show each distinct part, the mean share of clients, and what no client trained. Of a large
    cohort a few clients are shown, chosen evenly from the largest capacity to the smallest.
    """
    layers = mapped_layers(counts)
    index_of_map: dict[tuple[str, ...], int] = {}
    index_of_reduction: dict[int, int] = {}  # clients of one capacity often share a reduction
    index_of_client = {}
    for update in _select_updates(updates):
        key = id(update.trained)
        if key not in index_of_reduction:
            part_map = tuple(map_of_part(update.trained, layers))
            index_of_reduction[key] = index_of_map.setdefault(part_map, len(index_of_map))
        index_of_client[str(update.client.id)] = index_of_reduction[key]
    num_updates = max(1, len(updates))
    return {
        "layers": {name: list(tensor.shape) for name, tensor in layers.items()},
        "clients": index_of_client,
        "parts": [list(part_map) for part_map in index_of_map],
        "trained": _encode_maps(tensor.float() / num_updates for tensor in layers.values()),
        "missed": _encode_maps((tensor == 0).float() for tensor in layers.values()),
    }


def mapped_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to draw: matrices and kernels, or all tensors if there are none.

    Of very deep models only the largest tensors are drawn.

    >>> list(mapped_layers({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}))
    ['weight']
    """
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim > 1}
    candidates = matrices or dict(tensors)
    by_size = sorted(candidates, key=lambda name: -candidates[name].numel())
    largest = set(by_size[:MAX_MAPPED_LAYERS])
    return {name: tensor for name, tensor in candidates.items() if name in largest}


def map_of_part(part: Reduction, layers: Mapping[str, Tensor]) -> list[str]:
    """Draw which entries of each layer a part holds."""
    images: dict[str, str] = {}
    if isinstance(part, Slices):
        strip_cache: dict[tuple[int, int], str] = {}
        for name, tensor in layers.items():
            strips = _strips(part, name, tensor.shape, strip_cache)
            if strips is not None:
                images[name] = strips
    remaining = [name for name in layers if name not in images]
    masks = part.mask({name: layers[name] for name in remaining})
    encoded_maps = _encode_maps(masks[name].float() for name in remaining)
    images.update(zip(remaining, encoded_maps, strict=True))
    return [images[name] for name in layers]


def _strips(
    part: Slices, name: str, shape: torch.Size, strip_cache: dict[tuple[int, int], str]
) -> str | None:
    """Draw a sliced tensor by its rows and columns; None if other axes are cut too.

    All tensors of a part share the index objects of an axis, so the cache is keyed by their ids.
    """
    if name in part.absent:
        return "0"
    region = part.region(name, shape)
    for index, axis_length in zip(region[2:], shape[2:], strict=True):
        if not isinstance(index, slice) or index != slice(0, axis_length):
            return None
    strips = []
    for index, axis_length in zip(region[:2], shape[:2], strict=True):
        key = (id(index), axis_length)
        if key not in strip_cache:
            strip_cache[key] = _encode_axis(index, axis_length)
        strips.append(strip_cache[key])
    rows, columns = [*strips, "9"][:2]
    return "9" if rows == columns == "9" else f"{rows}/{columns}"


def _encode_axis(index: Index, axis_length: int) -> str:
    """Draw the kept positions along one axis."""
    is_kept = np.zeros(axis_length)
    is_kept[index if isinstance(index, slice) else index.numpy()] = 1
    return encode_pixels(_downsample_axis(is_kept))


def _downsample_axis(shares: np.ndarray) -> list[float]:
    """Compute what `shrink` returns for one axis, without the overhead of many small tensors."""
    pixels = min(SIDE, len(shares))
    starts = np.arange(pixels) * len(shares) // pixels
    ends = -(-np.arange(1, pixels + 1) * len(shares) // pixels)
    sums = np.concatenate([[0], shares.cumsum()])
    means: list[float] = ((sums[ends] - sums[starts]) / (ends - starts)).tolist()
    return means


def _encode_maps(shares: Iterable[Tensor]) -> list[str]:
    """Draw tensors of shares; they are fetched from a device in one transfer."""
    images = [shrink(share).flatten() for share in shares]
    pixels = iter(torch.cat(images).tolist() if images else ())
    return [encode_pixels(islice(pixels, len(image))) for image in images]


def shrink(share: Tensor) -> Tensor:
    """Average a tensor of shares down to at most 12 x 12 pixels."""
    matrix = share.reshape(len(share), -1) if share.ndim < 3 else share.flatten(2).mean(2)
    size = (min(SIDE, matrix.shape[0]), min(SIDE, matrix.shape[1]))
    return adaptive_avg_pool2d(matrix[None], size)[0]


def encode_pixels(pixels: Iterable[float]) -> str:
    """Encode shares, row by row, as digits with letters for repeats.

    >>> encode_pixels([1, 1, 0.5, 0, 0, 0]), encode_pixels([1, 1])
    ('9a50b', '9')
    """
    digits = "".join(_digit(share) for share in pixels)
    if set(digits) in ({"0"}, {"9"}):
        return digits[0]
    return _REPEATED_DIGIT.sub(lambda run: run[1] + chr(ord("a") + len(run[0]) - 2), digits)


def _digit(share: float) -> str:
    if share <= 0:
        return "0"
    if share >= 1:
        return "9"
    return _DIGITS_BETWEEN[int(8 * share)]


def _select_updates(updates: Sequence[Update]) -> list[Update]:
    """Select the clients to draw, evenly from the largest capacity to the smallest."""
    ordered = sorted(updates, key=lambda update: (-update.client.capacity, update.client.id))
    if len(ordered) <= MAX_MAPPED_CLIENTS:
        return ordered
    return [
        ordered[number * len(ordered) // MAX_MAPPED_CLIENTS] for number in range(MAX_MAPPED_CLIENTS)
    ]
