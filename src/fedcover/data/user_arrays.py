"""Read users' arrays from files, check them, and convert them to tensors."""

import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedcover.errors import DataError, InvalidValue, unknown

Array = Tensor | npt.NDArray[np.generic]

_ALLOWED = ("train_x", "train_y", "test_x", "test_y", "train_owner", "classes")
"""The arrays that a file may contain."""


def read_arrays(field: str, path: Path, needed: Iterable[str]) -> Mapping[str, Array]:
    """Read the arrays of a file.

    Args:
        field: The name of the file in error messages.
        path: The file.
        needed: The arrays that the file must contain.

    Returns:
        The arrays by name.

    Raises:
        InvalidValue: If the file does not exist, or an array is missing or has an unknown name.
        DataError: If the file cannot be read.
    """
    if path.suffix not in READERS:
        raise InvalidValue(f"{field} file must end in {' or '.join(READERS)}; got {str(path)!r}")
    if not path.is_file():
        raise InvalidValue(f"{field} must be a file that exists; got {str(path)!r}")
    try:
        arrays = READERS[path.suffix](path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as a {path.suffix} file: {error}") from error
    for key in needed:
        if key not in arrays:
            raise InvalidValue(
                f"{field} {path} must have an array {key}; got {', '.join(arrays) or 'none'}"
            )
    for key in arrays:
        if key not in _ALLOWED:
            raise unknown(f"an array in {field} {path}", key, _ALLOWED)
    return arrays


def _read_npz(path: Path) -> Mapping[str, Array]:
    # ZipFile rejects a .npy file with a wrong suffix, which np.load would read as one array.
    with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _read_safetensors(path: Path) -> Mapping[str, Array]:
    return load_file(path)


READERS: dict[str, Callable[[Path], Mapping[str, Array]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}


def _as_tensor(field: str, value: Array) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        tensor = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
    else:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidValue(
            f"{field} must be a torch tensor or a NumPy array of numbers; got {kind}"
        )
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise InvalidValue(
            f"{field} must have rows, and no empty axis; got shape {tuple(tensor.shape)}"
        )
    return tensor


def input_tensor(field: str, value: Array) -> Tensor:
    """Convert inputs to float32; uint8 inputs are divided by 255."""
    x = _as_tensor(field, value)
    if x.ndim < 2 or not (x.is_floating_point() or x.dtype == torch.uint8):
        raise InvalidValue(
            f"{field} must hold floating or uint8 inputs, row by row; "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
    scaled = x.float().div(255) if x.dtype == torch.uint8 else x.float()
    if not bool(torch.isfinite(scaled).all()):
        non_finite = scaled[~torch.isfinite(scaled)]
        raise InvalidValue(
            f"{field} must be finite in float32; "
            f"got {non_finite[0].item()} ({len(non_finite)} in all)"
        )
    return scaled


def integer_tensor(field: str, value: Array) -> Tensor:
    """Convert labels or owners to int64: one non-negative integer per row."""
    y = _as_tensor(field, value)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidValue(
            f"{field} must hold one whole number for each row; "
            f"got {y.dtype} of shape {tuple(y.shape)}"
        )
    if int(y.long().min()) < 0:
        raise InvalidValue(f"{field} must not be negative; got {int(y.long().min())}")
    return y.long()


def integer_value(field: str, value: Array) -> int:
    """Convert an array with a single integer to an int."""
    numbers = integer_tensor(field, value.reshape(-1))
    if len(numbers) != 1:
        raise InvalidValue(f"{field} must be one whole number; got shape {tuple(value.shape)}")
    return int(numbers)


def check_length(field: str, value: Tensor, input_field: str, inputs: Tensor) -> None:
    """Raise `InvalidValue` if a tensor is not as long as the inputs."""
    if len(value) != len(inputs):
        raise InvalidValue(
            f"{field} must be as long as {input_field}, {len(inputs)} rows; got {len(value)}"
        )


def infer_num_classes(labels: Tensor, classes: int | None) -> int:
    """Return the number of classes: the given one, or that of the labels if none is missing."""
    if classes is not None:
        if type(classes) is not int or classes < 1:
            raise InvalidValue(f"classes must be a whole number from 1 on; got {classes!r}")
        return classes
    occurring = torch.unique(labels).tolist()
    highest: int = occurring[-1]
    if len(occurring) <= highest:
        shown = ", ".join(map(str, occurring[:5]))
        if len(occurring) > 5:
            shown += f", ..., {highest}"
        raise InvalidValue(
            f"train_y must hold every label from 0 to {highest}, or classes={highest + 1} must say "
            f"that some are missing; got {len(occurring)} labels: {shown}"
        )
    return highest + 1
