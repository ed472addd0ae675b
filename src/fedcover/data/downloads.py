"""Download published files if they are absent, and verify their digests on every read."""

import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedcover.errors import DataError, unknown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DATA_FOLDER_VARIABLE = "FEDCOVER_DATA"
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Download:
    """Describe a URL with its digest, and the digests of its files by path below the data folder.

    The download is such a file itself, or a .tar.gz archive that holds them under these paths.
    """

    url: str
    md5: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Hold the digest of a file (None if it is absent) and the published digest."""

    path: Path
    actual: str | None
    expected: str

    @property
    def ok(self) -> bool:
        """Return whether the file exists and is unaltered."""
        return self.actual == self.expected


_MNIST = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "digits": (),
    "characters": (),  # comes with Python
    "mnist": tuple(
        Download(
            f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", md5, {f"mnist/{name}": md5}
        )
        for name, md5 in _MNIST.items()
    ),
    "cifar10": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d13530",
            {
                "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
        ),
    ),
    "cifar100": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            {
                "cifar-100-binary/train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
                "cifar-100-binary/test.bin": "4499cfba6c016c1be1438163640a0898",
            },
        ),
    ),
}
"""The downloads of each built-in data set."""


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of data files: the argument, $FEDCOVER_DATA, or the user's cache folder.

    >>> data_folder("somewhere").name
    'somewhere'
    """
    path = folder or os.environ.get(DATA_FOLDER_VARIABLE) or "~/.cache/fedcover"
    return Path(path).expanduser()


def get(name: str, folder: Path) -> list[FileCheck]:
    """Download the absent files of a data set, then verify all of its files.

    >>> get("digits", Path("unused"))
    []
    """
    _fetch_absent_files(name, folder)
    results = check(name, folder)
    for result in results:
        _raise_if_altered(result)
    return results


def check(name: str, folder: Path) -> list[FileCheck]:
    """Compare the digest of each file of a data set with the published one, without downloading.

    >>> [result.ok for result in check("cifar100", Path("nowhere"))]
    [False, False]
    """
    results = []
    for file, published_md5 in _published_digests(name, folder):
        md5 = _md5(_read_bytes(file)) if file.is_file() else None
        results.append(FileCheck(file, md5, published_md5))
    return results


def read(name: str, folder: Path) -> dict[str, bytes]:
    """Read the files of a data set, in the order of `DOWNLOADS`; download absent ones first.

    Returns:
        The verified contents by file name.
    """
    _fetch_absent_files(name, folder)
    contents = {}
    for file, published_md5 in _published_digests(name, folder):
        content = _read_bytes(file)
        _raise_if_altered(FileCheck(file, _md5(content), published_md5))
        contents[file.name] = content
    return contents


def _downloads_of(name: str) -> tuple[Download, ...]:
    if name not in DOWNLOADS:
        raise unknown("dataset", name, DOWNLOADS)
    return DOWNLOADS[name]


def _published_digests(name: str, folder: Path) -> list[tuple[Path, str]]:
    """Return the path and the published digest of each file of a data set."""
    downloads = _downloads_of(name)
    return [(folder / path, md5) for download in downloads for path, md5 in download.files.items()]


def _fetch_absent_files(name: str, folder: Path) -> None:
    for download in _downloads_of(name):
        absent = [path for path in download.files if not (folder / path).exists()]
        if absent:
            _fetch(name, download, folder, absent)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _raise_if_altered(result: FileCheck) -> None:
    if not result.ok:
        raise DataError(
            f"{result.path} is truncated or altered: its md5 is {result.actual}, its publisher's "
            f"is {result.expected}; delete it and it will be downloaded again"
        )


def _fetch(name: str, download: Download, folder: Path, absent: list[str]) -> None:
    """Download to a temporary folder, so that an interrupted download leaves no partial file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            file_by_path = _extract_files(download, _retrieve(download, temporary))
            for path in absent:
                (folder / path).parent.mkdir(exist_ok=True)
                os.replace(file_by_path[path], folder / path)
    except OSError as error:  # requests' errors are OSErrors too
        raise DataError(
            f"{name} needs {absent[0]}, which is not in {folder} and could not be downloaded "
            f"from {download.url} ({error.strerror or type(error).__name__}): put it there, "
            f"or set ${DATA_FOLDER_VARIABLE} to its folder"
        ) from error
    except ValueError as error:  # pooch's error about the digest
        raise DataError(f"{download.url} is truncated or altered: {error}") from error


def _retrieve(download: Download, folder: str) -> Path:
    """Download into a folder, and verify the digest."""
    import pooch

    file_name = download.url.rpartition("/")[2]
    with _progress_bar(file_name) as bar:
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK_BYTES)
        md5 = f"md5:{download.md5}"
        return Path(pooch.retrieve(download.url, md5, file_name, folder, downloader=downloader))


def _extract_files(download: Download, file: Path) -> dict[str, Path]:
    """Return the files of a download by path; other members of an archive are never written."""
    if not download.url.endswith(".tar.gz"):
        return dict.fromkeys(download.files, file)
    file_by_path = {}
    try:
        with tarfile.open(file) as archive:
            for path in download.files:
                member = archive.extractfile(path)
                if member is None:
                    raise KeyError(path)
                file_by_path[path] = file.parent / Path(path).name
                file_by_path[path].write_bytes(member.read())
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, KeyError) as error:
        raise DataError(f"{download.url} is not the archive that was expected: {error}") from error
    return file_by_path


@dataclass
class _Bar:
    """Adapt a progress bar of rich to what pooch calls."""

    progress: "Progress"
    task: "TaskID"

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, size: int) -> None:
        self.progress.update(self.task, total=size)

    def update(self, size: int) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        self.progress.stop()


@contextmanager
def _progress_bar(label: str) -> Iterator[_Bar]:
    """Show a progress bar on a terminal; pooch itself logs a line for each download."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = [*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, progress.add_task(label, total=None))
