"""Data sets: read, verified, downloaded, brought along; every wrong input gets one sentence."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedcover.data import datasets, downloads
from fedcover.data.downloads import DOWNLOADS, Download, PublishedFile
from fedcover.errors import DataError, InvalidValue
from fedcover.types import Samples

NOBODY = "http://127.0.0.1:9/nothing"


def md5(raw):
    return hashlib.md5(raw).hexdigest()


def idx(array):
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def small_files(name):
    """A few random images in the publisher's own format, by path, with the arrays they were made from."""
    random = np.random.default_rng(0)
    files, arrays = {}, {}
    for path in [file.path for download in DOWNLOADS[name] for file in download.files]:
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
    """The files as a .tar.gz, between a member that nobody asked for and one that tries to escape."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for path, content in {"readme.html": b"hello", **files, "../escaped.txt": b"out"}.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def publish(name, site, web):
    """Put a small edition of a data set on the web folder; what the table of publishers then says of it."""
    files, arrays = small_files(name)
    made = [PublishedFile(path, md5(content)) for path, content in files.items()]
    if name == "mnist":
        for path, content in files.items():
            (web / Path(path).name).write_bytes(content)
        table = tuple(
            Download(f"{site}/{Path(file.path).name}", file.md5, (file,)) for file in made
        )
    else:
        (web / "all.tar.gz").write_bytes(packed(files))
        table = (
            Download(f"{site}/all.tar.gz", md5((web / "all.tar.gz").read_bytes()), tuple(made)),
        )
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


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, published in DOWNLOADS.items():
        monkeypatch.setitem(
            DOWNLOADS, name, tuple(Download(NOBODY, d.md5, d.files) for d in published)
        )


# ── known by name ───────────────────────────────────────────────────────────────────────────────────────


def test_digits_ship_with_the_package(offline, tmp_path):
    digits = datasets.load("digits", tmp_path)
    assert digits.train.x.shape == (1437, 1, 8, 8)
    assert digits.test.x.shape == (360, 1, 8, 8)
    assert digits.train.x.dtype == torch.float32
    assert digits.train.y.dtype == torch.int64
    assert abs(float(digits.train.x.mean())) < 0.01
    assert abs(float(digits.train.x.std()) - 1) < 0.01
    assert digits.test.y.bincount().min() >= 34
    rows = torch.cat([digits.train.x, digits.test.x]).flatten(1)
    assert len(rows.unique(dim=0)) == 1797
    assert torch.equal(digits.train.x, datasets.load("digits").train.x)
    assert datasets.check("digits", tmp_path) == datasets.get("digits", tmp_path) == []


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_a_data_set_is_downloaded_once_checked_and_read(name, web, tmp_path, monkeypatch, capfd):
    site, served = web
    table, arrays = publish(name, site, served)
    monkeypatch.setitem(DOWNLOADS, name, table)
    folder = tmp_path / "new" / "folder"
    assert all(result.actual is None and not result.ok for result in datasets.check(name, folder))

    assert all(result.ok for result in datasets.get(name, folder))
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == sorted(arrays)
    assert not (tmp_path / "escaped.txt").exists()
    assert "downloading" in capfd.readouterr().err

    for path in served.iterdir():
        path.unlink()
    assert all(result.ok for result in datasets.check(name, folder))
    loaded = datasets.load(name, folder)
    if name == "mnist":
        pixels, labels, *_ = arrays.values()
        expected = (pixels[:, None] / 255 - 0.1307) / 0.3081
    else:
        train = [made for path, made in arrays.items() if "test" not in path]
        labels = np.concatenate([some for some, _ in train])
        moments = {"cifar10": (0.4914, 0.2470), "cifar100": (0.5071, 0.2673)}[name]
        expected = (
            np.concatenate([some for _, some in train])[:, :1] / 255 - moments[0]
        ) / moments[1]
    assert loaded.train.y.tolist() == labels.tolist()
    torch.testing.assert_close(loaded.train.x[:, :1], torch.from_numpy(expected).float())
    assert loaded.classes == (100 if name == "cifar100" else 10)


def test_a_terminal_sees_a_progress_bar(web, tmp_path, monkeypatch, capfd):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    monkeypatch.setenv("FORCE_COLOR", "1")
    datasets.get("cifar100", tmp_path / "data")
    shown = capfd.readouterr().err
    assert "all.tar.gz" in shown
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown


def test_a_download_that_is_not_the_publishers_is_not_kept(web, tmp_path, monkeypatch):
    site, served = web
    table, _ = publish("cifar100", site, served)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    (served / "all.tar.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="altered") as caught:
        datasets.load("cifar100", tmp_path / "data")
    assert md5(b"something else") in str(caught.value)
    assert table[0].md5 in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("content", [b"no archive", packed({"other.bin": b""})])
def test_an_archive_without_the_files_is_refused(content, web, tmp_path, monkeypatch):
    site, served = web
    (served / "all.tar.gz").write_bytes(content)
    table = (Download(f"{site}/all.tar.gz", md5(content), DOWNLOADS["cifar100"][0].files),)
    monkeypatch.setitem(DOWNLOADS, "cifar100", table)
    with pytest.raises(DataError, match=r"all\.tar\.gz is not the archive that was expected"):
        datasets.get("cifar100", tmp_path / "data")


def test_a_page_that_is_not_found_is_one_sentence(web, tmp_path, monkeypatch):
    site, _ = web
    monkeypatch.setitem(
        DOWNLOADS, "cifar100", (Download(f"{site}/gone.tar.gz", "0", (PublishedFile("a/b", "0"),)),)
    )
    with pytest.raises(DataError, match=r"cifar100 needs a/b, .* \(HTTPError\)"):
        datasets.load("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "mnist/train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-batches-bin/data_batch_1.bin"),
        ("cifar100", "cifar-100-binary/train.bin"),
    ],
)
@pytest.mark.parametrize("use", [datasets.load, datasets.get])
def test_no_file_and_no_network_is_one_sentence(use, name, file, offline, tmp_path):
    with pytest.raises(DataError) as caught:
        use(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name} needs {file}, which is not in {tmp_path}")
    assert "$FEDCOVER_DATA" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
@pytest.mark.parametrize("use", [datasets.load, datasets.get])
def test_an_altered_file_is_named_with_both_digests(use, name, offline, tmp_path):
    files = [file for download in DOWNLOADS[name] for file in download.files]
    for file in files:
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(b"altered")
    with pytest.raises(DataError) as caught:
        use(name, tmp_path)
    for part in (str(tmp_path / files[0].path), md5(b"altered"), files[0].md5):
        assert part in str(caught.value)
    assert [result.expected for result in datasets.check(name, tmp_path)] == [
        file.md5 for file in files
    ]
    assert {result.actual for result in datasets.check(name, tmp_path)} == {md5(b"altered")}


def test_a_file_that_cannot_be_read_is_one_sentence(offline, tmp_path):
    (tmp_path / "cifar-100-binary" / "train.bin").mkdir(parents=True)
    (tmp_path / "cifar-100-binary" / "test.bin").mkdir()
    with pytest.raises(DataError, match=r"train\.bin cannot be read"):
        datasets.load("cifar100", tmp_path)


def test_the_data_folder_is_given_or_set_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCOVER_DATA", str(tmp_path))
    assert datasets.data_folder("here") == Path("here")
    assert datasets.data_folder(None) == tmp_path
    assert datasets.data_folder("~").is_absolute()
    monkeypatch.delenv("FEDCOVER_DATA")
    assert datasets.data_folder(None).name == "fedcover"


@pytest.mark.parametrize("use", [datasets.load, datasets.get, datasets.check])
def test_an_unknown_name_lists_the_known_ones(use, tmp_path):
    with pytest.raises(
        InvalidValue, match=r"dataset must be one of digits, .*, mnist, .*; got 'emnist'"
    ):
        use("emnist", tmp_path)


def test_every_data_set_has_a_reader_and_a_publisher():
    assert list(datasets.DATASETS) == list(downloads.DOWNLOADS)


# ── your own ────────────────────────────────────────────────────────────────────────────────────────────


def good(**changed):
    arrays = {
        "train_x": np.random.default_rng(0).random((6, 2, 3)),
        "train_y": np.array([0, 1, 2, 0, 1, 2]),
        "test_x": np.random.default_rng(1).random((3, 2, 3)),
        "test_y": np.array([0, 1, 2]),
        **changed,
    }
    return {key: array for key, array in arrays.items() if array is not None}


def save_npz(path, arrays):
    np.savez(path, **arrays)


def save_safetensors(path, arrays):
    save_file({key: torch.from_numpy(array) for key, array in arrays.items()}, path)


@pytest.mark.parametrize(
    ("suffix", "save"), [(".npz", save_npz), (".safetensors", save_safetensors)]
)
def test_your_own_file(suffix, save, tmp_path):
    arrays = good(train_owner=np.array([5, 5, 8, 8, 9, 9], dtype=np.int32))
    path = tmp_path / f"mine{suffix}"
    save(path, arrays)
    loaded = datasets.load(str(path))
    assert (loaded.name, loaded.classes) == ("mine", 3)
    torch.testing.assert_close(loaded.train.x, torch.from_numpy(arrays["train_x"]).float())
    assert loaded.train.x.dtype == torch.float32
    assert loaded.test.y.tolist() == [0, 1, 2]
    assert loaded.owner.tolist() == [5, 5, 8, 8, 9, 9]


def test_labels_that_are_missing_must_be_spoken_of(tmp_path):
    missing = good(
        train_y=np.array([0, 4, 2, 0, 4, 2]), test_y=np.array([1, 4, 0]), classes=np.array(6)
    )
    save_npz(tmp_path / "mine.npz", missing)
    assert datasets.from_file(tmp_path / "mine.npz").classes == 6
    x, y = torch.rand(2, 3), torch.tensor([0, 2])
    assert datasets.from_tensors((x, y), (x, y), classes=3).classes == 3
    with pytest.raises(InvalidValue, match="train_y must hold labels from 0 to 1; got 2"):
        datasets.from_tensors((x, y), (x, y), classes=2)
    with pytest.raises(InvalidValue, match=r"classes must be a whole number from 1 on; got 3\.5"):
        datasets.from_tensors((x, y), (x, y), classes=3.5)


def test_bytes_are_scaled_and_foreign_byte_orders_understood():
    pixels = np.array([[0, 51], [102, 255]], dtype=np.uint8)
    y = np.array([0, 1], dtype=">i2")
    loaded = datasets.from_tensors(
        (pixels, y), (torch.from_numpy(pixels), torch.tensor([1, 0])), name="mine"
    )
    torch.testing.assert_close(loaded.train.x, torch.tensor([[0.0, 0.2], [0.4, 1.0]]))
    assert torch.equal(loaded.train.x, loaded.test.x)
    assert loaded.train.y.tolist() == [0, 1]
    assert loaded.name == "mine"
    assert loaded.owner is None


WRONG = [
    ({"train_x": None}, "must have an array train_x; got train_y, test_x, test_y"),
    (
        {"train_owners": np.zeros(6, int)},
        "must be one of .*train_owner, classes; got 'train_owners'",
    ),
    ({"train_y": np.array([0, 1])}, "train_y must be as long as train_x, 6 rows; got 2"),
    ({"test_y": np.array([0, 1])}, "test_y must be as long as test_x, 3 rows; got 2"),
    ({"train_owner": np.array([0, 1])}, "train_owner must be as long as train_x, 6 rows; got 2"),
    ({"train_y": np.ones(6)}, r"train_y must hold one whole number .* got torch.float64"),
    ({"train_y": np.ones((6, 3), int)}, r"train_y must hold one whole number .* shape \(6, 3\)"),
    ({"train_y": np.array([0, 1, -2, 0, 1, 2])}, "train_y must not be negative; got -2"),
    ({"train_owner": np.array([0, 1, -2, 0, 1, 2])}, "train_owner must not be negative; got -2"),
    ({"test_y": np.array([0, 1, 3])}, "test_y must hold labels from 0 to 2; got 3"),
    (
        {"train_y": np.array([0, 1000, 2000] * 2)},
        r"train_y must hold every label from 0 to 2000, or classes=2001 must "
        r"say that some are missing; got 3 labels: 0, 1000, 2000$",
    ),
    (
        {"train_y": np.array([1, 2, 3, 4, 5, 9])},
        r"every label from 0 to 9, .* got 6 labels: 1, 2, 3, 4, 5, \.\.\., 9$",
    ),
    ({"classes": np.array(2)}, "train_y must hold labels from 0 to 1; got 2"),
    ({"classes": np.array([3, 4])}, r"classes must be one whole number; got shape \(2,\)"),
    ({"classes": np.array(2.5)}, "classes must hold one whole number .* got torch.float64"),
    (
        {"train_x": np.full((6, 2, 3), np.nan)},
        r"train_x must be finite in float32; got nan \(36 in all\)",
    ),
    ({"test_x": np.full((3, 2, 3), 1e300)}, "test_x must be finite in float32; got inf"),
    ({"train_x": np.zeros((0, 2, 3))}, r"train_x must have rows, .* got shape \(0, 2, 3\)"),
    ({"test_x": np.float32(3)}, r"test_x must have rows, .* got shape \(\)"),
    (
        {"test_x": np.zeros((3, 2, 4))},
        r"test_x must have rows of the shape .* \(2, 3\); got \(2, 4\)",
    ),
    (
        {"train_x": np.zeros((6, 2, 3), int)},
        "train_x must hold floating or uint8 inputs.* got torch.int64",
    ),
    (
        {"train_x": np.zeros(6)},
        r"train_x must hold .* row by row; got torch.float64 of shape \(6,\)",
    ),
    (
        {"train_x": np.full((6, 2), "a")},
        "train_x must be a torch tensor or a NumPy array .* got <U1",
    ),
]


@pytest.mark.parametrize(("changed", "says"), WRONG)
def test_what_is_wrong_with_your_own_data_is_said(changed, says, tmp_path):
    save_npz(tmp_path / "mine.npz", good(**changed))
    with pytest.raises(InvalidValue, match=says):
        datasets.from_file(tmp_path / "mine.npz")


def test_a_list_is_no_tensor():
    with pytest.raises(
        InvalidValue, match=r"train_x must be a torch tensor or a NumPy array .* got list"
    ):
        datasets.from_tensors(([[1.0]], [0]), ([[1.0]], [0]))


class Trap:
    """Unpickled, it would leave a trace."""

    def __reduce__(self):
        return os.mkdir, ("trap",)


def test_a_pickle_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "mine.npz", **good(train_x=np.array([Trap()], dtype=object)))
    with pytest.raises(DataError, match=r"mine\.npz cannot be read as a \.npz file"):
        datasets.from_file(tmp_path / "mine.npz")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_broken_file_is_one_sentence(suffix, tmp_path):
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(b"not a file of that kind")
    with pytest.raises(DataError, match=f"cannot be read as a {suffix} file"):
        datasets.load(str(path))


def test_a_single_array_is_no_data_set(tmp_path):
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="cannot be read"):
        datasets.from_file(tmp_path / "mine.npz")


def test_a_file_must_exist_and_have_a_known_ending(tmp_path):
    with pytest.raises(InvalidValue, match="dataset must be a file that exists"):
        datasets.load(str(tmp_path / "none.npz"))
    with pytest.raises(InvalidValue, match=r"must end in \.npz or \.safetensors; got 'mine\.csv'"):
        datasets.from_file("mine.csv")


# ── held out ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_held_out_share_keeps_rows_and_owners_together():
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 4
    whole = datasets.from_tensors((x, y), (x, y), owner=torch.arange(40))
    rest, validation = datasets.hold_out(whole, 0.25, seed=1)
    assert (len(rest.train), len(validation)) == (30, 10)
    assert sorted([*rest.train.x.flatten().tolist(), *validation.x.flatten().tolist()]) == list(
        range(40)
    )
    assert rest.owner.tolist() == rest.train.x.flatten().tolist()
    assert (rest.train.x.flatten() % 4).tolist() == rest.train.y.tolist()
    copy = replace(whole, train=Samples(whole.train.x.clone(), whole.train.y))
    assert torch.equal(datasets.hold_out(copy, 0.25, seed=1)[1].x, validation.x)
    assert not torch.equal(datasets.hold_out(whole, 0.25, seed=2)[1].x, validation.x)


def test_a_share_of_nothing_holds_nothing_out():
    digits = datasets.load("digits")
    assert datasets.hold_out(digits, 0, seed=0) == (digits, None)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), 0.9999])
def test_a_wrong_share_is_refused(share):
    with pytest.raises(InvalidValue, match=f"validation must .* got {share}"):
        datasets.hold_out(datasets.load("digits"), share, seed=0)


# ── the real files ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "tested", "each"),
    [
        ("mnist", (60000, 1, 28, 28), 10000, 5421),
        ("cifar10", (50000, 3, 32, 32), 10000, 5000),
        ("cifar100", (50000, 3, 32, 32), 10000, 500),
    ],
)
def test_the_publishers_files(name, shape, tested, each):
    given = os.environ.get("FEDCOVER_DATA")
    if not given or any(result.actual is None for result in datasets.check(name, Path(given))):
        pytest.skip(f"$FEDCOVER_DATA holds no {name}")
    loaded = datasets.load(name)
    assert loaded.train.x.shape == shape
    assert len(loaded.test) == tested
    assert int(loaded.train.y.bincount(minlength=loaded.classes).min()) == each
    torch.testing.assert_close(
        loaded.train.x.mean((0, 2, 3)), torch.zeros(shape[1]), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        loaded.train.x.std((0, 2, 3)), torch.ones(shape[1]), atol=1e-3, rtol=0
    )


def test_runs_of_one_seed_share_what_is_held_out():
    digits = datasets.load("digits")
    splits = [datasets.hold_out(digits, 0.1, seed) for seed in (0, 1, 0)]
    assert splits[0][0].train.x is splits[2][0].train.x
    assert not torch.equal(splits[0][1].x, splits[1][1].x)
    for seed in range(2, 2 + datasets.MAX_CACHED_SPLITS):  # only so many are kept
        datasets.hold_out(digits, 0.1, seed)
    again = datasets.hold_out(digits, 0.1, 0)
    assert again[0].train.x is not splits[0][0].train.x
    assert torch.equal(again[1].x, splits[0][1].x)


def test_other_labels_of_the_same_inputs_are_split_alike():
    digits = datasets.load("digits")
    datasets.hold_out(digits, 0.1, 0)
    turned = replace(digits, train=Samples(digits.train.x, 9 - digits.train.y))
    rest, held = datasets.hold_out(turned, 0.1, 0)
    known, known_held = datasets.hold_out(digits, 0.1, 0)
    assert torch.equal(rest.train.y, 9 - known.train.y)
    assert torch.equal(held.y, 9 - known_held.y)
