"""Load data sets: built-in ones by name, files, and tensors.

Shapes: N rows, C channels, H height, W width.
"""

import gzip
import io
from collections.abc import Callable, Iterable, MutableMapping
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedcover.data.downloads import check, data_folder, get, read
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

Bytes = npt.NDArray[np.uint8]

_MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3053,), (0.3760,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and standard deviation of each channel of the training pixels, on the scale 0 to 1."""

_SEQUENCE_LENGTH = 64
"""Characters per sample of `characters`."""

_VOCABULARY = 128
"""The number of different characters (ASCII)."""


# ── built-in data sets ───────────────────────────────────────────────────────────────────────────


def digits(_folder: Path | None = None) -> Dataset:
    """Load 1,797 handwritten digits of 8 x 8 pixels that ship with the package.

    1,437 of them are for training and 360 for testing.

    >>> data = digits()
    >>> data.train.x.shape, len(data.test)
    (torch.Size([1437, 1, 8, 8]), 360)
    """
    packed = resources.files("fedcover.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        images_NHW, labels_N = stored["images"], stored["labels"]
    # Every fifth row of a shuffled order sorted by label, so a random fifth of each label.
    shuffled_N = torch.randperm(len(labels_N), generator=generator(0, "digits", "split")).numpy()
    by_label_N = shuffled_N[np.argsort(labels_N[shuffled_N], kind="stable")]
    is_test_N = np.zeros(len(labels_N), dtype=bool)
    is_test_N[by_label_N[::5]] = True
    train, test = (
        _samples("digits", images_NHW[rows, None], labels_N[rows], white=16)
        for rows in (~is_test_N, is_test_N)
    )
    return Dataset("digits", train, test, classes=10)


def mnist(folder: Path) -> Dataset:
    """Load 70,000 handwritten digits of 28 x 28 pixels from the publisher's idx files."""
    files = read("mnist", folder)

    def part(prefix: str) -> Samples:
        images_NHW = _idx(files[f"{prefix}-images-idx3-ubyte.gz"])
        labels_N = _idx(files[f"{prefix}-labels-idx1-ubyte.gz"])
        return _samples("mnist", images_NHW[:, None], labels_N)

    return Dataset("mnist", part("train"), part("t10k"), classes=10)


def cifar10(folder: Path) -> Dataset:
    """Load 60,000 colour photographs of 32 x 32 pixels in 10 classes."""
    return _cifar("cifar10", folder, label_bytes=1, classes=10)


def cifar100(folder: Path) -> Dataset:
    """Load 60,000 colour photographs of 32 x 32 pixels in 100 classes (fine labels)."""
    return _cifar("cifar100", folder, label_bytes=2, classes=100)


def characters(_folder: Path | None = None) -> Dataset:
    """Split Python's help topics into samples of 64 characters; every topic is an owner.

    The text ships with the interpreter, so it differs slightly between Python versions.
    """
    samples_by_topic, owners = [], []
    for owner, (_, text) in enumerate(sorted(topics.items())):
        ascii_text = bytearray(text.encode("ascii", "replace"))
        codes = torch.frombuffer(ascii_text, dtype=torch.uint8).long()
        num_samples = (len(codes) - 1) // _SEQUENCE_LENGTH
        if num_samples > 0:
            codes = codes[: num_samples * _SEQUENCE_LENGTH + 1]
            x_NT = codes[:-1].view(-1, _SEQUENCE_LENGTH)
            y_NT = codes[1:].view(-1, _SEQUENCE_LENGTH)
            samples_by_topic.append(torch.stack([x_NT, y_NT], dim=1))
            owners.append(torch.full((num_samples,), owner))
    samples_N2T = torch.cat(samples_by_topic)
    owner_N = torch.unique(torch.cat(owners), return_inverse=True)[1]
    is_test_N = torch.arange(len(samples_N2T)) % 10 == 9
    train, test = (
        Samples(samples_N2T[rows, 0], samples_N2T[rows, 1]) for rows in (~is_test_N, is_test_N)
    )
    return Dataset("characters", train, test, classes=_VOCABULARY, owner=owner_N[~is_test_N])


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "characters": characters,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}


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


def _samples(name: str, pixels_NCHW: Bytes, labels_N: Bytes, white: int = 255) -> Samples:
    mean_C11, std_C11 = (torch.tensor(moment)[:, None, None] for moment in _MOMENTS[name])
    x_NCHW = torch.from_numpy(pixels_NCHW.astype(np.float32))
    y_N = torch.from_numpy(labels_N.astype(np.int64))
    return Samples(x_NCHW.div_(white).sub_(mean_C11).div_(std_C11), y_N)


def _idx(packed: bytes) -> Bytes:
    """Parse the idx format: two zero bytes, type (8: bytes), number of axes, their sizes, data."""
    raw = gzip.decompress(packed)
    axes = raw[3]
    shape = np.frombuffer(raw, dtype=">i4", count=axes, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape.tolist())


def _cifar(name: str, folder: Path, *, label_bytes: int, classes: int) -> Dataset:
    """Read the binary CIFAR format: for each image label bytes (fine last), then RGB planes."""
    files = read(name, folder)

    def part(raw: Iterable[bytes]) -> Samples:
        record_bytes = label_bytes + 3 * 32 * 32
        records_NB = np.frombuffer(b"".join(raw), dtype=np.uint8).reshape(-1, record_bytes)
        pixels_NCHW = records_NB[:, label_bytes:].reshape(-1, 3, 32, 32)
        return _samples(name, pixels_NCHW, records_NB[:, label_bytes - 1])

    train = part(raw for file, raw in files.items() if not file.startswith("test"))
    test = part(raw for file, raw in files.items() if file.startswith("test"))
    return Dataset(name, train, test, classes)


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

    The file contains train_x and train_y, and optionally train_owner; without it there is one owner.
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
