"""Data that users bring as files or tensors; every wrong input gets one sentence."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedcover.data import datasets
from fedcover.errors import DataError, InvalidValue


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
def test_own_file_is_read(suffix, save, tmp_path):
    arrays = good(train_owner=np.array([5, 5, 8, 8, 9, 9], dtype=np.int32))
    path = tmp_path / f"mine{suffix}"
    save(path, arrays)
    loaded = datasets.load(str(path))
    assert (loaded.name, loaded.classes) == ("mine", 3)
    torch.testing.assert_close(loaded.train.x, torch.from_numpy(arrays["train_x"]).float())
    assert loaded.train.x.dtype == torch.float32
    assert loaded.test.y.tolist() == [0, 1, 2]
    assert loaded.owner.tolist() == [5, 5, 8, 8, 9, 9]


def test_missing_labels_need_classes_to_be_given(tmp_path):
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


def test_bytes_are_scaled_and_byte_orders_converted():
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
def test_errors_in_own_data_are_named(changed, says, tmp_path):
    save_npz(tmp_path / "mine.npz", good(**changed))
    with pytest.raises(InvalidValue, match=says):
        datasets.from_file(tmp_path / "mine.npz")


def test_lists_are_not_taken_as_tensors():
    with pytest.raises(
        InvalidValue, match=r"train_x must be a torch tensor or a NumPy array .* got list"
    ):
        datasets.from_tensors(([[1.0]], [0]), ([[1.0]], [0]))


class Trap:
    """Unpickled, it would leave a trace."""

    def __reduce__(self):
        return os.mkdir, ("trap",)


def test_pickle_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "mine.npz", **good(train_x=np.array([Trap()], dtype=object)))
    with pytest.raises(DataError, match=r"mine\.npz cannot be read as a \.npz file"):
        datasets.from_file(tmp_path / "mine.npz")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_broken_file_is_one_sentence(suffix, tmp_path):
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(b"not a file of that kind")
    with pytest.raises(DataError, match=f"cannot be read as a {suffix} file"):
        datasets.load(str(path))


def test_single_array_is_refused_as_dataset(tmp_path):
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="cannot be read"):
        datasets.from_file(tmp_path / "mine.npz")


def test_file_must_exist_and_have_a_known_ending(tmp_path):
    with pytest.raises(InvalidValue, match="dataset must be a file that exists"):
        datasets.load(str(tmp_path / "none.npz"))
    with pytest.raises(InvalidValue, match=r"must end in \.npz or \.safetensors; got 'mine\.csv'"):
        datasets.from_file("mine.csv")
