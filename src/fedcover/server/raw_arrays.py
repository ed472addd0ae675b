"""Arrays as they arrive: declarations and bytes of a stranger, accepted only if as expected.

The type, the shape and so the number of bytes are known beforehand. They are compared before
anything is allocated; nothing is unpickled.
"""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor


class InvalidReply(Exception):
    """A reply failed a check.

    Args:
        reason: a key of `reply_validation.REJECTION_REASONS`.
        detail: what exactly is wrong; safe to print.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class RawArray:
    """An array as it arrived: what its sender declares, and bytes that nobody has looked at."""

    dtype: Any
    shape: Any
    data: Any

    @property
    def bytes(self) -> int | None:
        """The number of bytes; None if the data is not bytes at all."""
        if not isinstance(self.data, bytes | bytearray | memoryview):
            return None
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and number type that an array must have.

    `bits`: the array holds packed bits, one for each entry of a parameter. It may be left out.
    """

    shape: tuple[int, ...]
    dtype: str
    bits: bool = False

    @property
    def bytes(self) -> int:
        """The number of bytes of the array's numbers."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def array_spec(tensor: Tensor, mask: Tensor | None = None) -> ArraySpec:
    """Return the array as which a tensor is sent: whole, or the entries under a mask in a row."""
    shape = tuple(tensor.shape) if mask is None else (int(mask.sum()),)
    return ArraySpec(shape, str(tensor.dtype).removeprefix("torch."))


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array in C order."""
    return np.asarray(tensor.detach().cpu().numpy(), order="C")


def decode_array(name: str, array: RawArray, spec: ArraySpec) -> Tensor:
    """Return the tensor in an array if all that it declares and stores agrees with its spec.

    Args:
        name: the array's name, for errors.
        array: the array as it arrived.
        spec: the expected shape and type.

    Raises:
        InvalidReply: anything differs.

    >>> data = np.float32(0.5).tobytes()
    >>> spec = ArraySpec((1,), "float32")
    >>> decode_array("w", RawArray("float32", (1,), data), spec)
    tensor([0.5000])
    >>> decode_array("w", RawArray("float64", (1,), data), spec)
    Traceback (most recent call last):
    ...
    fedcover.server.raw_arrays.InvalidReply: wrong dtype: w declares 'float64', not float32
    """
    _check_declared(name, array, spec)
    data = memoryview(array.data)
    if not data.c_contiguous:
        raise InvalidReply("damaged array", f"{name} is scattered in memory")
    if data.nbytes != spec.bytes:
        detail = f"{name} has {data.nbytes} bytes of numbers, not {spec.bytes}"
        raise InvalidReply("damaged array", detail)
    stored_dtype = np.dtype(spec.dtype).newbyteorder("<")
    decoded = np.frombuffer(data.cast("B"), stored_dtype).astype(spec.dtype).reshape(spec.shape)
    return torch.from_numpy(decoded)


def _check_declared(name: str, array: RawArray, spec: ArraySpec) -> None:
    """Check the fields that the sender filled in."""
    if not isinstance(array.dtype, str) or array.dtype != spec.dtype:
        detail = f"{name} declares {safe_repr(array.dtype)}, not {spec.dtype}"
        raise InvalidReply("wrong dtype", detail)
    shape = tuple(array.shape) if isinstance(array.shape, list | tuple) else None
    # Compare types too: True == 1 and 1.0 == 1.
    if shape is None or any(type(length) is not int for length in shape) or shape != spec.shape:
        _raise_wrong_shape(name, spec, shape)


def _raise_wrong_shape(name: str, spec: ArraySpec, shape: tuple[Any, ...] | None) -> NoReturn:
    """Raise for a wrong shape; bits for too many entries claim more than the client's capacity."""
    detail = f"{name} declares {safe_repr(shape)}, not {spec.shape}"
    if not spec.bits:
        raise InvalidReply("wrong shape", detail)
    is_row = shape is not None and len(shape) == 1 and type(shape[0]) is int
    if is_row and shape is not None and shape[0] > spec.shape[0]:
        raise InvalidReply("mask over capacity", detail)
    raise InvalidReply("mask malformed", detail)


def safe_repr(value: object) -> str:
    """Return an untrusted value as text for a log: short, on one line, plain ASCII.

    >>> safe_repr("two\\nlines")
    "'two\\\\nlines'"
    """
    text = _short_repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short_repr(value: object) -> str:
    if isinstance(value, str | bytes):
        return ascii(value[:50])
    if isinstance(value, tuple):
        items = ", ".join(safe_repr(item) for item in value[:8])
        return f"({items}, ...)" if len(value) > 8 else f"({items})"
    if value is None or type(value) in (bool, float):
        return str(value)
    if type(value) is int and value.bit_length() < 200:
        return str(value)
    return f"a {type(value).__name__}"
