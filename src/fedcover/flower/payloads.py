"""What travels between server and node, as bytes: all tensors of a client in one piece, without what is cut."""

import io
import json
import re
import struct
from collections.abc import Container, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.server.npy_codec import (
    NUMPY,
    ArraySpec,
    InvalidReply,
    RawArray,
    array_spec,
    as_array,
    decode_array,
    safe_repr,
)
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.reductions import Masks, Slices
from fedcover.types import Model, Params, Reduction

LONGEST_INDEX = 4 * 2**20
"""Bytes of names and shapes beyond which a parcel is not looked into."""
_ROW = re.compile(  # possessive: to be able to go back, Python would keep 175 bytes for each sign of a name
    rb'(\[|, )\[("(?:[^"\\]|\\.){0,4096}+"), "([a-z0-9_]{1,16})", '
    rb"\[((?:\d{1,19}(?:, \d{1,19}){0,63}+)?)\], (\d{1,15})\]"
)
_END = ord("]")


def encode_reduction(reduction: Reduction, model: Model) -> tuple[bytes, Reduction]:
    """How a reduction travels, and what the node will read from that: both sides pack and unpack with the latter."""
    prunable = {name: model.module.get_parameter(name) for name in model.prunable}
    if isinstance(reduction, Masks):
        odd = set(reduction.bits) - set(prunable)
        if odd:
            raise InvalidValue(
                f"a mask can travel only for prunable weights ({list(prunable)}); got {sorted(odd)}"
            )
        whole = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prunable.items()}
        reduction = Masks({**whole, **reduction.bits})
    encoded = encode(reduction)
    return encoded, decode_reduction(encoded, model)


def decode_reduction(encoded: bytes, model: Model) -> Reduction:
    """The reduction that `encode_reduction` wrote, for the same model."""
    return decode(
        encoded, model.groups, {name: model.module.get_parameter(name) for name in model.prunable}
    )


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Named arrays in one piece: an index, then each as an .npy file; one object for Flower instead of hundreds.

    >>> {name: array.shape for name, array in unpack_arrays(pack_arrays({"w": np.zeros(2, np.float32)})).items()}
    {'w': [2]}
    """
    if too_long := [name for name in arrays if len(json.dumps(name)) > 4000]:
        raise InvalidValue(
            f"names of tensors that travel must be shorter than 4,000 signs; got {too_long[0]:.40}..."
        )
    index: list[list[object]] = []
    pieces: list[bytes | memoryview] = []
    for name, array in arrays.items():
        file = io.BytesIO()
        numbers = np.ascontiguousarray(array).reshape(array.shape)
        np.lib.format.write_array_header_1_0(
            file, np.lib.format.header_data_from_array_1_0(numbers)
        )
        pieces += [file.getvalue(), numbers.reshape(-1).view(np.uint8).data]
        index.append([name, str(array.dtype), list(array.shape), len(pieces[-2]) + numbers.nbytes])
    head = json.dumps(index).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *pieces])  # the only copy


def unpack_arrays(payload: bytes, names: Container[str] | None = None) -> dict[str, RawArray]:
    """The arrays of a parcel, not yet looked into; refused if the index is not one, or not of these bytes.

    It is read row by row, as `pack_arrays` writes it, and no further than to a name that is not among `names`: Python would
    make many times its bytes of an index that a stranger wrote.
    """
    (length,) = struct.unpack("<Q", payload[:8].ljust(8, b"\xff"))
    if length > min(LONGEST_INDEX, len(payload) - 8):
        raise InvalidValue("the parcel has no index")
    content, arrays, place = memoryview(payload)[8 + length :], {}, 0
    for name, dtype, shape, size in _rows(payload, 8, 8 + length):
        if names is not None and name not in names:
            raise InvalidReply("extra array", safe_repr(name))
        if name in arrays:
            raise InvalidValue("the parcel's index names an array twice")
        arrays[name] = RawArray(dtype, shape, NUMPY, content[place : place + size])
        place += size
    if place != len(content):
        raise InvalidValue("the parcel's index does not add up to its bytes")
    return arrays


def _rows(payload: bytes, start: int, end: int) -> Iterator[tuple[str, str, list[int], int]]:
    """The rows of a parcel's index, one by one."""
    if payload[start : start + 3] == b"[]" and end == start + 2:
        return
    place, before = start, b"["
    while place != end - 1 or payload[place] != _END:
        row = _ROW.match(payload, place, end)
        if row is None or row[1] != before:
            raise InvalidValue(f"the parcel's index cannot be read at byte {place - start}")
        try:
            name = json.loads(row[2])
        except ValueError as error:
            raise InvalidValue(
                f"the parcel's index cannot be read at byte {place - start}"
            ) from error
        yield (
            name,
            row[3].decode(),
            [int(size) for size in row[4].split(b", ") if size],
            int(row[5]),
        )
        place, before = row.end(), b", "


def unpack_sections(
    payload: bytes, wanted: Mapping[str, Mapping[str, ArraySpec]]
) -> dict[str, Params]:
    """The tensors of a parcel under each heading, which must be in type and shape as those that are wanted."""
    names = {f"{kind}/{name}" for kind, tensors in wanted.items() for name in tensors}
    arrays = unpack_arrays(payload)
    if names != set(arrays):
        raise InvalidValue(
            f"the parcel must hold other tensors; unlike here: {sorted(names ^ set(arrays))[:5]}"
        )
    return {
        kind: {
            name: decode_array(name, arrays[f"{kind}/{name}"], each)
            for name, each in tensors.items()
        }
        for kind, tensors in wanted.items()
    }


def prefix_names(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Tensors as arrays, named after their heading and themselves."""
    return {
        f"{kind}/{name}": as_array(t)
        for kind, tensors in parts.items()
        for name, t in tensors.items()
    }


def gather_kept(reduction: Reduction, part: Mapping[str, Tensor]) -> Params:
    """A client's part without the holes of its mask: of a masked tensor the kept entries, in a row."""
    masks = reduction.gradient_mask()
    return {name: t[masks[name].to(t.device)] if name in masks else t for name, t in part.items()}


def expected_part(reduction: Reduction, whole: Mapping[str, Tensor]) -> dict[str, ArraySpec]:
    """What `gather_kept` gives of a part of tensors, of which only shapes are read."""
    masks = reduction.gradient_mask()
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
    part = shapes if masks else reduction.extract(shapes)  # a mask cuts no shapes
    return {name: array_spec(tensor, masks.get(name)) for name, tensor in part.items()}


def scatter_kept(
    reduction: Reduction, part: Params, whole: Mapping[str, Tensor], device: torch.device | str
) -> Params:
    """Tensors of which `gather_kept` has taken a part: the part, or, of masked ones, full tensors with zeros elsewhere.

    Extracting the part from them gives the same bits again; of `whole` only shapes are read.
    """
    if isinstance(reduction, Slices):
        return PartialParams(
            whole, {name: tensor.to(device) for name, tensor in part.items()}, reduction
        )
    masks = reduction.gradient_mask()
    full = {name: _spread(t, masks[name].cpu()) if name in masks else t for name, t in part.items()}
    return {name: tensor.to(device) for name, tensor in full.items()}


def _spread(entries: Tensor, mask: Tensor) -> Tensor:
    """A full tensor with entries where a mask is true, in their order, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=entries.dtype).masked_scatter_(mask, entries)
