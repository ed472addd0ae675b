"""Named arrays as one safetensors file in memory, as they travel between server and nodes.

The file is 8 bytes for the length of a header, the header in JSON, and the numbers. It is read and
written here, and not by the package `safetensors`, for two reasons. The package's writer holds
the numbers twice for a moment (measured with 0.8.0), which a small device cannot. Its reader takes
headers of up to 100 MB, and of two entries with one name the last. Here arrays are views of the
payload, and a header must be as the package and this module write it: no spaces inside, no
metadata, the arrays in the order in which they lie.
"""

import json
import re
import struct
from collections.abc import Container, Iterator, Mapping

import numpy as np

from fedcover.errors import InvalidValue
from fedcover.server.raw_arrays import InvalidReply, RawArray, safe_repr

MAX_HEADER_BYTES = 4 * 2**20
"""The most bytes of the header of a payload."""
MAX_NAME_LENGTH = 4000
"""The most characters of a tensor's name as JSON."""
ARRAY_OVERHEAD = 4096
"""An upper bound on the bytes that describe an array in a message."""
_ENTRY = re.compile(  # possessive: to backtrack, Python would need 175 bytes per character
    rb'([{,])("(?:[^"\\]|\\.){0,4096}+"):\{"dtype":"([A-Z0-9_]{1,16})",'
    rb'"shape":\[((?:\d{1,19}(?:,\d{1,19}){0,63}+)?)\],"data_offsets":\[(\d{1,15}),(\d{1,15})\]\}'
)
_HEADER_END = re.compile(rb"\} {0,7}")
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""The number types that can travel: NumPy's names, and those in a header."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Pack named arrays into one payload, one behind the other.

    For Flower that is one object instead of hundreds.

    >>> payload = pack_arrays({"w": np.zeros(2, np.float32)})
    >>> payload[8:64]
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    >>> {name: array.shape for name, array in unpack_arrays(payload).items()}
    {'w': [2]}
    """
    header: dict[str, object] = {}
    pieces: list[memoryview] = []
    end = 0
    for name, array in arrays.items():
        _check_can_travel(name, array)
        little_endian = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        begin, end = end, end + little_endian.nbytes
        code, shape = _CODES[array.dtype.name], list(array.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        pieces.append(little_endian.reshape(-1).view(np.uint8).data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the numbers begin at a multiple of 8
    # the only copy of the numbers
    return b"".join([struct.pack("<Q", len(encoded)), encoded, *pieces])


def _check_can_travel(name: str, array: np.ndarray) -> None:
    if len(json.dumps(name)) > MAX_NAME_LENGTH:
        raise InvalidValue(
            f"names of tensors that travel must be shorter than 4,000 characters; got {name:.40}..."
        )
    if array.dtype.name not in _CODES:
        raise InvalidValue(
            f"tensors that travel must be of the types {', '.join(_CODES)}; "
            f"got {array.dtype} for {name:.40}"
        )


def unpack_arrays(payload: bytes, names: Container[str] | None = None) -> dict[str, RawArray]:
    """Split a payload into its arrays, without decoding them.

    The header is read entry by entry, and only up to a name that is not among `names`. As Python
    objects, a header that a stranger wrote could take many times its bytes.

    Raises:
        InvalidValue: If the header cannot be read, or does not describe the payload.
        InvalidReply: If an array is not among `names`, or of a type that is not known here.
    """
    (header_bytes,) = struct.unpack("<Q", payload[:8].ljust(8, b"\xff"))
    if header_bytes > min(MAX_HEADER_BYTES, len(payload) - 8):
        raise InvalidValue("the payload has no header")
    content = memoryview(payload)[8 + header_bytes :]
    arrays: dict[str, RawArray] = {}
    offset = 0
    for name, code, shape, begin, end in _read_header(payload, 8, 8 + header_bytes):
        if names is not None and name not in names:
            raise InvalidReply("extra array", safe_repr(name))
        if name in arrays:
            raise InvalidValue("the payload's header names an array twice")
        if code not in _DTYPES:
            raise InvalidReply("wrong dtype", f"{safe_repr(name)} declares {safe_repr(code)}")
        if begin != offset or not begin <= end <= len(content):
            raise InvalidValue(
                "the payload's arrays must follow one another within its bytes; "
                f"{safe_repr(name)} does not"
            )
        arrays[name] = RawArray(_DTYPES[code], shape, content[begin:end])
        offset = end
    if offset != len(content):
        raise InvalidValue("the payload's header does not add up to its bytes")
    return arrays


def _read_header(
    payload: bytes, start: int, end: int
) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Yield name, type, shape and the two offsets of each array in a payload's header."""
    offset, separator = start, b"{"
    if payload.startswith(b"{}", start):
        offset += 1
    while not _HEADER_END.fullmatch(payload, offset, end):
        entry = _ENTRY.match(payload, offset, end)
        if entry is None or entry[1] != separator:
            raise InvalidValue(f"the payload's header cannot be read at byte {offset - start}")
        try:
            name = json.loads(entry[2].decode())
        except ValueError as error:
            raise InvalidValue(
                f"the payload's header cannot be read at byte {offset - start}"
            ) from error
        shape = [int(size) for size in entry[4].split(b",") if size]
        yield name, entry[3].decode(), shape, int(entry[5]), int(entry[6])
        offset, separator = entry.end(), b","
