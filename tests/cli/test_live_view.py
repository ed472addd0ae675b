"""A run watched from outside: whatever is in its folder is shown, and half-written lines
are none.
"""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.cli.live_view import EVENTS, RunView, read_run_view, render, sparkline
from fedcover.runs.metrics_log import read_lines
from tests.helpers.command_line import refused
from tests.helpers.runs import tiny

ROUNDS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished in-process run."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    fc.run(tiny(rounds=ROUNDS, drop_out=0.3, name="mine"), folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of its files to which anything may be done."""
    for name in ("experiment.toml", "metrics.jsonl", "summary.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    return tmp_path


@pytest.fixture
def watch(fedcover):
    def call(*args):
        code, out, err = fedcover("watch", *args)
        assert (code, err) == (0, "")
        return out

    return call


def event(round, kind, client, why="", node=1):
    return {"round": round, "time": 0.0, "event": kind, "node": node, "client": client, "why": why}


def write(folder, events, tail=b""):
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in events)
    (folder / "events.jsonl").write_bytes(lines + tail)


def test_watch_shows_a_run_in_process(folder, watch):
    out = watch(folder, "--once")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert out.startswith(f"mine   round {ROUNDS} of {ROUNDS}   finished\n")
    assert f"accuracy {lines[-1]['accuracy']:.4g}   coverage {lines[-1]['gamma_round']}" in out
    table_rows = [row for row in out.splitlines() if row.startswith("│")]
    assert len(table_rows) == ROUNDS
    for row, line in zip(table_rows, lines, strict=True):
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells[0] == str(line["round"] + 1)
        assert cells[5:-1] == [str(len(line["clients"])), str(len(line["dropped"]))]
    assert not re.search(
        "rejected|late|lost", out
    )  # a column for what never was would take the others' room
    assert watch(folder) == out  # a pipe gets one picture, too


def test_watch_lists_rejected_clients_with_reasons(folder, watch):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    line_with_dropouts = next(line for line in lines if len(line["dropped"]) >= 2)
    first, second = line_with_dropouts["dropped"][:2]
    events = [
        event(line_with_dropouts["round"], "answered", int(client))
        for client in line_with_dropouts["clients"]
    ]
    events += [
        event(line_with_dropouts["round"], "rejected", first, "not finite: params/w"),
        event(line_with_dropouts["round"], "late", second),
    ]
    write(folder, events)
    out = watch(folder, "--once")
    assert re.search(
        rf"{line_with_dropouts['round'] + 1} │ rejected │ {first} .*│ not finite: params/w", out
    )
    assert re.search(r"answered ┃ rejected ┃ late ┃ silent", out)
    output = json.loads(watch(folder, "--json"))
    row = output["history"][line_with_dropouts["round"]]
    assert [row[kind] for kind in (*EVENTS, "silent")] == [
        len(line_with_dropouts["clients"]), 1, 1, 0, len(line_with_dropouts["dropped"]) - 2,
    ]  # fmt: skip
    assert output["trouble"] == events[-2:]
    assert output["events"] == {
        "answered": len(line_with_dropouts["clients"]),
        "rejected": 1,
        "late": 1,
    }
    assert (output["round"], output["rounds"], output["finished"]) == (ROUNDS, ROUNDS, True)


def test_watch_shows_a_round_in_progress(folder, watch):
    (folder / "summary.json").unlink()
    text = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(text[0] + text[1][:-7])
    write(
        folder,
        [event(1, "answered", 3), event(1, "answered", 4), event(1, "lost", 5, "no heartbeat")],
    )
    with (folder / ".lock").open("w") as lock:  # as a process at work holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = watch(folder, "--once")
    assert out.startswith(f"mine   round 1 of {ROUNDS}\n")
    assert "round 2 so far: 2 answered, 1 lost" in out


def test_watch_before_the_first_round(folder, watch):
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink()
    output = " ".join(watch(folder, "--once").split())
    assert output == f"mine round 0 of {ROUNDS} stopped; resume with 'fedcover resume {folder}'"
    assert json.loads(watch(folder, "--json"))["accuracy"] is None


def test_client_asked_again_counts_once(folder):
    # a round that was interrupted and run again
    write(
        folder,
        [
            event(0, "lost", 1),
            event(0, "late", 2),
            event(0, "answered", 1, node=2),
            event(0, "late", 2),
        ],
    )
    view = read_run_view(folder)
    assert {kind: len(result) for kind, result in view.clients(0).items()} == {
        "answered": 1, "rejected": 0, "late": 1, "lost": 0,
    }  # fmt: skip
    assert view.summary()["events"] == {"answered": 1, "late": 1}
    assert view.failures == [event(0, "late", 2)]


def test_rejected_node_is_not_counted_as_client(folder, watch):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    line_with_dropouts = next(line for line in lines if line["dropped"])
    refused = event(
        line_with_dropouts["round"], "rejected", None, "capacity must be in (0, 1]", node=9
    )
    write(
        folder,
        [
            *(
                event(line_with_dropouts["round"], "answered", int(client))
                for client in line_with_dropouts["clients"]
            ),
            refused,
        ],
    )
    output = json.loads(watch(folder, "--json"))
    row = output["history"][line_with_dropouts["round"]]
    assert (row["rejected"], row["silent"]) == (0, len(line_with_dropouts["dropped"]))
    assert output["events"] == {"answered": len(line_with_dropouts["clients"])}
    assert output["nodes"] == {"rejected": 1}
    assert output["trouble"] == [refused]
    assert "capacity must be in (0, 1]" in watch(folder, "--once")


