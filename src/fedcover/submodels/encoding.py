"""How a reduction travels: a few bytes for windows and draws, one bit per unit or weight for the rest."""

import struct
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.submodels.reductions import Masks, Slices, circular_range, drawn
from fedcover.types import Reduction, UnitGroup

_DRAW, _WINDOWS, _UNITS, _MASKS = b"D", b"W", b"U", b"M"


def encode(reduction: Reduction) -> bytes:
    """Two numbers for a draw, two per group for windows, else one bit per unit or per prunable weight.

    >>> from fedcover.submodels.reductions import windows
    >>> len(encode(windows((UnitGroup("hidden", 1000, ()),), 0.5)))
    9
    """
    if not isinstance(reduction, Slices):
        masks = reduction.gradient_mask()
        bits = [masks[name] for name in sorted(masks)]
        return _MASKS + (b"" if all(bool(tensor.all()) for tensor in bits) else _pack_bits(bits))
    if reduction.draw is not None:
        return _DRAW + struct.pack("<dQ", *reduction.draw)
    units = [(reduction.kept[group.name], group.size) for group in reduction.groups]
    spans = [_window(kept, size) for kept, size in units]
    if all(spans):
        return _WINDOWS + b"".join(struct.pack("<II", *span) for span in spans if span)
    return _UNITS + _pack_bits(
        [torch.zeros(size, dtype=torch.bool).index_fill_(0, kept, True) for kept, size in units]
    )


def decode(
    encoded: bytes, groups: tuple[UnitGroup, ...], prunable: Mapping[str, Tensor]
) -> Reduction:
    """The reduction that `encode` wrote; of `prunable` (the model's prunable tensors) only shapes are read.

    >>> from fedcover.submodels.reductions import windows
    >>> g = (UnitGroup("hidden", 8, ()),)
    >>> decode(encode(windows(g, 0.5, {"hidden": 6})), g, {}).kept["hidden"].tolist()
    [0, 1, 6, 7]
    """
    tag, body = encoded[:1], encoded[1:]
    try:
        if tag == _DRAW:
            return drawn(groups, *struct.unpack("<dQ", body))
        if tag == _WINDOWS:
            spans = zip(groups, struct.iter_unpack("<II", body), strict=True)
            return Slices(
                groups,
                {g.name: _window_units(first, length, g.size) for g, (first, length) in spans},
            )
        if tag == _UNITS:
            bits = zip(groups, _unpack_bits(body, [(g.size,) for g in groups]), strict=True)
            return Slices(groups, {g.name: _kept_units(kept) for g, kept in bits})
        if tag == _MASKS:
            names = sorted(prunable) if body else []
            return Masks(
                dict(
                    zip(names, _unpack_bits(body, [prunable[n].shape for n in names]), strict=True)
                )
            )
    except (struct.error, ValueError) as error:
        raise InvalidValue(
            f"reduction cannot be decoded from {len(encoded)} bytes: {error}"
        ) from error
    raise InvalidValue(f"reduction must begin with one of D, W, U, M; got {tag!r}")


def _window(kept: Tensor, size: int) -> tuple[int, int] | None:
    """(first, length) if the sorted units are neighbours on the circle of the group, else None."""
    units = kept.numpy()
    gaps = np.flatnonzero(np.diff(units) != 1)
    if not len(gaps):
        return int(units[0]), len(units)
    if len(gaps) == 1 and units[0] == 0 and units[-1] == size - 1:
        return int(units[gaps[0] + 1]), len(units)
    return None


def _window_units(first: int, length: int, size: int) -> Tensor:
    if not (first < size and 1 <= length <= size):
        raise ValueError(f"a window of {length} units from {first} does not fit a group of {size}")
    return circular_range(first, length, size)


def _kept_units(bits: Tensor) -> Tensor:
    if not bool(bits.any()):
        raise ValueError("a group keeps none of its units")
    return bits.nonzero().flatten()


def _pack_bits(bits: Sequence[Tensor]) -> bytes:
    return b"".join(np.packbits(tensor.cpu().numpy().ravel()).tobytes() for tensor in bits)


def _unpack_bits(body: bytes, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    lengths = [(prod(shape) + 7) // 8 for shape in shapes]
    if sum(lengths) != len(body):
        raise ValueError(f"{sum(lengths)} bytes of bits expected, {len(body)} given")
    parts, start = [], 0
    for shape, length in zip(shapes, lengths, strict=True):
        raw = np.frombuffer(body[start : start + length], dtype=np.uint8)
        parts.append(
            torch.from_numpy(np.unpackbits(raw, count=prod(shape)).astype(bool)).view(tuple(shape))
        )
        start += length
    return parts
