"""Who trained what in a round, as small pictures: one per layer and part, light enough for every line of metrics.jsonl.

A picture shrinks a weight tensor to at most 12 x 12 pixels: first axis down, second across, the rest averaged. A pixel
is a digit for the share of its weights that are meant: 0 is exactly none, 9 exactly all, 1 to 8 between. A letter
repeats the digit before it (`a` once, `b` twice, ...). One digit alone fills the picture. Two strips with a stroke
between them, `rows/columns`, are the picture of their products: what slicing leaves of a matrix.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedcover.submodels.reductions import Slices
from fedcover.types import Params, Reduction, Update

SIDE = 12
MAX_MAPPED_LAYERS = 64
MAX_MAPPED_CLIENTS = 32
_BETWEEN = "12345678"
_RUN = re.compile(r"(\d)\1{1,26}")


def round_coverage_maps(counts: Params, updates: Sequence[Update]) -> dict[str, Any]:
    """The pictures of a round: of each distinct part, of the mean share of the clients, of what nobody trained.

    Of a large cohort a few clients are shown, chosen evenly from the largest capacity to the smallest.
    """
    layers = mapped_layers(counts)
    parts: dict[tuple[str, ...], int] = {}
    drawn: dict[int, int] = {}
    clients = {}
    for update in _select_updates(updates):
        key = id(update.trained)  # clients of one capacity often share one reduction
        if key not in drawn:
            drawn[key] = parts.setdefault(tuple(map_of_part(update.trained, layers)), len(parts))
        clients[str(update.client.id)] = drawn[key]
    answered = max(1, len(updates))
    return {
        "layers": {name: list(tensor.shape) for name, tensor in layers.items()},
        "clients": clients,
        "parts": [list(part) for part in parts],
        "trained": _encode_maps(tensor.float() / answered for tensor in layers.values()),
        "missed": _encode_maps((tensor == 0).float() for tensor in layers.values()),
    }


def mapped_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors worth a picture: matrices and kernels (all, if there are none), of very deep models the largest ones.

    >>> list(mapped_layers({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}))
    ['weight']
    """
    found = {name: tensor for name, tensor in tensors.items() if tensor.ndim > 1} or dict(tensors)
    largest = sorted(found, key=lambda name: -found[name].numel())[:MAX_MAPPED_LAYERS]
    return {name: tensor for name, tensor in found.items() if name in largest}


def map_of_part(part: Reduction, layers: Mapping[str, Tensor]) -> list[str]:
    """What a part holds of each layer."""
    if isinstance(part, Slices):
        known: dict[tuple[int, int], str] = {}
        strips = {name: _strips(part, name, tensor.shape, known) for name, tensor in layers.items()}
    else:
        strips = dict.fromkeys(layers)
    unknown = [name for name, strip in strips.items() if strip is None]
    masks = part.mask({name: layers[name] for name in unknown})
    drawn = dict(zip(unknown, _encode_maps(masks[name].float() for name in unknown), strict=True))
    return [strips[name] or drawn[name] for name in layers]


def _strips(
    part: Slices, name: str, shape: torch.Size, known: dict[tuple[int, int], str]
) -> str | None:
    """The picture of a sliced tensor, from what is kept along its axes; None if that is more than rows and columns.

    What is kept along an axis is one object in all tensors of a part, so it is drawn once: `known`.
    """
    if name in part.absent:
        return "0"
    region = part.region(name, shape)
    if any(
        not isinstance(kept, slice) or kept != slice(0, full)
        for kept, full in zip(region[2:], shape[2:], strict=True)
    ):
        return None
    strips = []
    for kept, full in zip(region[:2], shape[:2], strict=True):
        if (id(kept), full) not in known:
            line = np.zeros(full)
            line[kept if isinstance(kept, slice) else kept.numpy()] = 1
            known[id(kept), full] = encode_pixels(_downsample_axis(line))
        strips.append(known[id(kept), full])
    rows, columns = [*strips, "9"][:2]
    return "9" if rows == columns == "9" else f"{rows}/{columns}"


def _downsample_axis(line: np.ndarray) -> list[float]:
    """What `shrink` makes of one axis, without the price of many small tensors."""
    pixels = min(SIDE, len(line))
    starts = np.arange(pixels) * len(line) // pixels
    ends = -(-np.arange(1, pixels + 1) * len(line) // pixels)
    sums = np.concatenate([[0], line.cumsum()])
    shares: list[float] = ((sums[ends] - sums[starts]) / (ends - starts)).tolist()
    return shares


def _encode_maps(shares: Iterable[Tensor]) -> list[str]:
    """A picture of each, fetched from a device in one go."""
    flat = [shrink(share).flatten() for share in shares]
    pixels = iter(torch.cat(flat).tolist() if flat else ())
    return [encode_pixels(islice(pixels, len(each))) for each in flat]


def shrink(share: Tensor) -> Tensor:
    """A tensor of shares as at most 12 x 12 pixels."""
    flat = share.reshape(len(share), -1) if share.ndim < 3 else share.flatten(2).mean(2)
    return adaptive_avg_pool2d(flat[None], (min(SIDE, flat.shape[0]), min(SIDE, flat.shape[1])))[0]


def encode_pixels(pixels: Iterable[float]) -> str:
    """Shares, row by row, as digits with letters for repeats.

    >>> encode_pixels([1, 1, 0.5, 0, 0, 0]), encode_pixels([1, 1])
    ('9a50b', '9')
    """
    text = "".join(
        "0" if share <= 0 else "9" if share >= 1 else _BETWEEN[int(8 * share)] for share in pixels
    )
    if set(text) in ({"0"}, {"9"}):
        return text[0]
    return _RUN.sub(lambda run: run[1] + chr(ord("a") + len(run[0]) - 2), text)


def _select_updates(updates: Sequence[Update]) -> list[Update]:
    ordered = sorted(updates, key=lambda update: (-update.client.capacity, update.client.id))
    if len(ordered) <= MAX_MAPPED_CLIENTS:
        return ordered
    return [
        ordered[place * len(ordered) // MAX_MAPPED_CLIENTS] for place in range(MAX_MAPPED_CLIENTS)
    ]
