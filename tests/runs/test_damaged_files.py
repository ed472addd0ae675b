"""Damaged and foreign files of a run are named, and the run goes on from what is intact."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs.checkpoints import list_checkpoints
from tests.helpers.runs import assert_same_end, figures, tiny
from tests.helpers.stopped_runs import images


@pytest.mark.parametrize(
    "torn", [b'{"round": 3, "lr": 0.0', b"\x00\x00\x00", b"\xff\xfe{", b"{}", b"7", b""]
)
def test_torn_last_line_is_ignored(stopped, whole, torn):
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert len(fc.load(stopped).metrics) == 3
    fc.resume(stopped)
    assert_same_end(stopped, whole)


def test_lost_lines_are_reported(stopped, whole):
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text(lines[0] + lines[2])
    messages = []
    fc.resume(stopped, complain=messages.append)
    assert re.search(r"metrics\.jsonl lacks the rounds \[1\]", messages[0])
    assert figures(stopped) == [line for line in figures(whole) if line["round"] != 1]


@pytest.mark.parametrize("damage", [b'{"round": 1}', b'{"round": 1, "gamma_round": "many"}'])
def test_incomplete_metrics_line_is_left_out(stopped, damage):
    """The run is described without it, and continues."""
    path = stopped / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    assert fc.load(stopped).summary["rounds"] == len(lines) - 1
    resumed = fc.resume(stopped)
    assert [line["round"] for line in resumed.metrics] == [0, *range(2, resumed.experiment.rounds)]


def test_finished_run_without_metrics_says_what_is_left(stopped):
    fc.resume(stopped)
    (stopped / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(
        RunError, match=r"lost the metrics of all \d+ rounds.*the model is intact: fedcover export"
    ):
        fc.resume(stopped)


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


DAMAGES = {
    "flipped": flipped,
    "truncated": lambda content: content[:700],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_newest_checkpoint_is_named_and_the_older_one_used(stopped, whole, damage):
    newest = list_checkpoints(stopped / "checkpoints")[0].path
    newest.write_bytes(damage(newest.read_bytes()))
    assert fc.load(stopped).state.round == 2
    messages = []
    fc.resume(stopped, complain=messages.append)
    assert f"checkpoint {newest} is damaged" in messages[0]
    assert "continuing from the older checkpoint of round 2" in messages[0]
    assert_same_end(stopped, whole)


def test_damaged_checkpoint_never_replaces_an_intact_one(tmp_path):
    def stop(report):
        if report.round == 3:
            raise KeyboardInterrupt

    experiment, folder = tiny(rounds=8, checkpoint_every=3), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment, folder, watch=stop)
    assert [file.round for file in list_checkpoints(folder / "checkpoints")] == [4, 3]
    list_checkpoints(folder / "checkpoints")[0].path.write_bytes(b"")
    messages = []
    again = images(folder, partial(fc.resume, folder, complain=messages.append))[6]
    list_checkpoints(again / "checkpoints")[0].path.write_bytes(b"")
    fc.resume(again, complain=messages.append)
    assert ["round-000004" in messages[0], "round-000006" in messages[1]] == [True, True]
    assert messages[1].endswith("continuing from the older checkpoint of round 3")
    assert_same_end(again, folder)


def test_damaged_checkpoints_are_reported_and_nothing_is_removed(stopped):
    for file in list_checkpoints(stopped / "checkpoints"):
        file.path.write_bytes(flipped(file.path.read_bytes()))
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    for act in (fc.resume, fc.load):
        with pytest.raises(
            RunError, match=r"round-000003.*is damaged.*; .*round-000002.*is damaged"
        ):
            act(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_checkpoint_of_another_experiment_is_refused(stopped, whole, tmp_path):
    changed = Path(shutil.copytree(stopped, tmp_path / "changed")) / "experiment.toml"
    changed.write_text(changed.read_text().replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(RunError, match="belongs to another experiment"):
        fc.resume(changed.parent)
    fc.run(tiny(lr=0.02, rounds=8), tmp_path / "other")
    foreign = list_checkpoints(tmp_path / "other" / "checkpoints")[0].path
    shutil.copy(foreign, stopped / "checkpoints")
    alone = shutil.copytree(stopped, tmp_path / "alone")
    for file in list_checkpoints(alone / "checkpoints")[1:]:
        file.path.unlink()
    with pytest.raises(RunError, match=r"round-000008.* belongs to another experiment"):
        fc.resume(alone)
    messages = []
    fc.resume(stopped, complain=messages.append)
    assert "belongs to another experiment" in messages[0]
    assert_same_end(stopped, whole)
