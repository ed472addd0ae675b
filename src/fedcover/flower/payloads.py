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
from fedcover.server.npy_codec import NUMPY, RawArray, Refused, Wanted, as_array, read, shown, wanted_for
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.partial_params import Portion
from fedcover.submodels.reductions import Masks, Slices
from fedcover.types import Model, Params, Reduction

LONGEST_INDEX = 4 * 2**20
"""Bytes of names and shapes beyond which a parcel is not looked into."""
_ROW = re.compile(  # possessive: to be able to go back, Python would keep 175 bytes for each sign of a name
    rb'(\[|, )\[("(?:[^"\\]|\\.){0,4096}+"), "([a-z0-9_]{1,16})", '
    rb"\[((?:\d{1,19}(?:, \d{1,19}){0,63}+)?)\], (\d{1,15})\]"
)
_END = ord("]")


def as_sent(reduction: Reduction, model: Model) -> tuple[bytes, Reduction]:
    """How a reduction travels, and what the node will read from that: both sides pack and unpack with the latter."""
    prunable = {name: model.module.get_parameter(name) for name in model.prunable}
    if isinstance(reduction, Masks):
        odd = set(reduction.bits) - set(prunable)
        if odd:
            raise InvalidValue(f"a mask can travel only for prunable weights ({list(prunable)}); got {sorted(odd)}")
        whole = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prunable.items()}
        reduction = Masks({**whole, **reduction.bits})
    encoded = encode(reduction)
    return encoded, read_reduction(encoded, model)


def read_reduction(encoded: bytes, model: Model) -> Reduction:
    """The reduction that `as_sent` wrote, for the same model."""
    return decode(encoded, model.groups, {name: model.module.get_parameter(name) for name in model.prunable})


def bundle(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Named arrays in one piece: an index, then each as an .npy file; one object for Flower instead of hundreds.

    >>> {name: array.shape for name, array in unbundle(bundle({"w": np.zeros(2, np.float32)})).items()}
    {'w': [2]}
    """
    if too_long := [name for name in arrays if len(json.dumps(name)) > 4000]:
        raise InvalidValue(f"names of tensors that travel must be shorter than 4,000 signs; got {too_long[0]:.40}...")
    index: list[list[object]] = []
    pieces: list[bytes | memoryview] = []
    for name, array in arrays.items():
        file = io.BytesIO()
        numbers = np.ascontiguousarray(array).reshape(array.shape)
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(numbers))
        pieces += [file.getvalue(), numbers.reshape(-1).view(np.uint8).data]
        index.append([name, str(array.dtype), list(array.shape), len(pieces[-2]) + numbers.nbytes])
    head = json.dumps(index).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *pieces])  # the only copy


def unbundle(parcel: bytes, names: Container[str] | None = None) -> dict[str, RawArray]:
    """The arrays of a parcel, not yet looked into; refused if the index is not one, or not of these bytes.

    It is read row by row, as `bundle` writes it, and no further than to a name that is not among `names`: Python would
    make many times its bytes of an index that a stranger wrote.
    """
    (length,) = struct.unpack("<Q", parcel[:8].ljust(8, b"\xff"))
    if length > min(LONGEST_INDEX, len(parcel) - 8):
        raise InvalidValue("the parcel has no index")
    content, arrays, place = memoryview(parcel)[8 + length :], {}, 0
    for name, dtype, shape, size in _rows(parcel, 8, 8 + length):
        if names is not None and name not in names:
            raise Refused("extra array", shown(name))
        if name in arrays:
            raise InvalidValue("the parcel's index names an array twice")
        arrays[name] = RawArray(dtype, shape, NUMPY, content[place : place + size])
        place += size
    if place != len(content):
        raise InvalidValue("the parcel's index does not add up to its bytes")
    return arrays


def _rows(parcel: bytes, start: int, end: int) -> Iterator[tuple[str, str, list[int], int]]:
    """The rows of a parcel's index, one by one."""
    if parcel[start : start + 3] == b"[]" and end == start + 2:
        return
    place, before = start, b"["
    while place != end - 1 or parcel[place] != _END:
        row = _ROW.match(parcel, place, end)
        if row is None or row[1] != before:
            raise InvalidValue(f"the parcel's index cannot be read at byte {place - start}")
        try:
            name = json.loads(row[2])
        except ValueError as error:
            raise InvalidValue(f"the parcel's index cannot be read at byte {place - start}") from error
        yield name, row[3].decode(), [int(size) for size in row[4].split(b", ") if size], int(row[5])
        place, before = row.end(), b", "


def sections(parcel: bytes, wanted: Mapping[str, Mapping[str, Wanted]]) -> dict[str, Params]:
    """The tensors of a parcel under each heading, which must be in type and shape as those that are wanted."""
    names = {f"{kind}/{name}" for kind, tensors in wanted.items() for name in tensors}
    arrays = unbundle(parcel)
    if names != set(arrays):
        raise InvalidValue(f"the parcel must hold other tensors; unlike here: {sorted(names ^ set(arrays))[:5]}")
    return {
        kind: {name: read(name, arrays[f"{kind}/{name}"], each) for name, each in tensors.items()}
        for kind, tensors in wanted.items()
    }


def headed(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Tensors as arrays, named after their heading and themselves."""
    return {f"{kind}/{name}": as_array(t) for kind, tensors in parts.items() for name, t in tensors.items()}


def kept(reduction: Reduction, part: Mapping[str, Tensor]) -> Params:
    """A client's part without the holes of its mask: of a masked tensor the kept entries, in a row."""
    masks = reduction.gradient_mask()
    return {name: t[masks[name].to(t.device)] if name in masks else t for name, t in part.items()}


def wanted_part(reduction: Reduction, whole: Mapping[str, Tensor]) -> dict[str, Wanted]:
    """What `kept` gives of a part of tensors, of which only shapes are read."""
    masks = reduction.gradient_mask()
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
    part = shapes if masks else reduction.extract(shapes)  # a mask cuts no shapes
    return {name: wanted_for(tensor, masks.get(name)) for name, tensor in part.items()}


def received(reduction: Reduction, part: Params, whole: Mapping[str, Tensor], device: torch.device | str) -> Params:
    """Tensors of which `kept` has taken a part: the part, or, of masked ones, full tensors with zeros elsewhere.

    Extracting the part from them gives the same bits again; of `whole` only shapes are read.
    """
    if isinstance(reduction, Slices):
        return Portion(whole, {name: tensor.to(device) for name, tensor in part.items()}, reduction)
    masks = reduction.gradient_mask()
    full = {name: _spread(t, masks[name].cpu()) if name in masks else t for name, t in part.items()}
    return {name: tensor.to(device) for name, tensor in full.items()}


def _spread(entries: Tensor, mask: Tensor) -> Tensor:
    """A full tensor with entries where a mask is true, in their order, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=entries.dtype).masked_scatter_(mask, entries)
