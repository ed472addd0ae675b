"""What travels between server and node, as bytes: all tensors of a client in one piece, without what is cut."""

import io
import json
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedcover.arrays import NUMPY, RawArray, Wanted, as_array, read, wanted_for
from fedcover.errors import InvalidValue
from fedcover.portions import Portion
from fedcover.reduction import Masks, Slices
from fedcover.types import Model, Params, Reduction
from fedcover.wire import decode, encode

LONGEST_INDEX = 4 * 2**20
"""Bytes of names and shapes beyond which a parcel is not looked into."""


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


def unbundle(parcel: bytes) -> dict[str, RawArray]:
    """The arrays of a parcel, not yet looked into; refused if the index is not one, or not of these bytes."""
    (length,) = struct.unpack("<Q", parcel[:8].ljust(8, b"\xff"))
    if length > min(LONGEST_INDEX, len(parcel) - 8):
        raise InvalidValue("the parcel has no index")
    try:
        index = json.loads(parcel[8 : 8 + length])
        rows = [(name, dtype, shape, size) for name, dtype, shape, size in index]
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(f"the parcel's index cannot be read: {type(error).__name__}") from error
    sizes = [size for *_, size in rows]
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(parcel) - 8 - length:
        raise InvalidValue("the parcel's index does not add up to its bytes")
    content, arrays = memoryview(parcel)[8 + length :], {}
    for name, dtype, shape, size in rows:
        if not isinstance(name, str) or name in arrays:
            raise InvalidValue("the parcel's index names an array twice, or not at all")
        arrays[name] = RawArray(dtype, shape, NUMPY, content[:size])
        content = content[size:]
    return arrays


def sections(parcel: bytes, wanted: Mapping[str, Mapping[str, Wanted]]) -> dict[str, Params]:
    """The tensors of a parcel under each heading, which must be in type and shape as those that are wanted."""
    arrays = unbundle(parcel)
    names = {f"{kind}/{name}" for kind, tensors in wanted.items() for name in tensors}
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
