"""Load data sets by name, from files or from tensors, and split rows off for validation."""

from collections.abc import MutableMapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedcover.data.builtin import DATASETS
from fedcover.data.downloads import check, data_folder, get
from fedcover.data.user_arrays import (
    READERS,
    Array,
    check_length,
    infer_num_classes,
    input_tensor,
    integer_tensor,
    integer_value,
    read_arrays,
)
from fedcover.errors import InvalidValue, unknown
from fedcover.rng import generator
from fedcover.types import Dataset, Samples

__all__ = [
    "DATASETS",
    "check",
    "data_folder",
    "from_file",
    "from_tensors",
    "get",
    "hold_out",
    "load",
    "rows_from_file",
]


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """Load a data set by name, or from an .npz or .safetensors file.

    >>> load("digits").classes
    10
    >>> load("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: dataset must be one of digits, ... (did you mean 'digits'?)
    """
    if name in DATASETS:
        return DATASETS[name](data_folder(folder))
    if Path(name).suffix in READERS:
        return from_file(name)
    files = [f"file{suffix}" for suffix in READERS]
    raise unknown("dataset", name, [*DATASETS, "synthetic", *files, "package.module:function"])


# ── users' data ──────────────────────────────────────────────────────────────────────────────────

_NEEDED = ("train_x", "train_y", "test_x", "test_y")


def from_tensors(
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    *,
    owner: Array | None = None,
    classes: int | None = None,
    name: str = "tensors",
) -> Dataset:
    """Create a data set from tensors or NumPy arrays.

    Floating inputs are converted to float32; uint8 inputs are divided by 255. Labels are 0, 1, 2,
    and so on.

    Args:
        train: The training inputs and labels, (x, y).
        test: The test inputs and labels, (x, y).
        owner: The owner of each training row, as a non-negative integer.
        classes: The number of classes; needed only if some labels are missing in the training rows.
        name: The name shown in messages and stored with results.

    Returns:
        The data set.

    Raises:
        InvalidValue: If types, shapes, lengths or labels are wrong.

    >>> x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> from_tensors((x, y), (x[:3], y[:3])).classes
    3
    """
    train_x, train_y = input_tensor("train_x", train[0]), integer_tensor("train_y", train[1])
    test_x, test_y = input_tensor("test_x", test[0]), integer_tensor("test_y", test[1])
    check_length("train_y", train_y, "train_x", train_x)
    check_length("test_y", test_y, "test_x", test_x)
    if train_x.shape[1:] != test_x.shape[1:]:
        train_shape, test_shape = tuple(train_x.shape[1:]), tuple(test_x.shape[1:])
        raise InvalidValue(
            f"test_x must have rows of the shape of train_x's, {train_shape}; got {test_shape}"
        )
    classes = infer_num_classes(train_y, classes)
    for field, labels in (("train_y", train_y), ("test_y", test_y)):
        if int(labels.max()) >= classes:
            raise InvalidValue(
                f"{field} must hold labels from 0 to {classes - 1}; got {int(labels.max())}"
            )
    owners = None if owner is None else integer_tensor("train_owner", owner)
    if owners is not None:
        check_length("train_owner", owners, "train_x", train_x)
    return Dataset(name, Samples(train_x, train_y), Samples(test_x, test_y), classes, owners)


def from_file(path: str | Path) -> Dataset:
    """Load a data set from an .npz or .safetensors file.

    The file contains the arrays train_x, train_y, test_x and test_y, and optionally train_owner and
    classes; see `from_tensors`.

    Args:
        path: The file. Its stem becomes the name of the data set.

    Returns:
        The data set.

    Raises:
        InvalidValue: If the file does not exist, or its arrays are wrong.
        DataError: If the file cannot be read.
    """
    arrays = read_arrays("dataset", Path(path), _NEEDED)
    train_x, train_y, test_x, test_y = (arrays[key] for key in _NEEDED)
    classes = integer_value("classes", arrays["classes"]) if "classes" in arrays else None
    owner = arrays.get("train_owner")
    return from_tensors(
        (train_x, train_y), (test_x, test_y), owner=owner, classes=classes, name=Path(path).stem
    )


def rows_from_file(path: str | Path) -> tuple[Samples, Tensor]:
    """Load training rows and their owners from a file.

    The file contains train_x and train_y, and optionally train_owner. Without it there is one
    owner.
    """
    arrays = read_arrays("rows", Path(path).absolute(), _NEEDED[:2])
    x, y = input_tensor("train_x", arrays["train_x"]), integer_tensor("train_y", arrays["train_y"])
    if "train_owner" in arrays:
        owner = integer_tensor("train_owner", arrays["train_owner"])
    else:
        owner = torch.zeros_like(y)
    check_length("train_y", y, "train_x", x)
    check_length("train_owner", owner, "train_x", x)
    return Samples(x, y), owner


# ── validation split ─────────────────────────────────────────────────────────────────────────────

MAX_CACHED_SPLITS = 8
_SPLIT_CACHE: MutableMapping[Tensor, dict[tuple[int, int, int], tuple[Tensor, Tensor]]] = (
    WeakTensorKeyDictionary()
)
"""The last splits of each input tensor, so that runs with one seed share the two parts.

A split is named by (number of validation rows, seed, version of the tensor).
"""


def hold_out(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Samples | None]:
    """Split a random share of the training rows off for validation.

    Args:
        dataset: The data set.
        share: The share of the training rows, in [0, 1).
        seed: The seed of the draw.

    Returns:
        The data set with the other training rows, in order, and the validation samples (None if
        the share is 0).

    Raises:
        InvalidValue: If the share is not allowed or leaves no row to train on.

    >>> rest, validation = hold_out(load("digits"), 0.1, seed=0)
    >>> len(rest.train), len(validation)
    (1293, 144)
    """
    if not 0 <= share < 1:
        raise InvalidValue(
            f"validation must be a share of the training samples in [0, 1); got {share}"
        )
    if share == 0:
        return dataset, None
    rows = len(dataset.train)
    num_held_out = max(1, round(share * rows))
    if num_held_out >= rows:
        raise InvalidValue(f"validation must leave samples to train on; got {share} of {rows}")
    order = torch.randperm(rows, generator=generator(seed, "validation"))
    train_rows = order[num_held_out:].sort().values
    validation_rows = order[:num_held_out].sort().values
    train_x, validation_x = _split_inputs(dataset.train.x, seed, train_rows, validation_rows)
    rest = Dataset(
        name=dataset.name,
        train=Samples(train_x, dataset.train.y[train_rows]),
        test=dataset.test,
        classes=dataset.classes,
        owner=None if dataset.owner is None else dataset.owner[train_rows],
    )
    return rest, Samples(validation_x, dataset.train.y[validation_rows])


def _split_inputs(
    x: Tensor, seed: int, train_rows: Tensor, validation_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Split inputs into training and validation inputs, or return them from the cache."""
    splits = _SPLIT_CACHE.setdefault(x, {})
    version = 0 if x.is_inference() else x._version  # inference tensors have no version
    key = (len(validation_rows), seed, version)
    if key not in splits:
        while len(splits) >= MAX_CACHED_SPLITS:
            oldest = next(iter(splits))
            splits.pop(oldest)
        splits[key] = x[train_rows], x[validation_rows]
    return splits[key]
