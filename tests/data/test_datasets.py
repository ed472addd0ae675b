"""Data sets known by name: read and checked; a share can be held out."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedcover.data import datasets, downloads
from fedcover.data.downloads import DOWNLOADS, Download
from fedcover.errors import DataError, InvalidValue
from fedcover.types import Samples

NOBODY = "http://127.0.0.1:9/nothing"


ALTERED = hashlib.md5(b"altered").hexdigest()


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, published in DOWNLOADS.items():
        monkeypatch.setitem(
            DOWNLOADS, name, tuple(Download(NOBODY, d.md5, d.files) for d in published)
        )


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


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "mnist/train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-batches-bin/data_batch_1.bin"),
        ("cifar100", "cifar-100-binary/train.bin"),
    ],
)
@pytest.mark.parametrize("use", [datasets.load, datasets.get])
def test_missing_file_without_network_is_one_sentence(use, name, file, offline, tmp_path):
    with pytest.raises(DataError) as exc_info:
        use(name, tmp_path)
    message = str(exc_info.value)
    assert message.startswith(f"{name} needs {file}, which is not in {tmp_path}")
    assert "$FEDCOVER_DATA" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
@pytest.mark.parametrize("use", [datasets.load, datasets.get])
def test_altered_file_is_named_with_both_digests(use, name, offline, tmp_path):
    digests = {path: md5 for download in DOWNLOADS[name] for path, md5 in download.files.items()}
    for path in digests:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"altered")
    with pytest.raises(DataError) as exc_info:
        use(name, tmp_path)
    first_path, first_digest = next(iter(digests.items()))
    for part in (str(tmp_path / first_path), ALTERED, first_digest):
        assert part in str(exc_info.value)
    assert [result.expected for result in datasets.check(name, tmp_path)] == [*digests.values()]
    assert {result.actual for result in datasets.check(name, tmp_path)} == {ALTERED}


def test_unreadable_dataset_file_is_one_sentence(offline, tmp_path):
    (tmp_path / "cifar-100-binary" / "train.bin").mkdir(parents=True)
    (tmp_path / "cifar-100-binary" / "test.bin").mkdir()
    with pytest.raises(DataError, match=r"train\.bin cannot be read"):
        datasets.load("cifar100", tmp_path)


def test_data_folder_is_an_argument_a_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCOVER_DATA", str(tmp_path))
    assert datasets.data_folder("here") == Path("here")
    assert datasets.data_folder(None) == tmp_path
    assert datasets.data_folder("~").is_absolute()
    monkeypatch.delenv("FEDCOVER_DATA")
    assert datasets.data_folder(None).name == "fedcover"


@pytest.mark.parametrize("use", [datasets.load, datasets.get, datasets.check])
def test_unknown_dataset_lists_known_ones(use, tmp_path):
    with pytest.raises(
        InvalidValue, match=r"dataset must be one of digits, .*, mnist, .*; got 'emnist'"
    ):
        use("emnist", tmp_path)


def test_every_dataset_has_a_reader_and_downloads():
    assert list(datasets.DATASETS) == list(downloads.DOWNLOADS)


def test_hold_out_keeps_rows_labels_and_owners_together():
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


def test_hold_out_of_share_zero_holds_nothing_out():
    digits = datasets.load("digits")
    assert datasets.hold_out(digits, 0, seed=0) == (digits, None)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), 0.9999])
def test_hold_out_refuses_a_wrong_share(share):
    with pytest.raises(InvalidValue, match=f"validation must .* got {share}"):
        datasets.hold_out(datasets.load("digits"), share, seed=0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "tested", "each"),
    [
        ("mnist", (60000, 1, 28, 28), 10000, 5421),
        ("cifar10", (50000, 3, 32, 32), 10000, 5000),
        ("cifar100", (50000, 3, 32, 32), 10000, 500),
    ],
)
def test_downloaded_files_have_the_published_sizes(name, shape, tested, each):
    folder = os.environ.get("FEDCOVER_DATA")
    if not folder or any(result.actual is None for result in datasets.check(name, Path(folder))):
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


def test_hold_out_is_cached_by_seed():
    digits = datasets.load("digits")
    splits = [datasets.hold_out(digits, 0.1, seed) for seed in (0, 1, 0)]
    assert splits[0][0].train.x is splits[2][0].train.x
    assert not torch.equal(splits[0][1].x, splits[1][1].x)
    for seed in range(2, 2 + datasets.MAX_CACHED_SPLITS):  # only so many are kept
        datasets.hold_out(digits, 0.1, seed)
    again = datasets.hold_out(digits, 0.1, 0)
    assert again[0].train.x is not splits[0][0].train.x
    assert torch.equal(again[1].x, splits[0][1].x)


def test_hold_out_splits_other_labels_alike():
    digits = datasets.load("digits")
    datasets.hold_out(digits, 0.1, 0)
    turned = replace(digits, train=Samples(digits.train.x, 9 - digits.train.y))
    rest, held_out = datasets.hold_out(turned, 0.1, 0)
    reference, known_held = datasets.hold_out(digits, 0.1, 0)
    assert torch.equal(rest.train.y, 9 - reference.train.y)
    assert torch.equal(held_out.y, 9 - known_held.y)
