"""Data sets are downloaded from a publisher, checked and unpacked."""

import errno
import gzip
import hashlib
import io
import os
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch

from fedcover.data import datasets
from fedcover.data.downloads import DOWNLOADS, Download
from fedcover.errors import DataError


def md5(raw):
    return hashlib.md5(raw).hexdigest()


def idx(array):
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def small_files(name):
    """A few random images in the publisher's own format, by path, with the arrays they were made
    from.
    """
    random = np.random.default_rng(0)
    files, arrays = {}, {}
    for path in [path for download in DOWNLOADS[name] for path in download.files]:
        if name == "mnist":
            shape = (6, 28, 28) if "images" in path else (6,)
            arrays[path] = random.integers(
                0, 256 if "images" in path else 10, shape, dtype=np.uint8
            )
            files[path] = idx(arrays[path])
        else:
            label_bytes, classes = (1, 10) if name == "cifar10" else (2, 100)
            labels = random.integers(0, classes, (4, label_bytes), dtype=np.uint8)
            pixels = random.integers(0, 256, (4, 3 * 1024), dtype=np.uint8)
            arrays[path] = labels[:, -1], pixels.reshape(4, 3, 32, 32)
            files[path] = np.concatenate([labels, pixels], axis=1).tobytes()
    return files, arrays


def packed(files):
    """The files as a .tar.gz, between a member that nobody asked for and one that tries
    to escape.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for path, content in {"readme.html": b"hello", **files, "../escaped.txt": b"out"}.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def publish(name, site, web):
    """Put a small edition of a data set on the web folder; what the table of publishers then says
    of it.
    """
    files, arrays = small_files(name)
    digests = {path: md5(content) for path, content in files.items()}
    if name == "mnist":
        for path, content in files.items():
            (web / Path(path).name).write_bytes(content)
        table = tuple(
            Download(f"{site}/{Path(path).name}", digest, {path: digest})
            for path, digest in digests.items()
        )
    else:
        (web / "all.tar.gz").write_bytes(packed(files))
        table = (Download(f"{site}/all.tar.gz", md5((web / "all.tar.gz").read_bytes()), digests),)
    return table, arrays


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A web server on this machine, and the folder that it serves."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "web"
    folder.mkdir()
    with HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_dataset_is_downloaded_once_checked_and_read(name, web, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pooch.get_logger(), "handlers", [caplog.handler])
    site, served = web
    table, arrays = publish(name, site, served)
    monkeypatch.setitem(DOWNLOADS, name, table)
    folder = tmp_path / "new" / "folder"
    assert all(result.actual is None and not result.ok for result in datasets.check(name, folder))

    assert all(result.ok for result in datasets.get(name, folder))
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == sorted(arrays)
    assert not (tmp_path / "escaped.txt").exists()
    assert f"Downloading data from '{site}/" in caplog.text

    for path in served.iterdir():
        path.unlink()
    assert all(result.ok for result in datasets.check(name, folder))
    loaded = datasets.load(name, folder)
    if name == "mnist":
        pixels, labels, *_ = arrays.values()
        expected = (pixels[:, None] / 255 - 0.1307) / 0.3081
    else:
        train = [array for path, array in arrays.items() if "test" not in path]
        labels = np.concatenate([some for some, _ in train])
        moments = {"cifar10": (0.4914, 0.2470), "cifar100": (0.5071, 0.2673)}[name]
        expected = (
            np.concatenate([some for _, some in train])[:, :1] / 255 - moments[0]
        ) / moments[1]
    assert loaded.train.y.tolist() == labels.tolist()
    torch.testing.assert_close(loaded.train.x[:, :1], torch.from_numpy(expected).float())
    assert loaded.classes == (100 if name == "cifar100" else 10)


def test_download_shows_a_progress_bar_on_a_terminal(web, tmp_path, monkeypatch, capfd):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    monkeypatch.setenv("FORCE_COLOR", "1")
    datasets.get("cifar100", tmp_path / "data")
    output = capfd.readouterr().err
    assert "all.tar.gz" in output
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in output


def test_download_with_wrong_digest_is_not_kept(web, tmp_path, monkeypatch):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    (served / "all.tar.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="altered") as exc_info:
        datasets.load("cifar100", tmp_path / "data")
    assert md5(b"something else") in str(exc_info.value)
    assert table[0].md5 in str(exc_info.value)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("content", [b"no archive", packed({"other.bin": b""})])
def test_archive_without_the_files_is_refused(content, web, tmp_path, monkeypatch):
    site, served = web
    (served / "all.tar.gz").write_bytes(content)
    table = (Download(f"{site}/all.tar.gz", md5(content), DOWNLOADS["cifar100"][0].files),)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    with pytest.raises(DataError, match=r"all\.tar\.gz is not the archive that was expected"):
        datasets.get("cifar100", tmp_path / "data")


def test_download_that_breaks_off_is_not_kept(web, tmp_path, monkeypatch):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    whole = (served / "all.tar.gz").read_bytes()
    monkeypatch.setattr(Quiet, "send_head", half_of(whole))
    with pytest.raises(DataError, match=r"could not be downloaded from .* \(.*Error\)"):
        datasets.load("cifar100", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def half_of(content):
    """A reply that promises some content, and ends in the middle."""

    def send_head(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        return io.BytesIO(content[: len(content) // 2])

    return send_head


def test_full_disk_is_one_sentence(web, tmp_path, monkeypatch):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(DataError, match=r"cifar100 needs .* \(No space left on device\): put"):
        datasets.load("cifar100", tmp_path / "data")
    assert [*(tmp_path / "data").rglob("*.bin")] == []


def test_download_of_a_missing_page_is_one_sentence(web, tmp_path, monkeypatch):
    site, _ = web
    monkeypatch.setitem(
        DOWNLOADS, "cifar100", (Download(f"{site}/gone.tar.gz", "0", {"a/b": "0"}),)
    )
    with pytest.raises(DataError, match=r"cifar100 needs a/b, .* \(HTTPError\)"):
        datasets.load("cifar100", tmp_path)
