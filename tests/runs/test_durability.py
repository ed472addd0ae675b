"""What a run has written is on disk before anything relies on it: files, folders, lines of figures,
kept states.
"""

import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.host import disk
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.runs import assert_same_end, tiny


@dataclass
class Record:
    """What was asked of the disk, in order: ("file", inode, bytes by then), ("folder", inode),
    ("put", path).
    """

    steps: list[tuple] = field(default_factory=list)

    def place(self, path: Path) -> int:
        """When a file was put in place last."""
        return len(self.steps) - 1 - self.steps[::-1].index(("put", path))

    def put(self) -> list[Path]:
        """The files that were put in place."""
        return [step[1] for step in self.steps if step[0] == "put"]

    def synced(self, path: Path) -> list[int]:
        """How long a file was whenever it was seen on disk."""
        return [step[2] for step in self.steps if step[:2] == ("file", path.stat().st_ino)]


@pytest.fixture
def record(monkeypatch):
    calls, fsync, replace = Record(), os.fsync, os.replace

    def seen_fsync(handle):
        fsync(handle)
        about = os.fstat(handle)
        calls.steps.append(
            ("folder", about.st_ino)
            if stat.S_ISDIR(about.st_mode)
            else ("file", about.st_ino, about.st_size)
        )

    def seen_replace(source, target, **options):
        replace(source, target, **options)
        calls.steps.append(("put", Path(target)))

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    return calls


def test_atomic_write_syncs_the_file_before_and_the_folder_after(record, tmp_path):
    disk.write_atomically(tmp_path / "file", b"content")
    number = (tmp_path / "file").stat().st_ino
    expected = [("file", number, 7), ("put", tmp_path / "file"), ("folder", tmp_path.stat().st_ino)]
    assert record.steps == expected


def test_appended_lines_are_synced(record, tmp_path):
    for _ in range(3):
        disk.append(tmp_path / "lines", b"line\n")
    assert record.synced(tmp_path / "lines") == [5, 10, 15]


@pytest.fixture
def folder(record, tmp_path):
    """A run that keeps every state."""
    fc.run(tiny(rounds=3, keep_rounds=(0, 1, 2, 3)), tmp_path / "run")
    return tmp_path / "run"


def test_every_file_of_a_run_is_synced_in_full(folder, record):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {"experiment.toml", "metrics.jsonl", "summary.json"} <= {path.name for path in files}
    for path in files:
        assert path.stat().st_size in record.synced(path), path


def test_folder_is_synced_after_each_replaced_file(folder, record):
    numbers = {
        folder / inner: (folder / inner).stat().st_ino for inner in ("", "checkpoints", "kept")
    }
    assert record.put()
    for place, step in enumerate(record.steps):
        if step[0] == "put":
            assert record.steps[place + 1] == ("folder", numbers[step[1].parent]), step


def test_metrics_are_synced_before_the_checkpoint_of_their_round(folder, record):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lengths = [sum(map(len, lines[: n + 1])) for n in range(3)]
    number = (folder / "metrics.jsonl").stat().st_ino
    checkpoints = [record.place(path) for path in record.put() if path.parent.name == "checkpoints"]
    figures = [record.steps.index(("file", number, length)) for length in lengths]
    assert len(checkpoints) == 3
    assert all(line < checkpoint for line, checkpoint in zip(figures, checkpoints, strict=True))


def test_kept_state_is_written_before_the_checkpoint_of_its_round(folder, record):
    """Who goes on from that checkpoint does not come to the beginning of the round again."""
    put = [
        (path.parent.name, path.name[:12]) for path in record.put() if path.suffix == ".safetensors"
    ]
    assert put == [
        ("kept", "round-000000"),
        *(
            (place, f"round-{round:06d}")
            for round in (1, 2, 3)
            for place in ("kept", "checkpoints")
        ),
    ]


def test_crash_after_any_replaced_file_loses_no_kept_state(tmp_path, monkeypatch):
    replace, images = os.replace, []

    def copying(source, target, **options):
        replace(source, target, **options)
        if (folder / "experiment.toml").exists():
            images.append(Path(shutil.copytree(folder, tmp_path / f"crash-{len(images)}")))

    folder, experiment = tmp_path / "run", tiny(rounds=2, keep_rounds=(0, 1, 2))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", copying)
        fc.run(experiment, folder)
    assert len(images) > 5
    for image in images:
        fc.resume(image, complain=pytest.fail)
        assert_same_end(image, folder)
        assert [file.path.name for file in list_checkpoints(image / "kept")] == [
            file.path.name for file in list_checkpoints(folder / "kept")
        ]
