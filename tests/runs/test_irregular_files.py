"""Run folders with links, pipes and devices in the place of files: nothing waits, nothing beyond is
touched.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.cli.live_view import read_run_view
from fedcover.errors import RunError
from fedcover.host import disk, locks
from fedcover.paper import store
from fedcover.runs.experiment import read_experiment
from fedcover.runs.export import export
from tests.helpers.command_line import refused
from tests.helpers.made_up import made_up_run, on_flower
from tests.helpers.runs import tiny

FILES = ("experiment.toml", "manifest.json", "metrics.jsonl", "events.jsonl", "certificate.json")
SECRET = 'name = "secret-of-elsewhere"'


@pytest.fixture(autouse=True)
def nothing_waits_for_ever():
    """Who opens a pipe without another end would wait."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def secret(tmp_path):
    """A file beyond the run folder, which must stay as it is and be shown nowhere."""
    (tmp_path / "secret").write_text(SECRET)
    yield tmp_path / "secret"
    assert (tmp_path / "secret").read_text() == SECRET


@pytest.fixture
def folder(tmp_path):
    """A run that was stopped after two of three rounds."""

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(rounds=3, keep_rounds=[1], name="run"), tmp_path / "runs" / "run", watch=stop)
    return tmp_path / "runs" / "run"


def link(path, target):
    """A link in the place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def pipe(path, target):
    """A pipe in the place of a file, with nobody at its other end."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path, target):
    """A link to what never ends."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


KINDS = (link, pipe, device)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_report_leaves_out_runs_with_irregular_files(kind, name, tmp_path, secret, caplog):
    made_up_run(tmp_path / "runs" / "whole")
    kind(on_flower(made_up_run(tmp_path / "runs" / "odd")) / name, secret)
    page = fc.report(tmp_path / "runs", tmp_path / "report.html").read_text()
    assert "secret-of-elsewhere" not in page
    assert (
        "a run is left out: " in caplog.text
        or "odd is left out: it has no experiment.toml" in caplog.text
    )
    assert str(Path("odd") / name) in caplog.text or name == "experiment.toml"


@pytest.mark.parametrize("words", [("history",), ("report",), ("watch", "--once"), ("resume",)])
@pytest.mark.parametrize("kind", KINDS)
def test_commands_refuse_irregular_metrics(words, kind, folder, secret, fedcover):
    kind(folder / "metrics.jsonl", secret)
    refused(
        fedcover(*words, folder),
        1,
        "metrics.jsonl cannot be read: it is (a symbolic link|not a regular file)",
    )


@pytest.mark.parametrize("words", [("watch", "--once"), ("resume",), ("export",)])
def test_linked_experiment_in_a_run_folder_is_refused(words, folder, secret, fedcover):
    link(folder / "experiment.toml", secret)
    refused(fedcover(*words, folder), 2, "experiment.toml cannot be read: it is a symbolic link")


def test_experiment_to_start_may_be_a_link(tmp_path, secret):
    """Who names a file means what it points to."""
    link(tmp_path / "mine.toml", secret)
    assert read_experiment(tmp_path / "mine.toml").name == "secret-of-elsewhere"


def test_watch_does_not_wait_for_a_pipe(folder, secret, fedcover):
    pipe(folder / "events.jsonl", secret)
    refused(
        fedcover("watch", folder, "--once"),
        1,
        "events.jsonl cannot be read: it is not a regular file",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_checkpoint_is_named_and_the_older_one_used(kind, folder, secret):
    newest = max((folder / "checkpoints").iterdir())
    kind(newest, secret)
    complaints = []
    fc.resume(folder, complain=complaints.append)
    assert "cannot be read: it is" in complaints[0]
    assert len(fc.load(folder).metrics) == 3


def test_run_folder_may_be_a_link(folder, tmp_path):
    """It is named by who wants it read."""
    link(tmp_path / "elsewhere", folder)
    fc.resume(tmp_path / "elsewhere")
    assert len(fc.load(tmp_path / "elsewhere").metrics) == 3
    assert fc.report(tmp_path / "elsewhere", tmp_path / "report.html").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_results_are_refused(kind, tmp_path, secret):
    kind(tmp_path / "mnist.jsonl", secret)
    with pytest.raises(RunError, match=r"mnist\.jsonl cannot be read: it is"):
        store.load(tmp_path)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def sweep(folder):
    """Go on with the run as a sweep does."""
    return list(fc.sweep([tiny(rounds=3, keep_rounds=[1], name="run")], folder.parent))


@pytest.mark.parametrize("go_on", [fc.resume, sweep])
@pytest.mark.parametrize("kind", KINDS)
def test_irregular_lock_is_refused(go_on, kind, folder, secret):
    kind(folder / locks.LOCK_NAME, secret)
    with pytest.raises(RunError, match=r"cannot write .*\.lock: it is"):
        go_on(folder)
    assert not read_run_view(folder).running


@pytest.mark.parametrize("inner", ["checkpoints", "kept"])
def test_linked_inner_folder_is_left_unchanged(inner, folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / inner, elsewhere)
    (elsewhere / ".mine.json.1").write_text("mine")
    before = sorted(elsewhere.iterdir())
    link(folder / inner, elsewhere)
    with pytest.raises(RunError, match=f"{inner} is a symbolic link, which is not followed"):
        fc.resume(folder)
    assert sorted(elsewhere.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["summary.json", "certificate.json", "manifest.json", "metrics.jsonl"]
)
def test_atomic_write_does_not_follow_a_link(name, folder, secret):
    link(folder / f".{name}.{os.getpid()}", secret)
    disk.write_atomically(folder / name, b"{}")
    assert (folder / name).read_bytes() == b"{}"


def test_linked_summary_is_not_written(folder, secret):
    link(folder / "summary.json", secret)
    with pytest.raises(RunError, match=r"cannot write .*summary\.json: it is a symbolic link"):
        fc.resume(folder)


@pytest.mark.parametrize(
    "words", [("history", "--csv", "-o", "out"), ("history", "--json", "-o", "out")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_irregular_output_file_is_left_unchanged(words, kind, folder, secret, fedcover, tmp_path):
    kind(tmp_path / "out", secret)
    refused(fedcover(*words, folder), 1, "cannot write out: it is")
    assert not (tmp_path / "out").is_file() or (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("kind", KINDS)
def test_report_refuses_an_irregular_page(kind, folder, secret, fedcover, tmp_path):
    kind(tmp_path / "report.html", secret)
    refused(fedcover("report", folder), 1, "cannot write report.html: it is")


def test_failed_page_leaves_the_old_one(folder, tmp_path, monkeypatch):
    page = fc.report(folder, tmp_path / "report.html")
    before = page.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        fc.report(folder, page, title="another")
    assert page.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report.html"}


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_export_does_not_follow_a_link(format, folder, secret, tmp_path):
    link(tmp_path / "model", secret)
    with pytest.raises(RunError, match="is a symbolic link, which is not followed"):
        export(fc.load(folder), 0.5, tmp_path / "model", format)


def test_event_log_does_not_follow_a_link(folder, secret):
    pytest.importorskip("flwr")
    from fedcover.flower.events import EventLog

    link(folder / "events.jsonl", secret)
    with pytest.raises(RunError, match=r"events\.jsonl cannot be read: it is a symbolic link"):
        EventLog(folder / "events.jsonl").write(0, "answered", 1, 1)


def test_append_refuses_irregular_files(tmp_path, secret):
    for kind in KINDS:
        kind(tmp_path / "lines", secret)
        with pytest.raises(OSError, match=r"it is|No such device"):
            disk.append(tmp_path / "lines", json.dumps({}).encode())
