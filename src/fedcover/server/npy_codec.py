"""One array off the wire: the bytes of an .npy file, believed only if they are exactly what was asked for.

Type and shape are known beforehand, so the header is compared and not parsed; nothing is ever unpickled.
"""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

NUMPY = "numpy.ndarray"
"""The only way of storing that is read."""
HEADER = 4096
"""Bytes beyond its numbers that a stored array may have."""
_MAGIC = b"\x93NUMPY\x01\x00"


@dataclass(frozen=True, slots=True)
class RawArray:
    """An array as it arrived: what its sender declares of it, and bytes that nobody has looked into."""

    dtype: Any
    shape: Any
    stype: Any
    data: Any

    @property
    def bytes(self) -> int | None:
        """How many bytes it has; None where it has no bytes at all."""
        return (
            memoryview(self.data).nbytes
            if isinstance(self.data, bytes | bytearray | memoryview)
            else None
        )


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array must be: its shape, the type of its numbers, and whether these are bits (which may be left out)."""

    shape: tuple[int, ...]
    dtype: str
    bits: bool = False

    @property
    def bytes(self) -> int:
        """How many bytes its numbers take."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class InvalidReply(Exception):
    """What is wrong with a reply: a reason from the table of `replies`, and a detail that is safe to print."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def array_spec(tensor: Tensor, mask: Tensor | None = None) -> ArraySpec:
    """What a tensor travels as: whole, or only the entries under a mask, in a row."""
    shape = tuple(tensor.shape) if mask is None else (int(mask.sum()),)
    return ArraySpec(shape, str(tensor.dtype).removeprefix("torch."))


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor as NumPy stores it: in C order."""
    return np.asarray(tensor.detach().cpu().numpy(), order="C")


def decode_array(name: str, array: RawArray, wanted: ArraySpec) -> Tensor:
    """The tensor in an array, if what it declares and what its bytes say are both exactly what is wanted.

    >>> stored = np.lib.format.magic(1, 0) + b"\\x76\\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"
    >>> data = stored.ljust(127) + b"\\n" + np.float32(0.5).tobytes()
    >>> decode_array("w", RawArray("float32", (1,), NUMPY, data), ArraySpec((1,), "float32"))
    tensor([0.5000])
    >>> decode_array("w", RawArray("float32", (1,), "cloudpickle", data), ArraySpec((1,), "float32"))
    Traceback (most recent call last):
    ...
    fedcover.server.npy_codec.InvalidReply: pickled: w is stored as 'cloudpickle'
    """
    if array.stype != NUMPY:
        raise InvalidReply("pickled", f"{name} is stored as {safe_repr(array.stype)}")
    if not isinstance(array.dtype, str) or array.dtype != wanted.dtype:
        raise InvalidReply(
            "wrong dtype", f"{name} declares {safe_repr(array.dtype)}, not {wanted.dtype}"
        )
    shape = tuple(array.shape) if isinstance(array.shape, list | tuple) else None
    if shape is None or any(type(length) is not int for length in shape) or shape != wanted.shape:
        _wrong_shape(name, wanted, f"declares {safe_repr(shape)}", shape)
    data = memoryview(array.data)
    if not data.c_contiguous:
        raise InvalidReply("damaged array", f"{name} is scattered in memory")
    stored = np.dtype(wanted.dtype).newbyteorder("<")
    numbers = _numbers(name, data.cast("B"), wanted, stored.str)
    return torch.from_numpy(
        np.frombuffer(numbers, stored).astype(wanted.dtype).reshape(wanted.shape)
    )


def _numbers(name: str, data: memoryview, wanted: ArraySpec, stored: str) -> memoryview:
    """The bytes after an .npy header, which must read as NumPy writes it for this very type and shape."""
    head = bytes(data[:HEADER])
    if head[:1] == b"\x80":
        raise InvalidReply("pickled", f"{name} begins like a pickle")
    length = int.from_bytes(head[8:10], "little")
    if head[:8] != _MAGIC or 10 + length > len(head):
        raise InvalidReply("damaged array", f"{name} is no .npy file of version 1.0")
    header = head[10 : 10 + length].rstrip(b" \n")
    kind = f"{{'descr': '{stored}', 'fortran_order': False, ".encode()
    if header.startswith((b"{'descr': '|O'", b"{'descr': 'O'")):
        raise InvalidReply("pickled", f"{name} holds Python objects")
    if not header.startswith(kind):
        raise InvalidReply(
            "wrong dtype", f"{name} is stored as {safe_repr(header)}, not {stored} in C order"
        )
    if header != kind + f"'shape': {wanted.shape}, }}".encode():
        _wrong_shape(name, wanted, f"is stored as {safe_repr(header[len(kind) :])}", None)
    numbers = data[10 + length :]
    if numbers.nbytes != wanted.bytes:
        raise InvalidReply(
            "damaged array", f"{name} has {numbers.nbytes} bytes of numbers, not {wanted.bytes}"
        )
    return numbers


def _wrong_shape(
    name: str, wanted: ArraySpec, what: str, shape: tuple[Any, ...] | None
) -> NoReturn:
    """Bits for more entries than the client holds claim more than its capacity."""
    if not wanted.bits:
        raise InvalidReply("wrong shape", f"{name} {what}, not {wanted.shape}")
    over = (
        shape is not None
        and len(shape) == 1
        and type(shape[0]) is int
        and shape[0] > wanted.shape[0]
    )
    raise InvalidReply(
        "mask over capacity" if over else "mask malformed", f"{name} {what}, not {wanted.shape}"
    )


def safe_repr(value: object) -> str:
    """What a stranger sent, fit for a log: short, on one line, plain ASCII.

    >>> safe_repr("two\\nlines")
    "'two\\\\nlines'"
    """
    if isinstance(value, str | bytes):
        text = ascii(value[:50])
    elif isinstance(value, tuple):
        text = f"({', '.join(safe_repr(part) for part in value[:8])}{', ...' if len(value) > 8 else ''})"
    elif (
        value is None
        or type(value) in (bool, float)
        or (type(value) is int and value.bit_length() < 200)
    ):
        text = str(value)
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
