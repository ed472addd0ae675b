"""Arrays that users bring: read from their files, checked, and turned into tensors."""

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
"""The arrays that a file may hold."""


def read_arrays(field: str, path: Path, needed: Iterable[str]) -> Mapping[str, Array]:
    """The arrays in a file, by name; `field` is what errors call the file."""
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
    # ZipFile first: np.load would take a .npy in disguise and give something that has no names.
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
    """Inputs, row by row, as float32; bytes are divided by 255."""
    x = _as_tensor(field, value)
    if x.ndim < 2 or not (x.is_floating_point() or x.dtype == torch.uint8):
        raise InvalidValue(
            f"{field} must hold floating or uint8 inputs, row by row; got {x.dtype} of shape {tuple(x.shape)}"
        )
    scaled = x.float().div(255) if x.dtype == torch.uint8 else x.float()
    if not bool(torch.isfinite(scaled).all()):
        wrong = scaled[~torch.isfinite(scaled)]
        raise InvalidValue(
            f"{field} must be finite in float32; got {wrong[0].item()} ({len(wrong)} in all)"
        )
    return scaled


def integer_tensor(field: str, value: Array) -> Tensor:
    """Labels or owners: one whole number for each row, none of them negative."""
    y = _as_tensor(field, value)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidValue(
            f"{field} must hold one whole number for each row; got {y.dtype} of shape {tuple(y.shape)}"
        )
    if int(y.long().min()) < 0:
        raise InvalidValue(f"{field} must not be negative; got {int(y.long().min())}")
    return y.long()


def integer_value(field: str, value: Array) -> int:
    """An array that is just one whole number."""
    numbers = integer_tensor(field, value.reshape(-1))
    if len(numbers) != 1:
        raise InvalidValue(f"{field} must be one whole number; got shape {tuple(value.shape)}")
    return int(numbers)


def check_length(field: str, value: Tensor, other: str, input_tensor: Tensor) -> None:
    """Refuse what is not as long as its inputs."""
    if len(value) != len(input_tensor):
        raise InvalidValue(
            f"{field} must be as long as {other}, {len(input_tensor)} rows; got {len(value)}"
        )


def infer_num_classes(labels: Tensor, given: int | None) -> int:
    """How many classes there are: as many as are given, else as many as there are labels, if none is missing."""
    if given is not None:
        if type(given) is not int or given < 1:
            raise InvalidValue(f"classes must be a whole number from 1 on; got {given!r}")
        return given
    occurring = torch.unique(labels).tolist()
    highest: int = occurring[-1]
    if len(occurring) <= highest:
        shown = ", ".join(map(str, occurring[:5])) + (
            f", ..., {highest}" if len(occurring) > 5 else ""
        )
        raise InvalidValue(
            f"train_y must hold every label from 0 to {highest}, or classes={highest + 1} must say that some are "
            f"missing; got {len(occurring)} labels: {shown}"
        )
    return highest + 1
