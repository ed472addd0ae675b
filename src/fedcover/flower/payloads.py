"""The tensors of a message as bytes: all of a client's in one payload, without what is cut."""

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
from fedcover.tensors import to_device
from fedcover.types import Model, Params, Reduction

MAX_INDEX_BYTES = 4 * 2**20
"""The most bytes of the index of a payload."""
MAX_NAME_LENGTH = 4000
"""The most characters of a tensor's name as JSON."""
_INDEX_ROW = re.compile(  # possessive: to backtrack, Python would need 175 bytes per character
    rb'(\[|, )\[("(?:[^"\\]|\\.){0,4096}+"), "([a-z0-9_]{1,16})", '
    rb"\[((?:\d{1,19}(?:, \d{1,19}){0,63}+)?)\], (\d{1,15})\]"
)
_INDEX_END = ord("]")


def encode_reduction(reduction: Reduction, model: Model) -> tuple[bytes, Reduction]:
    """Encode a reduction; also return it as the node will decode it.

    Both sides must use the decoded one to pack and unpack tensors.
    """
    if isinstance(reduction, Masks):
        prunable = {name: model.module.get_parameter(name) for name in model.prunable}
        unprunable = set(reduction.bits) - set(prunable)
        if unprunable:
            raise InvalidValue(
                f"a mask can travel only for prunable weights ({list(prunable)}); "
                f"got {sorted(unprunable)}"
            )
        full_masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prunable.items()}
        reduction = Masks({**full_masks, **reduction.bits})
    encoded = encode(reduction)
    return encoded, decode_reduction(encoded, model)


def decode_reduction(encoded: bytes, model: Model) -> Reduction:
    """Decode the reduction that `encode_reduction` wrote for the same model."""
    prunable = {name: model.module.get_parameter(name) for name in model.prunable}
    return decode(encoded, model.groups, prunable)


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Pack named arrays into one payload: an index, then each array as an .npy file.

    For Flower that is one object instead of hundreds.

    >>> payload = pack_arrays({"w": np.zeros(2, np.float32)})
    >>> {name: array.shape for name, array in unpack_arrays(payload).items()}
    {'w': [2]}
    """
    for name in arrays:
        if len(json.dumps(name)) > MAX_NAME_LENGTH:
            raise InvalidValue(
                f"names of tensors that travel must be shorter than 4,000 characters; got {name:.40}..."
            )
    index: list[list[object]] = []
    pieces: list[bytes | memoryview] = []
    for name, array in arrays.items():
        contiguous = np.ascontiguousarray(array).reshape(array.shape)
        header = _npy_header(contiguous)
        pieces += [header, contiguous.reshape(-1).view(np.uint8).data]
        num_bytes = len(header) + contiguous.nbytes
        index.append([name, str(array.dtype), list(array.shape), num_bytes])
    encoded_index = json.dumps(index).encode()
    # the only copy of the numbers
    return b"".join([struct.pack("<Q", len(encoded_index)), encoded_index, *pieces])


def _npy_header(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


def unpack_arrays(payload: bytes, names: Container[str] | None = None) -> dict[str, RawArray]:
    """Split a payload into its arrays, without decoding them.

    The index is read row by row, and only up to a name that is not among `names`. As Python
    objects, an index that a stranger wrote could take many times its bytes.

    Raises:
        InvalidValue: If the index cannot be read, or does not describe the payload.
        InvalidReply: If an array is not among `names`.
    """
    (index_bytes,) = struct.unpack("<Q", payload[:8].ljust(8, b"\xff"))
    if index_bytes > min(MAX_INDEX_BYTES, len(payload) - 8):
        raise InvalidValue("the payload has no index")
    content = memoryview(payload)[8 + index_bytes :]
    arrays: dict[str, RawArray] = {}
    offset = 0
    for name, dtype, shape, num_bytes in _read_index(payload, 8, 8 + index_bytes):
        if names is not None and name not in names:
            raise InvalidReply("extra array", safe_repr(name))
        if name in arrays:
            raise InvalidValue("the payload's index names an array twice")
        arrays[name] = RawArray(dtype, shape, NUMPY, content[offset : offset + num_bytes])
        offset += num_bytes
    if offset != len(content):
        raise InvalidValue("the payload's index does not add up to its bytes")
    return arrays


def _read_index(payload: bytes, start: int, end: int) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, type, shape and number of bytes of each array in a payload's index."""
    if payload[start : start + 3] == b"[]" and end == start + 2:
        return
    offset, separator = start, b"["
    while offset != end - 1 or payload[offset] != _INDEX_END:
        row = _INDEX_ROW.match(payload, offset, end)
        if row is None or row[1] != separator:
            raise InvalidValue(f"the payload's index cannot be read at byte {offset - start}")
        try:
            name = json.loads(row[2])
        except ValueError as error:
            raise InvalidValue(
                f"the payload's index cannot be read at byte {offset - start}"
            ) from error
        shape = [int(size) for size in row[4].split(b", ") if size]
        yield name, row[3].decode(), shape, int(row[5])
        offset, separator = row.end(), b", "


def unpack_sections(
    payload: bytes, expected: Mapping[str, Mapping[str, ArraySpec]]
) -> dict[str, Params]:
    """Decode the tensors of each section; types and shapes must be as expected."""
    names = {f"{section}/{name}" for section, specs in expected.items() for name in specs}
    arrays = unpack_arrays(payload)
    if names != set(arrays):
        differences = sorted(names ^ set(arrays))[:5]
        raise InvalidValue(f"the payload must hold other tensors; unlike here: {differences}")
    sections: dict[str, Params] = {}
    for section, specs in expected.items():
        sections[section] = {
            name: decode_array(name, arrays[f"{section}/{name}"], spec)
            for name, spec in specs.items()
        }
    return sections


def prefix_names(sections: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return tensors as arrays, named after their section and themselves."""
    return {
        f"{section}/{name}": as_array(tensor)
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    }


def gather_kept(reduction: Reduction, part: Mapping[str, Tensor]) -> Params:
    """Return a client's part with only the kept entries of masked tensors, in a row."""
    masks = reduction.gradient_mask()
    return {
        name: tensor[masks[name].to(tensor.device)] if name in masks else tensor
        for name, tensor in part.items()
    }


def expected_part(reduction: Reduction, full: Mapping[str, Tensor]) -> dict[str, ArraySpec]:
    """Describe what `gather_kept` returns for full tensors; only their shapes are read."""
    masks = reduction.gradient_mask()
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in full.items()}
    part = shapes if masks else reduction.extract(shapes)  # a mask cuts no shapes
    return {name: array_spec(tensor, masks.get(name)) for name, tensor in part.items()}


def scatter_kept(
    reduction: Reduction, part: Params, full: Mapping[str, Tensor], device: torch.device | str
) -> Params:
    """Undo `gather_kept`: return the part, or masked tensors in full with zeros elsewhere.

    Extracting the part from the result returns the same bits. Only the shapes of `full` are read.
    """
    if isinstance(reduction, Slices):
        return PartialParams(full, to_device(part, device), reduction)
    masks = reduction.gradient_mask()
    scattered = {}
    for name, tensor in part.items():
        if name in masks:
            tensor = _scatter(tensor, masks[name].cpu())
        scattered[name] = tensor
    return to_device(scattered, device)


def _scatter(entries: Tensor, mask: Tensor) -> Tensor:
    """Return a full tensor with the entries where the mask is true, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=entries.dtype).masked_scatter_(mask, entries)
