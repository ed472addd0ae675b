"""Name -> tensors: data sets known by name, files of your own, tensors of your own.

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
"""Mean and standard deviation of the training pixels, channel by channel, on the scale 0 to 1."""


_SEQUENCE_LENGTH, _VOCABULARY = 64, 128
"""Characters per sample of `characters`, and how many different ones there are (ASCII)."""


# ── known by name ───────────────────────────────────────────────────────────────────────────────────────


def digits(_folder: Path | None = None) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, which ship inside the package: 1,437 to train, 360 to test.

    >>> data = digits()
    >>> data.train.x.shape, len(data.test)
    (torch.Size([1437, 1, 8, 8]), 360)
    """
    packed = resources.files("fedcover.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        images_NHW, labels_N = stored["images"], stored["labels"]
    # Every fifth row of a shuffled order sorted by label: each label loses a fifth of its rows, by chance.
    shuffled_N = torch.randperm(len(labels_N), generator=generator(0, "digits", "split")).numpy()
    by_label_N = shuffled_N[np.argsort(labels_N[shuffled_N], kind="stable")]
    tested_N = np.zeros(len(labels_N), dtype=bool)
    tested_N[by_label_N[::5]] = True
    train, test = (
        _samples("digits", images_NHW[rows, None], labels_N[rows], white=16)
        for rows in (~tested_N, tested_N)
    )
    return Dataset("digits", train, test, classes=10)


def mnist(folder: Path) -> Dataset:
    """70,000 handwritten digits of 28 x 28 pixels, from the publisher's idx files."""
    files = read("mnist", folder)
    train, test = (
        _samples("mnist", _idx(files[f"{part}-images-idx3-ubyte.gz"])[:, None],
                 _idx(files[f"{part}-labels-idx1-ubyte.gz"]))
        for part in ("train", "t10k")
    )  # fmt: skip
    return Dataset("mnist", train, test, classes=10)


def cifar10(folder: Path) -> Dataset:
    """60,000 colour photographs of 32 x 32 pixels in 10 classes, from the publisher's binary version."""
    return _cifar("cifar10", folder, label_bytes=1, classes=10)


def cifar100(folder: Path) -> Dataset:
    """60,000 colour photographs of 32 x 32 pixels in 100 classes (fine labels), from the binary version."""
    return _cifar("cifar100", folder, label_bytes=2, classes=100)


def characters(_folder: Path | None = None) -> Dataset:
    """Python's own help topics, character by character, in pieces of 64; every topic is an owner.

    The text comes with the interpreter, so another Python version has a slightly other data set.
    """
    pieces, owners = [], []
    for owner, (_, text) in enumerate(sorted(topics.items())):
        codes = torch.frombuffer(
            bytearray(text.encode("ascii", "replace")), dtype=torch.uint8
        ).long()
        whole = codes[: (len(codes) - 1) // _SEQUENCE_LENGTH * _SEQUENCE_LENGTH + 1]
        if len(whole) > _SEQUENCE_LENGTH:
            pieces.append(
                torch.stack(
                    [whole[:-1].view(-1, _SEQUENCE_LENGTH), whole[1:].view(-1, _SEQUENCE_LENGTH)],
                    dim=1,
                )
            )
            owners.append(torch.full((len(pieces[-1]),), owner))
    x_N2T, owner_N = torch.cat(pieces), torch.unique(torch.cat(owners), return_inverse=True)[1]
    tested_N = torch.arange(len(x_N2T)) % 10 == 9
    train, test = (Samples(x_N2T[rows, 0], x_N2T[rows, 1]) for rows in (~tested_N, tested_N))
    return Dataset("characters", train, test, classes=_VOCABULARY, owner=owner_N[~tested_N])


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "characters": characters,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """The data set of that name, or the one in that .npz or .safetensors file.

    >>> load("digits").classes
    10
    >>> load("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: dataset must be one of digits, characters, ...; got 'digit' (did you mean 'digits'?)
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
    """The idx format: two zero bytes, the type (8: bytes), the number of axes, their sizes, the data."""
    raw = gzip.decompress(packed)
    axes = raw[3]
    shape = np.frombuffer(raw, dtype=">i4", count=axes, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape.tolist())


def _cifar(name: str, folder: Path, *, label_bytes: int, classes: int) -> Dataset:
    """The CIFAR format, image after image: label bytes (fine last), then red, green and blue planes."""
    files = read(name, folder)

    def part(raw: Iterable[bytes]) -> Samples:
        records_NB = np.frombuffer(b"".join(raw), dtype=np.uint8).reshape(
            -1, label_bytes + 3 * 32 * 32
        )
        pixels_NCHW = records_NB[:, label_bytes:].reshape(-1, 3, 32, 32)
        return _samples(name, pixels_NCHW, records_NB[:, label_bytes - 1])

    train = part(raw for file, raw in files.items() if not file.startswith("test"))
    test = part(raw for file, raw in files.items() if file.startswith("test"))
    return Dataset(name, train, test, classes)


# ── your own ────────────────────────────────────────────────────────────────────────────────────────────

_NEEDED = ("train_x", "train_y", "test_x", "test_y")


def from_tensors(
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    *,
    owner: Array | None = None,
    classes: int | None = None,
    name: str = "tensors",
) -> Dataset:
    """Your own inputs and labels, (x, y) pairs of tensors or arrays; `owner` says whose each row is.

    Floating inputs keep their values (as float32); uint8 inputs are divided by 255. Labels are 0, 1, 2, ...; `classes`
    says how many there are where the training rows lack some.

    >>> x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> from_tensors((x, y), (x[:3], y[:3])).classes
    3
    """
    train_x, train_y = input_tensor("train_x", train[0]), integer_tensor("train_y", train[1])
    test_x, test_y = input_tensor("test_x", test[0]), integer_tensor("test_y", test[1])
    check_length("train_y", train_y, "train_x", train_x)
    check_length("test_y", test_y, "test_x", test_x)
    if train_x.shape[1:] != test_x.shape[1:]:
        wanted, got = tuple(train_x.shape[1:]), tuple(test_x.shape[1:])
        raise InvalidValue(f"test_x must have rows of the shape of train_x's, {wanted}; got {got}")
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
    """Your own .npz or .safetensors file with train_x, train_y, test_x, test_y and perhaps train_owner and classes."""
    arrays = read_arrays("dataset", Path(path), _NEEDED)
    train_x, train_y, test_x, test_y = (arrays[key] for key in _NEEDED)
    classes = integer_value("classes", arrays["classes"]) if "classes" in arrays else None
    owner = arrays.get("train_owner")
    return from_tensors(
        (train_x, train_y), (test_x, test_y), owner=owner, classes=classes, name=Path(path).stem
    )


def rows_from_file(path: str | Path) -> tuple[Samples, Tensor]:
    """Training rows and whose each is: a file with train_x, train_y and perhaps train_owner (else all are of one)."""
    arrays = read_arrays("rows", Path(path).absolute(), _NEEDED[:2])
    x, y = input_tensor("train_x", arrays["train_x"]), integer_tensor("train_y", arrays["train_y"])
    owner = (
        integer_tensor("train_owner", arrays["train_owner"])
        if "train_owner" in arrays
        else torch.zeros_like(y)
    )
    check_length("train_y", y, "train_x", x)
    check_length("train_owner", owner, "train_x", x)
    return Samples(x, y), owner


# ── held out ────────────────────────────────────────────────────────────────────────────────────────────


MAX_CACHED_SPLITS = 8
_SPLIT_CACHE: MutableMapping[Tensor, dict[tuple[int, int, int], tuple[Tensor, Tensor]]] = (
    WeakTensorKeyDictionary()
)
"""Inputs that were split last, by their tensor: runs of one seed share the two parts, instead of a copy each."""


def hold_out(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Samples | None]:
    """Set a random share of the training rows aside for validation; the data set keeps the others, in order.

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
    held = max(1, round(share * rows))
    if held >= rows:
        raise InvalidValue(f"validation must leave samples to train on; got {share} of {rows}")
    order = torch.randperm(rows, generator=generator(seed, "validation"))
    kept, out = order[held:].sort().values, order[:held].sort().values
    known = _SPLIT_CACHE.setdefault(dataset.train.x, {})
    split = held, seed, 0 if dataset.train.x.is_inference() else dataset.train.x._version
    if split not in known:
        while len(known) >= MAX_CACHED_SPLITS:
            known.pop(next(iter(known)))
        known[split] = dataset.train.x[kept], dataset.train.x[out]
    (x, x_out), y, owner = known[split], dataset.train.y, dataset.owner
    rest = Dataset(
        dataset.name,
        Samples(x, y[kept]),
        dataset.test,
        dataset.classes,
        None if owner is None else owner[kept],
    )
    return rest, Samples(x_out, y[out])
