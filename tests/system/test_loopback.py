"""Server and client in one process, without Flower's transport: the same bits as one program."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedcover as fc
from fedcover.cli.live_view import read_run_view
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import server
from fedcover.flower.app_template import RunConfig
from fedcover.flower.events import EventLog
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.server import experiment_to_resume, serve
from fedcover.flower.status import StatusFile
from fedcover.runs.metrics_log import read_lines
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.training.engines.sequential import sequential
from tests.system.compromised import EACH, WHY, arrays_of, attack
from tests.system.harness import WORLDS, checkpoints, experiment, reference, same_but_private
from tests.system.loopback import SMALL, training

pytestmark = pytest.mark.usefixtures("inside_a_task")

MORE = {
    "per-width statistics": {
        "norm": "per-width",
        "policy": "prefix",
        "model": "wide_resnet(depth=10, widen=1)",
        "clients": 4,
        "active": 4,
        "dataset": SMALL,
        "calibration": 40,
    },
    "bits of labels": {"partition": "labels(limit=2)", "label_rows": True, "policy": "rolling"},
    "stages": {
        "model": ("depth_resnet(width=4, stages=2, blocks=1)"),
        "recipe": "depthfl",
        "policy": "prefix",
        "clients": 4,
        "active": 4,
        "dataset": SMALL,
        "calibration": 40,
    },
    "scores": {"recipe": "fedmask", "policy": "random"},
    "planned": {"policy": "planned"},
    "regions": {"policy": 'regions(codename="1122")', "active": 4, "fleet": None},
    "clients that sit out": {"policy": "exclude"},
    "a limited length": {"policy": "rolling", "clip_updates": 0.1},
}


@pytest.mark.parametrize("world", [*WORLDS, *MORE])
def test_loopback_equals_one_process_bit_for_bit(tmp_path, world):
    fields = {**WORLDS, **MORE}[world]
    settings = (
        experiment(**fields)
        if "fleet" not in fields or fields["fleet"]
        else fc.Experiment(
            **{
                **{"clients": 8, "rounds": 3, "epochs": 1},
                **{k: v for k, v in fields.items() if v is not None},
            }
        )
    )
    fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run").engine(),
    )
    expected = reference(settings, tmp_path / "here")
    if world == "private masks":
        same_but_private(tmp_path / "run", tmp_path / "here")
    else:
        assert checkpoints(tmp_path / "run") == expected


def test_wrong_answers_are_rejected_with_reasons(tmp_path):
    """Those that need no transport; the others are in test_hostile."""
    kinds = ["honest", *EACH[:-1]]
    settings = experiment(policy="rolling", clients=4, active=4, rounds=len(kinds))
    before = {}

    def spoil(node, message, reply):
        from fedcover.flower.messages import read_request, read_results, result_message

        if node != 8:
            return reply
        kind, answers = kinds[read_request(message).round], read_results(reply)
        replies = [
            attack(kind, answer, before.setdefault(answer.client, answer)) for answer in answers
        ]
        return result_message(message, replies)

    run = fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run", spoil).engine(),
    )
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    for round, kind in enumerate(kinds[1:], 1):
        recorded_events = {
            line["why"] for line in events if line["round"] == round and line["event"] == "rejected"
        }
        assert any(WHY[kind] in why for why in recorded_events), (kind, recorded_events)
        assert run.metrics[round]["rejected"] >= 2
        assert sorted(run.metrics[round]["dropped"]) == [2, 3]

    def only_honest(task, state, work, lr):
        return sequential(
            task, state, [(c, r) for c, r in work if c.id < 2 or state.round == 0], lr
        )

    assert checkpoints(tmp_path / "run") == reference(settings, tmp_path / "here", only_honest)


def test_flood_of_answers_is_one_event(tmp_path):
    settings = experiment(policy="prefix", clients=4, active=4, rounds=1)

    def spoil(node, message, reply):
        from fedcover.flower.messages import read_results, result_message

        answers = read_results(reply)
        flood = [replace(answers[0], client=1000 + n, error="x", payload=b"") for n in range(2000)]
        return result_message(message, [*answers, *flood]) if node == 8 else reply

    run = fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run", spoil).engine(),
    )
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert sum('"came"' not in event for event in events) == 5
    assert any(
        "2000 answers for clients that this node was not asked for" in line for line in events
    )
    assert (run.metrics[0]["rejected"], run.metrics[0]["dropped"]) == (
        0,
        [],
    )  # every client answered


def with_bits(answer):
    """An answer in which a client says that it trained nothing of its first tensor."""
    arrays = arrays_of(answer.payload)
    name = next(iter(arrays))
    chosen = np.zeros(-(-arrays[name].size // 8), np.uint8)
    return replace(
        answer, payload=pack_arrays({**arrays, name.replace("params/", "bits/"): chosen})
    )


def test_private_run_rejects_bits(tmp_path):
    """Where a client's choice would show its data, no client has a choice."""
    pytest.importorskip("cryptography")
    settings = experiment(
        clients=4, active=4, rounds=2, privacy="gaussian(noise=1.0)", clip_updates=1.0
    )

    def spoil(node, message, reply):
        from fedcover.flower.messages import read_results, result_message

        return (
            result_message(message, [with_bits(answer) for answer in read_results(reply)])
            if node == 8
            else reply
        )

    run = fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run", spoil).engine(),
    )
    assert [(line["rejected"], sorted(line["dropped"])) for line in run.metrics] == [
        (2, [2, 3])
    ] * 2
    assert (tmp_path / "run" / "events.jsonl").read_text().count("extra array") == 4


