"""Download published files if they are absent, and verify their digests on every read."""

import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.errors import DataError, unknown

DATA_FOLDER_VARIABLE = "FEDCOVER_DATA"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """Describe a published file: its path under the data folder, and its digest."""

    path: str
    md5: str


@dataclass(frozen=True, slots=True)
class Download:
    """Describe a URL and its files: the download itself, or members of a .tar.gz archive."""

    url: str
    md5: str
    files: tuple[PublishedFile, ...]


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


def _single_files(site: str, folder: str, digests: dict[str, str]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{site}/{name}", md5, (PublishedFile(f"{folder}/{name}", md5),))
        for name, md5 in digests.items()
    )


def _archive(url: str, md5: str, folder: str, digests: dict[str, str]) -> tuple[Download, ...]:
    files = tuple(PublishedFile(f"{folder}/{name}", digest) for name, digest in digests.items())
    return (Download(url, md5, files),)


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "digits": (),
    "characters": (),  # comes with Python
    "mnist": _single_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "cifar10": _archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d13530",
        "cifar-10-batches-bin",
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
    "cifar100": _archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {
            "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
            "test.bin": "4499cfba6c016c1be1438163640a0898",
        },
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
    for download in _downloads_of(name):
        _fetch_if_absent(name, download, folder)
    results = check(name, folder)
    for result in results:
        _raise_if_altered(result)
    return results


def check(name: str, folder: Path) -> list[FileCheck]:
    """Compare the digest of each file of a data set with the published one, without downloading.

    >>> [result.ok for result in check("cifar100", Path("nowhere"))]
    [False, False]
    """
    files = [file for download in _downloads_of(name) for file in download.files]
    return [_check_file(folder / file.path, file.md5) for file in files]


def read(name: str, folder: Path) -> dict[str, bytes]:
    """Read the files of a data set, in the order of `DOWNLOADS`; download absent ones first.

    Returns:
        The verified contents by file name.
    """
    contents = {}
    for download in _downloads_of(name):
        _fetch_if_absent(name, download, folder)
        for file in download.files:
            path = folder / file.path
            raw = _read_bytes(path)
            _raise_if_altered(FileCheck(path, _md5(raw), file.md5))
            contents[path.name] = raw
    return contents


def _downloads_of(name: str) -> tuple[Download, ...]:
    if name not in DOWNLOADS:
        raise unknown("dataset", name, DOWNLOADS)
    return DOWNLOADS[name]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def _check_file(path: Path, expected: str) -> FileCheck:
    return FileCheck(path, _md5(_read_bytes(path)) if path.is_file() else None, expected)


def _raise_if_altered(result: FileCheck) -> None:
    if not result.ok:
        raise DataError(
            f"{result.path} is truncated or altered: its md5 is {result.actual}, its publisher's "
            f"is {result.expected}; delete it and it will be downloaded again"
        )


def _fetch_if_absent(name: str, download: Download, folder: Path) -> None:
    if not all((folder / file.path).exists() for file in download.files):
        _fetch(name, download, folder)


def _fetch(name: str, download: Download, folder: Path) -> None:
    """Download to a temporary folder, verify, then move each file to its place.

    An interrupted download therefore never leaves a partial file.
    """
    absent = next(file for file in download.files if not (folder / file.path).exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as work:
            downloaded = Path(work) / download.url.rpartition("/")[2]
            _download(download.url, downloaded)
            _raise_if_download_altered(download, _check_file(downloaded, download.md5))
            for file, extracted in _extract_files(download, downloaded):
                target = folder / file.path
                target.parent.mkdir(exist_ok=True)
                if not target.exists():
                    os.replace(extracted, target)
    except OSError as error:  # requests' errors are OSErrors too
        raise DataError(
            f"{name} needs {absent.path}, which is not in {folder} and could not be downloaded "
            f"from {download.url} ({type(error).__name__}): put it there, "
            f"or set ${DATA_FOLDER_VARIABLE} to its folder"
        ) from error


def _raise_if_download_altered(download: Download, result: FileCheck) -> None:
    if not result.ok:
        raise DataError(
            f"{result.path.name} came from {download.url} truncated or altered: its md5 is "
            f"{result.actual}, its publisher's is {result.expected}; nothing of it was kept"
        )


def _extract_files(download: Download, downloaded: Path) -> Iterator[tuple[PublishedFile, Path]]:
    """Extract the listed files of a download; other members of an archive are never written."""
    if not download.url.endswith(".tar.gz"):
        yield download.files[0], downloaded
        return
    try:
        with tarfile.open(downloaded) as archive:
            for file in download.files:
                member = archive.extractfile(file.path)
                if member is None:
                    raise KeyError(file.path)
                extracted = downloaded.parent / Path(file.path).name
                extracted.write_bytes(member.read())
                yield file, extracted
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, KeyError) as error:
        raise DataError(f"{download.url} is not the archive that was expected: {error}") from error


def _download(url: str, target: Path) -> None:
    import pooch

    with _progress(target.name) as bar:
        pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18)(url, str(target), None)


class _Bar:
    """Adapt a rich progress bar to the interface that pooch expects."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    @property
    def total(self) -> int:
        return int(self._progress.tasks[self._task].total or 0)

    @total.setter
    def total(self, size: int) -> None:
        self._progress.update(self._task, total=size)

    def update(self, size: int) -> None:
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()


@contextmanager
def _progress(label: str) -> Iterator[_Bar]:
    """Show a progress bar on a terminal, or print a single line elsewhere (logs, pipes)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"downloading {label}", highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, progress.add_task(label, total=None))
