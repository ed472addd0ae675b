"""Folders that cannot be written: full, read-only, in use, or held by another run."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.disks import small_disk
from tests.helpers.runs import assert_same_end, tiny
from tests.helpers.stopped_runs import files


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_checkpoint_leaves_the_older_ones_intact(whole, tmp_path):
    newest, older = (file.path.stat().st_size for file in list_checkpoints(whole / "checkpoints"))
    folder = tmp_path / "run"
    with files_of_at_most((newest + older) // 2), pytest.raises(RunError) as exc_info:
        fc.run(tiny(), folder)
    assert re.fullmatch(
        r"cannot write .*round-000004\.\w+\.safetensors: File too large; the "
        r"checkpoint of round 3 is whole; "
        r"mend that, then 'fedcover resume .*run'",
        str(exc_info.value),
    )
    assert fc.load(folder).state.round == 3
    assert not list(folder.rglob(".*.safetensors.*"))
    fc.resume(folder)
    assert_same_end(folder, whole)


def test_metrics_that_failed_to_write_are_written_on_resume(whole, tmp_path):
    folder = tmp_path / "run"
    newest = max(file.path.stat().st_size for file in list_checkpoints(whole / "checkpoints"))
    longer, fields = tmp_path / "longer", {"rounds": 20, "window": 1}
    fc.run(tiny(**fields), longer)
    assert (longer / "metrics.jsonl").stat().st_size > newest
    with (
        files_of_at_most(newest),
        pytest.raises(RunError, match=r"metrics\.jsonl: File too large; the checkpoint of"),
    ):
        fc.run(tiny(**fields), folder)
    fc.resume(folder)
    assert_same_end(folder, longer)


def test_full_disk_stops_a_run_that_can_be_resumed(whole, tmp_path):
    with small_disk(tmp_path / "disk", 40 * 1024) as disk:
        with pytest.raises(
            RunError,
            match=r"No space left on device; the checkpoint of round \d is whole; mend that",
        ):
            fc.run(tiny(), disk / "run")
        state = fc.load(disk / "run").state
        assert 1 <= state.round < 4
        with pytest.raises(RunError, match="No space left on device"):
            fc.resume(disk / "run")
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        fc.resume(disk / "run")
        assert_same_end(disk / "run", whole)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, to whom nothing is read-only."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_run_folders_that_cannot_be_made_are_refused(tmp_path, whole):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot create the run folder .*: Not a directory"):
        fc.run(tiny(), tmp_path / "file" / "run")
    with pytest.raises(RunError, match=r"cannot create the run folder .*: File name too long"):
        fc.run(tiny(), tmp_path / ("a" * 300))
    with pytest.raises(RunError, match=r"is not a run folder"):
        fc.resume(tmp_path / ("a" * 300))
    with pytest.raises(
        RunError,
        match=r"holds a run already: resume it with 'fedcover resume .*whole', or choose",
    ):
        fc.run(tiny(), whole)
    (whole / "experiment.toml").unlink()  # whose figures are these?
    with pytest.raises(RunError, match="holds a run already"):
        fc.run(tiny(), whole)
    place = Path(tempfile.mkdtemp())
    try:
        (place / "made").mkdir()
        for folder in (place / "made", place):
            folder.chmod(0o555)
        with nobody():
            for folder in (place / "run", place / "made"):
                with pytest.raises(RunError, match="Permission denied"):
                    fc.run(tiny(), folder)
        assert list(place.rglob("*")) == [place / "made"]
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_folder_without_a_finished_round_can_be_reused(tmp_path, whole):
    with pytest.raises(ZeroDivisionError):
        fc.run(
            tiny(policy="tests.helpers.python_parts:failing_policy", keep_rounds=(0,)),
            tmp_path / "run",
        )
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fc.run(tiny(), tmp_path / "run")
    assert_same_end(tmp_path / "run", whole)
    assert files(tmp_path / "run") - files(whole) == {Path("notes.txt")}


def test_run_is_overwritten_only_on_request(tmp_path, whole):
    folder = tmp_path / "run"
    fc.run(tiny(rounds=9, keep_rounds=(0, 9)), folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds a run already"):
        fc.run(tiny(), folder)
    fc.run(tiny(), folder, overwrite=True)
    assert_same_end(folder, whole)
    assert files(folder) - files(whole) == {Path("notes.txt")}

    def disturb(report):
        with pytest.raises(RunError, match="is in use by another process"):
            fc.run(tiny(), folder, overwrite=True)

    fc.run(tiny(), folder, overwrite=True, watch=disturb)
    assert_same_end(folder, whole)


def test_folder_in_use_is_refused(tmp_path, whole):
    messages = []

    def disturb(report):
        for act in (lambda: fc.resume(tmp_path / "run"), lambda: fc.run(tiny(), tmp_path / "run")):
            with pytest.raises(RunError) as exc_info:
                act()
            messages.append(str(exc_info.value))

    fc.run(tiny(), tmp_path / "run", watch=disturb)
    assert len(messages) == 8
    assert messages[0].endswith("is in use by another process")
    assert "holds a run already" in messages[1]
    assert_same_end(tmp_path / "run", whole)