def test_events_before_the_folder_are_written_with_the_first_line(tmp_path):
    pending_lines = []
    EventLog(None, pending_lines).write(0, "rejected", 7, None, "capacity must be in (0, 1]")
    events = EventLog(tmp_path / "events.jsonl", pending_lines)
    events.write(0, "answered", 8, 1)
    events.write(0, "answered", 8, 2)
    recorded_events = [
        (e["event"], e["node"], e["client"]) for e in read_lines(tmp_path / "events.jsonl")
    ]
    assert recorded_events == [("rejected", 7, None), ("answered", 8, 1), ("answered", 8, 2)]


def test_events_after_a_torn_line_begin_on_their_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"round": 0, "event": "answe')
    EventLog(path).write(1, "answered", 7, 3)
    EventLog(path).write(1, "answered", 7, 4)
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"round": 0, "event": "answe'
    assert [json.loads(line)["client"] for line in whole] == [3, 4]


def test_resumed_run_cannot_be_changed(tmp_path):
    settings = experiment(policy="prefix", rounds=2, name="mine")
    with pytest.raises(RunError, match="run is not a run folder"):
        experiment_to_resume(tmp_path / "run", settings)
    fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run").engine(),
    )
    assert (
        experiment_to_resume(
            tmp_path / "run", experiment(policy="prefix", rounds=2, fleet="1x0.25")
        )
        == settings
    )  # nodes declare it
    with pytest.raises(
        InvalidValue, match=r"cannot be changed: rounds = 9 \(was 2\), lr = 5\.0 \(was 0\."
    ):
        experiment_to_resume(tmp_path / "run", experiment(policy="prefix", rounds=9, lr=5.0))
    again = RunConfig(settings.to_toml(), str(tmp_path / "run"))
    with pytest.raises(RunError, match=r"already holds a run: resume it \(--resume\)"):
        serve(None, again, StatusFile(tmp_path / "run"))


def test_failed_node_is_recorded_and_left_out(tmp_path):
    settings = experiment(policy="prefix", rounds=2, active=8)

    def spoil(node, message, reply):
        return FailedReply("late", "no answer in 60 s") if node == 8 else reply

    run = fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run", spoil).engine(),
    )
    assert [(line["late"], sorted(line["dropped"])) for line in run.metrics] == [
        (4, [4, 5, 6, 7])
    ] * 2


def test_run_that_waits_for_nodes_counts_as_running(tmp_path, monkeypatch):
    """Whoever watches its folder meanwhile sees that somebody is at work there."""
    settings = experiment(policy="prefix", rounds=2, name="mine")
    run = fc.run(
        settings,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(settings, tmp_path / "run").engine(),
    )
    assert not read_run_view(tmp_path / "run").running
    calls = []

    def waiting(*node_config, **named):
        calls.append(read_run_view(tmp_path / "run").running)
        raise RunError("nobody came")

    monkeypatch.setattr(server, "wait_for_nodes", waiting)
    again = RunConfig(settings.to_toml(), str(tmp_path / "run"), resume=True)
    assert (
        serve(None, again, StatusFile(tmp_path / "run")).metrics == run.metrics
    )  # it is finished, so it needs no nodes
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunError, match="nobody came"):
        serve(None, again, StatusFile(tmp_path / "run"))
    assert calls == [True]
