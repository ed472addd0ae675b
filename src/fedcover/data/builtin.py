"""Load the built-in data sets.

Shapes: N rows, C channels, H height, W width, T characters.
"""

import gzip
import io
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import torch

from fedcover.data.downloads import read
from fedcover.rng import generator
from fedcover.types import Dataset, Samples

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


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "characters": characters,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
