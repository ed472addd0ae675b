"""Encode reductions for transport: a few bytes for windows and random draws, bits otherwise."""

import struct
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.submodels.reductions import Masks, Slices, circular_range, random_slices
from fedcover.types import Reduction, UnitGroup

_DRAW, _WINDOWS, _UNITS, _MASKS = b"D", b"W", b"U", b"M"


def encode(reduction: Reduction) -> bytes:
    """Encode a reduction.

    A random draw takes two numbers and a window takes two numbers per group. Other slices take one
    bit per unit, and masks one bit per prunable weight.

    >>> from fedcover.submodels.reductions import window_slices
    >>> len(encode(window_slices((UnitGroup("hidden", 1000, ()),), 0.5)))
    9
    """
    if not isinstance(reduction, Slices):
        masks = reduction.gradient_mask()
        bits = [masks[name] for name in sorted(masks)]
        keeps_everything = all(bool(tensor.all()) for tensor in bits)
        return _MASKS + (b"" if keeps_everything else _pack_bits(bits))
    if reduction.draw is not None:
        return _DRAW + struct.pack("<dQ", *reduction.draw)
    units_and_sizes = [(reduction.kept[group.name], group.size) for group in reduction.groups]
    windows = [_as_window(units, size) for units, size in units_and_sizes]
    if all(windows):
        return _WINDOWS + b"".join(struct.pack("<II", *window) for window in windows if window)
    bits = [
        torch.zeros(size, dtype=torch.bool).index_fill_(0, units, True)
        for units, size in units_and_sizes
    ]
    return _UNITS + _pack_bits(bits)


def decode(
    encoded: bytes, groups: tuple[UnitGroup, ...], prunable: Mapping[str, Tensor]
) -> Reduction:
    """Decode a reduction that `encode` wrote.

    Args:
        encoded: The bytes.
        groups: The unit groups of the model.
        prunable: The prunable tensors of the model; only their shapes are read.

    Returns:
        The reduction.

    Raises:
        InvalidValue: If the bytes do not describe a reduction of this model.

    >>> from fedcover.submodels.reductions import window_slices
    >>> g = (UnitGroup("hidden", 8, ()),)
    >>> decode(encode(window_slices(g, 0.5, {"hidden": 6})), g, {}).kept["hidden"].tolist()
    [0, 1, 6, 7]
    """
    tag, body = encoded[:1], encoded[1:]
    try:
        if tag == _DRAW:
            return random_slices(groups, *struct.unpack("<dQ", body))
        if tag == _WINDOWS:
            return _decode_windows(body, groups)
        if tag == _UNITS:
            return _decode_units(body, groups)
        if tag == _MASKS:
            return _decode_masks(body, prunable)
    except (struct.error, ValueError) as error:
        raise InvalidValue(
            f"reduction cannot be decoded from {len(encoded)} bytes: {error}"
        ) from error
    raise InvalidValue(f"reduction must begin with one of D, W, U, M; got {tag!r}")


def _decode_windows(body: bytes, groups: tuple[UnitGroup, ...]) -> Slices:
    units_by_group = {}
    for group, (first, length) in zip(groups, struct.iter_unpack("<II", body), strict=True):
        units_by_group[group.name] = _window_units(first, length, group.size)
    return Slices(groups, units_by_group)


def _decode_units(body: bytes, groups: tuple[UnitGroup, ...]) -> Slices:
    bits_of_groups = _unpack_bits(body, [(group.size,) for group in groups])
    units_by_group = {}
    for group, bits in zip(groups, bits_of_groups, strict=True):
        units_by_group[group.name] = _kept_units(bits)
    return Slices(groups, units_by_group)


def _decode_masks(body: bytes, prunable: Mapping[str, Tensor]) -> Masks:
    names = sorted(prunable) if body else []
    bits = _unpack_bits(body, [prunable[name].shape for name in names])
    return Masks(dict(zip(names, bits, strict=True)))


def _as_window(units: Tensor, size: int) -> tuple[int, int] | None:
    """Return (first, length) if sorted units are consecutive modulo the group's size."""
    sorted_units = units.numpy()
    gaps = np.flatnonzero(np.diff(sorted_units) != 1)
    if not len(gaps):
        return int(sorted_units[0]), len(sorted_units)
    if len(gaps) == 1 and sorted_units[0] == 0 and sorted_units[-1] == size - 1:
        return int(sorted_units[gaps[0] + 1]), len(sorted_units)
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
    tensors = []
    start = 0
    for shape, length in zip(shapes, lengths, strict=True):
        packed = np.frombuffer(body[start : start + length], dtype=np.uint8)
        bits = np.unpackbits(packed, count=prod(shape)).astype(bool)
        tensors.append(torch.from_numpy(bits).view(tuple(shape)))
        start += length
    return tensors