def test_rejected_node_is_shown_beside_many_lost_clients(folder, watch):
    lost_events = [event(0, "lost", client, "no node holds this client") for client in range(50)]
    write(folder, [event(0, "rejected", None, "num-partitions must be 2", node=9), *lost_events])
    output = watch(folder, "--once")
    assert "rejected nodes" in output
    assert "rejected nodes: the last" not in output
    assert "num-partitions must be 2" in output
    assert "failed client tasks: the last 8 of 50" in output


class Counted(list):
    """A list that counts how often somebody goes through it."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("shown", [render, RunView.summary])
def test_events_are_read_as_often_for_any_number_of_rounds(folder, shown):
    view, times = read_run_view(folder), []
    for rounds in (4, 40):
        events = Counted(
            event(round, "answered", client) for round in range(rounds) for client in range(3)
        )
        shown(
            replace(
                view,
                lines=[{**view.lines[0], "round": round} for round in range(rounds)],
                events=events,
            )
        )
        times.append(events.times)
    assert times[0] == times[1] <= 4


def test_watch_escapes_terminal_codes(folder, watch):
    write(folder, [event(0, "rejected", 1, "\x1b[2J\r\n[red]x[/red]" + "y" * 500, node="\x07")])
    out = watch(folder, "--once")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[red]x[/red]" in out
    assert "y" * 200 not in out


half = st.binary(max_size=60) | st.sampled_from(
    [b'{"round": 1, "eve', b"[1]\n", b"null\n", b"{}\n", b'{"round":"x"}\n']
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(half, half)
def test_damaged_event_lines_are_ignored(folder, tail, more):
    good = event(0, "rejected", 1, "why")
    write(folder, [good], b"\n" + tail)
    original = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(original + more)
    view = read_run_view(folder)
    assert len(view.lines) >= ROUNDS
    assert view.events[0] == good
    view.summary()
    (folder / "metrics.jsonl").write_bytes(original)


@pytest.mark.parametrize(
    "damage",
    [
        '"accuracy": "high"',
        '"accuracy": NaN',
        '"clients": 3',
        '"seconds": {"policy": "long"}',
        '"dropped": 1',
    ],
)
def test_metrics_of_wrong_type_are_ignored(folder, watch, damage):
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + f'{{"round": {ROUNDS - 1}, {damage}}}\n')
    assert f"round {ROUNDS} of" in watch(folder, "--once")


def test_rounds_beyond_the_run_are_not_shown(folder, watch):
    metrics = folder / "metrics.jsonl"
    first = read_lines(metrics)[0]
    foreign = [
        {**first, "round": round} for round in (ROUNDS, -1, True, 0)
    ]  # and one that is told of again
    before = watch(folder, "--once")
    metrics.write_text(metrics.read_text() + "".join(json.dumps(line) + "\n" for line in foreign))
    assert watch(folder, "--once") == before


def test_folder_in_place_of_metrics_is_refused(folder, fedcover):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    refused(fedcover("watch", folder, "--once"), 1, "metrics.jsonl is a folder")


def test_watch_refuses_a_folder_without_a_run(fedcover, tmp_path):
    refused(fedcover("watch", tmp_path / "nosuch", "--once"), 1, "is not a run folder")
    refused(
        fedcover("watch", tmp_path, "--every", "0"), 2, "every must be in 0.1..3600 seconds; got 0"
    )


def test_sparkline_of_a_flat_curve():
    assert sparkline([0.5, 0.5]) == "▁▁"


def on_a_terminal(*args):
    """A process whose output is a terminal, and a thread that collects what it shows."""
    terminal_end, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcover", "watch", *args], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    chunks, something = [], threading.Event()

    def collect():
        while True:
            try:
                chunks.append(os.read(terminal_end, 65536))
            except OSError:  # the terminal is gone
                return os.close(terminal_end)
            if b"round" in chunks[-1]:
                something.set()

    thread = threading.Thread(target=collect)
    thread.start()
    return process, thread, chunks, something


def test_watch_on_a_terminal_ends_quietly_on_ctrl_c(folder):
    (folder / "summary.json").unlink()
    process, thread, chunks, something = on_a_terminal(str(folder), "--every", "0.1")
    try:
        assert something.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        thread.join(60)
    assert b"Traceback" not in b"".join(chunks)


def test_watch_on_a_terminal_follows_the_run_to_its_end(folder):
    """The picture changes when a round is added, and the command ends with the run."""
    summary = (folder / "summary.json").read_bytes()
    text = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b"".join(text[:1]))
    process, thread, chunks, something = on_a_terminal(str(folder), "--every", "0.1")
    try:
        assert something.wait(60)
        (folder / "metrics.jsonl").write_bytes(b"".join(text))
        (folder / "summary.json").write_bytes(summary)
        assert process.wait(60) == 0
    finally:
        process.kill()
        thread.join(60)
    assert f"round {ROUNDS} of {ROUNDS}".encode() in b"".join(chunks)


def test_watch_tells_that_a_run_is_running(tmp_path):
    screens = []
    fc.run(
        tiny(rounds=3, name="mine"),
        tmp_path / "mine",
        watch=lambda report: screens.append(read_run_view(tmp_path / "mine")),
    )
    assert [(len(each.lines), each.finished) for each in screens] == [
        (1, False),
        (2, False),
        (3, False),
    ]
    assert all(each.running for each in screens)
    assert read_run_view(tmp_path / "mine").finished
    assert not read_run_view(tmp_path / "mine").running


def test_watch_tells_that_a_run_was_stopped(tmp_path, watch):
    def stop(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(rounds=3, name="mine"), tmp_path / "mine", watch=stop)
    output = " ".join(watch(tmp_path / "mine", "--once").split())
    assert output.startswith(
        f"mine round 1 of 3 stopped; resume with 'fedcover resume {tmp_path / 'mine'}'"
    )
    assert not json.loads(watch(tmp_path / "mine", "--json"))["running"]
