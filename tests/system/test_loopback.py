"""Both sides in one process, messages and all, only without Flower's transport: many worlds, bit for bit."""

import io
import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console

import fedcover as fc
from fedcover.cli.live_view import read_run_view, render
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import server
from fedcover.flower.app_template import RunConfig
from fedcover.flower.client import experiment_app
from fedcover.flower.engine import NodeTraining, RoundOptions
from fedcover.flower.events import EventLog
from fedcover.flower.node_data import data_requirements
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import DataRequirements
from fedcover.flower.payloads import pack_arrays, unpack_arrays
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.server import experiment_to_resume, has_open_fleet, required_capacities, serve
from fedcover.flower.transport import _parse_node_info
from fedcover.runs.metrics_log import read_lines
from fedcover.runs.setup import build_source, prepare
from fedcover.theory.certificate.measure import _check_same_cohort
from fedcover.training.engines.sequential import sequential
from tests.helpers.own_rows import written
from tests.system.compromised import EACH, WHY, _file, attack
from tests.system.harness import WORLDS, checkpoints, experiment, reference, same_but_private

SMALL = "synthetic(shape=(3, 8, 8), classes=3, samples=12, test_size=50)"
MORE = {
    "per-width statistics": {"norm": "per-width", "policy": "prefix", "model": "wide_resnet(depth=10, widen=1)",
                             "clients": 4, "active": 4, "dataset": SMALL, "calibration": 40},
    "bits of labels": {"partition": "labels(limit=2)", "label_rows": True, "policy": "rolling"},
    "stages": {"model": "depth_resnet(width=4, stages=2, blocks=1)", "recipe": "depthfl", "policy": "prefix",
               "clients": 4, "active": 4, "dataset": SMALL, "calibration": 40},
    "scores": {"recipe": "fedmask", "policy": "random"},
    "planned": {"policy": "planned"},
    "regions": {"policy": 'regions(codename="1122")', "active": 4, "fleet": None},
    "clients that sit out": {"policy": "exclude"},
    "a limited length": {"policy": "rolling", "clip_updates": 0.1},
}  # fmt: skip


@dataclass
class Loopback:
    """Nodes in this process: the same client app, called directly."""

    nodes: dict[int, dict]
    spoil: object = None
    states: dict[int, RecordDict] = field(default_factory=dict)

    def connected_nodes(self):
        return set(self.nodes)

    def _call(self, node, message):
        message.metadata.__dict__["_message_id"] = f"{node}"
        state = self.states.setdefault(node, RecordDict())
        return experiment_app()(message, Context(1, node, self.nodes[node], state, {}))

    def query_node_info(self, nodes, *, timeout, client_info):
        from flwr.app import ConfigRecord, Message

        hello = RecordDict({"hello": ConfigRecord()})
        return {
            n: _parse_node_info(
                n, self._call(n, Message(hello, dst_node_id=n, message_type="query"))
            )
            for n in nodes
        }

    def notify_rejected(self, node, why):
        from flwr.app import ConfigRecord, Message

        told = RecordDict({"refused": ConfigRecord({"why": why})})
        self._call(node, Message(told, dst_node_id=node, message_type="query"))

    def send_and_wait(self, messages, *, timeout, max_bytes):
        found = {}
        for node, message in messages.items():
            reply = self._call(node, message)
            size = sum(len(array.data) for array in reply.content.array_records["answers"].values())
            assert size <= max_bytes[node]
            found[node] = self.spoil(node, message, reply) if self.spoil else reply
        return found


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def training(wanted: fc.Experiment, folder, spoil=None) -> NodeTraining:
    nodes = {7 + place: {"partition-id": place, "num-partitions": 2} for place in range(2)}
    events = EventLog(folder / "events.jsonl")
    options = RoundOptions(wanted.to_toml(), wanted.clients, 60.0, private=wanted.privacy != "none")
    return NodeTraining(Loopback(nodes, spoil), NodeRegistry(), options, events)


@pytest.mark.parametrize("world", [*WORLDS, *MORE])
def test_two_sides_make_the_same_bits(tmp_path, world):
    fields = {**WORLDS, **MORE}[world]
    wanted = experiment(**fields) if "fleet" not in fields or fields["fleet"] else fc.Experiment(
        **{**{"clients": 8, "rounds": 3, "epochs": 1}, **{k: v for k, v in fields.items() if v is not None}}
    )  # fmt: skip
    fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run").engine(),
    )
    expected = reference(wanted, tmp_path / "here")
    if world == "private masks":
        same_but_private(tmp_path / "run", tmp_path / "here")
    else:
        assert checkpoints(tmp_path / "run") == expected


def on_nodes(nodes, wanted, folder):
    """The training of an experiment whose rows are on these nodes."""
    options, node_registry = (
        RoundOptions(wanted.to_toml(), wanted.clients, 60.0),
        NodeRegistry(num_partitions=2, requirements=DataRequirements(5, 10, (1, 8, 8))),
    )
    return NodeTraining(Loopback(nodes), node_registry, options, EventLog(folder / "events.jsonl"))


def test_rows_that_stay_on_nodes_make_the_same_bits(tmp_path):
    """The server has none of the clients' rows; a node that comes late trains from then on, and counts."""
    files = written(tmp_path)
    wanted = files.experiment(label_rows=True)
    nodes = {
        7 + place: {"partition-id": place, "num-partitions": 2, "rows": str(path)}
        for place, path in enumerate(files.nodes)
    }
    machine = fc.Machine("flower", "cpu")
    there = fc.run(
        wanted,
        tmp_path / "run",
        machine=machine,
        engine=on_nodes(nodes, wanted, tmp_path / "run").engine(),
    )
    here = fc.run(files.in_one_process(wanted), machine=fc.Machine("sequential", "cpu"))
    assert there.state.params.keys() == here.state.params.keys()
    assert all(tensor.equal(here.state.params[name]) for name, tensor in there.state.params.items())
    assert there.metrics[-1]["accuracy_local"] == here.metrics[-1]["accuracy_local"]

    late = on_nodes({7: nodes[7]}, wanted, tmp_path / "late")
    weighed = []

    def watch(report):
        late.transport.nodes.update(nodes)
        weighed.append(
            {client: info.samples for client, info in late.node_registry.client_info.items()}
        )

    lines = fc.run(
        wanted, tmp_path / "late", machine=machine, engine=late.engine(), watch=watch
    ).metrics
    assert [line["lost"] for line in lines] == [2, 0, 0]
    assert list(weighed[0]) == [0, 1, 2]
    assert weighed[1] == {client: here.setup.task.source.count(client) for client in range(5)}


def test_a_client_counts_as_its_node_says_from_the_round_on_in_which_it_comes(tmp_path):
    """A cohort is chosen before its nodes are met, when nothing is known of their rows."""
    files = written(tmp_path)
    wanted = files.experiment(rounds=1, policy="full", fleet="1x1.0")
    node = {"partition-id": 1, "num-partitions": 2, "rows": str(files.nodes[1])}
    made = on_nodes({8: node}, wanted, tmp_path / "run")
    updates = []

    def watched(task, state, work, lr):
        updates.extend(made(task, state, work, lr))
        return updates

    engine = replace(made.engine(), train=watched)
    fc.run(wanted, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=engine)
    assert [update.client.id for update in updates] == [3, 4]
    assert [update.client.samples for update in updates] == [
        made.node_registry.client_info[client].samples for client in (3, 4)
    ]
    assert all(update.client.samples > 0 for update in updates)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (None, "each needs its own, --node-config"),
        ("none.npz", "rows must be a file that exists"),
        (
            "node-1.npz",
            "partition 0 of 2: rows must be of 3 owners, as many as this node has of the 5 clients",
        ),
    ],
)
def test_a_node_without_the_rows_it_needs_is_told_what_is_wrong(tmp_path, rows, why):
    wanted = written(tmp_path).experiment(rounds=1)
    given = {"rows": str(tmp_path / rows)} if rows else {}
    made = on_nodes(
        {7: {"partition-id": 0, "num-partitions": 2, **given}}, wanted, tmp_path / "run"
    )
    fc.run(wanted, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=made.engine())
    assert [
        why in line["why"] for line in read_lines(made.event_log.path) if line["client"] is None
    ] == [True]


def scaled_nodes(tmp_path, factors, **config):
    """Nodes whose rows are each multiplied by a number, and what the server wants rows to be like."""
    files = written(tmp_path)
    nodes = {}
    for place, (path, factor) in enumerate(zip(files.nodes, factors, strict=True)):
        arrays = dict(np.load(path))
        np.savez(path, **{**arrays, "train_x": arrays["train_x"] * np.float32(factor)})
        nodes[7 + place] = {"partition-id": place, "num-partitions": 2, "rows": str(path), **config}
    wanted = files.experiment(rounds=1)
    made = on_nodes(nodes, wanted, tmp_path / "run")
    made.node_registry.requirements = data_requirements(
        build_source(wanted, "cpu", None), wanted.clients
    )
    return wanted, made


def test_a_node_whose_inputs_are_scaled_differently_is_warned_of_and_taken(tmp_path, caplog):
    wanted, made = scaled_nodes(tmp_path, (1, 255))
    (line,) = fc.run(
        wanted, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=made.engine()
    ).metrics
    assert len(line["clients"]) == 5  # never refused for it
    (told,) = [e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "warned"]
    assert (told["node"], told["client"]) == (8, None)
    why = "partition 1 of 2: its inputs seem to be scaled differently: about -200 to 500, mean 0, spread 300; "
    assert told["why"].startswith(why + "the server's are about -0.8 to 2, mean 0, spread 1.")
    assert "node 8) warned" in caplog.text
    seen = read_run_view(tmp_path / "run")
    assert [event["node"] for event in seen.warnings] == [8]
    assert not seen.failures
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(render(seen))
    assert "the last of 1 warnings" in shown.export_text()


def test_a_node_need_not_tell_how_its_inputs_are_scaled(tmp_path):
    wanted, made = scaled_nodes(tmp_path, (255, 255), **{"tell-scale": False})
    fc.run(wanted, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=made.engine())
    assert {e["event"] for e in read_lines(tmp_path / "run" / "events.jsonl")} == {
        "came",
        "answered",
    }
    assert all(known.scale is None for known in made.node_registry.node_info.values())
    wanted, made = scaled_nodes(tmp_path, (1, 1), **{"tell-scale": "no"})
    fc.run(wanted, tmp_path / "other", machine=fc.Machine("flower", "cpu"), engine=made.engine())
    (first, *_) = [
        e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "rejected"
    ]
    assert "tell-scale in --node-config must be true or false; got 'no'" in first["why"]


def test_wrong_answers_are_rejected_by_name(tmp_path):
    """Those that need no transport; the others are in test_hostile."""
    kinds = ["honest", *EACH[:-1]]
    wanted = experiment(policy="rolling", clients=4, active=4, rounds=len(kinds))
    before = {}

    def spoil(node, message, reply):
        from fedcover.flower.messages import read_request, read_results, result_message

        if node != 8:
            return reply
        kind, answers = kinds[read_request(message).round], read_results(reply)
        sent = [
            attack(kind, answer, before.setdefault(answer.client, answer)) for answer in answers
        ]
        return result_message(message, sent)

    run = fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run", spoil).engine(),
    )
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    for round, kind in enumerate(kinds[1:], 1):
        told = {
            line["why"] for line in events if line["round"] == round and line["event"] == "rejected"
        }
        assert any(WHY[kind] in why for why in told), (kind, told)
        assert run.metrics[round]["rejected"] >= 2
        assert sorted(run.metrics[round]["dropped"]) == [2, 3]

    def only_honest(task, state, work, lr):
        return sequential(
            task, state, [(c, r) for c, r in work if c.id < 2 or state.round == 0], lr
        )

    assert checkpoints(tmp_path / "run") == reference(wanted, tmp_path / "here", only_honest)


def test_a_flood_of_answers_is_told_of_once(tmp_path):
    wanted = experiment(policy="prefix", clients=4, active=4, rounds=1)

    def spoil(node, message, reply):
        from fedcover.flower.messages import read_results, result_message

        answers = read_results(reply)
        flood = [replace(answers[0], client=1000 + n, error="x", payload=b"") for n in range(2000)]
        return result_message(message, [*answers, *flood]) if node == 8 else reply

    run = fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run", spoil).engine(),
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
    arrays = {name: np.load(_file(raw.data)) for name, raw in unpack_arrays(answer.payload).items()}
    name = next(iter(arrays))
    chosen = np.zeros(-(-arrays[name].size // 8), np.uint8)
    return replace(
        answer, payload=pack_arrays({**arrays, name.replace("params/", "bits/"): chosen})
    )


def test_bits_cannot_stop_a_private_run(tmp_path):
    """Where a client's choice would show its data, no client has a choice."""
    pytest.importorskip("cryptography")
    wanted = experiment(
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
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run", spoil).engine(),
    )
    assert [(line["rejected"], sorted(line["dropped"])) for line in run.metrics] == [
        (2, [2, 3])
    ] * 2
    assert (tmp_path / "run" / "events.jsonl").read_text().count("extra array") == 4


def test_what_happens_before_there_is_a_folder_is_written_with_the_first_line_after(tmp_path):
    pending_lines = []
    EventLog(None, pending_lines).write(0, "rejected", 7, None, "capacity must be in (0, 1]")
    events = EventLog(tmp_path / "events.jsonl", pending_lines)
    events.write(0, "answered", 8, 1)
    events.write(0, "answered", 8, 2)
    told = [(e["event"], e["node"], e["client"]) for e in read_lines(tmp_path / "events.jsonl")]
    assert told == [("rejected", 7, None), ("answered", 8, 1), ("answered", 8, 2)]


def test_events_after_a_full_disk_begin_on_a_line_of_their_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"round": 0, "event": "answe')
    EventLog(path).write(1, "answered", 7, 3)
    EventLog(path).write(1, "answered", 7, 4)
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"round": 0, "event": "answe'
    assert [json.loads(line)["client"] for line in whole] == [3, 4]


def test_a_run_that_is_gone_on_with_is_not_changed(tmp_path):
    wanted = experiment(policy="prefix", rounds=2, name="mine")
    with pytest.raises(RunError, match="run is no run folder"):
        experiment_to_resume(tmp_path / "run", wanted)
    fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run").engine(),
    )
    assert (
        experiment_to_resume(
            tmp_path / "run", experiment(policy="prefix", rounds=2, fleet="1x0.25")
        )
        == wanted
    )  # nodes declare it
    with pytest.raises(
        InvalidValue, match=r"cannot be changed: rounds = 9 \(was 2\), lr = 5\.0 \(was 0\."
    ):
        experiment_to_resume(tmp_path / "run", experiment(policy="prefix", rounds=9, lr=5.0))
    again = RunConfig(wanted.to_toml(), str(tmp_path / "run"))
    with pytest.raises(RunError, match=r"already holds a run: resume it \(--resume\)"):
        serve(None, again)


def in_open_fleet(wanted, folder, nodes, changes):
    """A run on nodes some of which come, leave, or come back with another capacity after rounds."""
    made = training(wanted, folder)
    made.transport.nodes = dict(nodes)
    made.options = replace(made.options, open_fleet=True)

    def watch(report):
        for node, config in changes.get(report.round, {}).items():
            made.transport.nodes.pop(node, None)
            if config:
                made.transport.nodes[node] = config

    return fc.run(
        wanted, folder, machine=fc.Machine("flower", "cpu"), engine=made.engine(), watch=watch
    )


def place(number, **config):
    return {"partition-id": number, "num-partitions": 2, **config}


@pytest.mark.parametrize(
    "own", [{}, {"norm": "per-width", "model": "wide_resnet(depth=10, widen=1)", "dataset": SMALL}]
)
def test_cohorts_are_drawn_among_the_nodes_that_are_there(tmp_path, own):
    wanted = experiment(
        **{**own, "policy": "prefix", "rounds": 6, "clients": 8, "active": 3, "fleet": "1x1.0"}
    )
    changes = {1: {8: place(1, capacity=0.25)}, 3: {7: None}, 4: {7: place(0)}}
    folder = tmp_path / "run"
    lines = in_open_fleet(wanted, folder, {7: place(0)}, changes).metrics
    assert all(
        len(line["clients"]) == 3 and line["lost"] == 0 for line in lines
    )  # nobody is asked who is not there
    assert all(int(client) < 4 for line in lines[:2] for client in line["clients"])
    assert all(int(client) >= 4 for client in lines[4]["clients"])
    told = {
        (int(client) >= 4, of["capacity"])
        for line in lines
        for client, of in line["clients"].items()
    }
    assert told == {(False, 1.0), (True, 0.25)}
    moved = [(e["round"], e["event"], e["node"], e["why"]) for e in read_lines(folder / "events.jsonl")
             if e["event"] in ("came", "left")]  # fmt: skip
    late = "partition 1 of 2, capacity 0.25"
    first = "partition 0 of 2"
    assert moved == [
        (0, "came", 7, first),
        (2, "came", 8, late),
        (4, "left", 7, first),
        (5, "came", 7, first),
    ]
    alone = fc.run(wanted, machine=fc.Machine("sequential", "cpu")).metrics
    assert set(lines[5]["clients"]) == set(
        alone[5]["clients"]
    )  # all are there: who is drawn is as ever
    with pytest.raises(RunError, match=r"round 1 cannot be replayed: nodes were missing"):
        _check_same_cohort(prepare(wanted, fc.Machine("sequential", "cpu")), lines[0], 0)


def test_a_whole_open_fleet_makes_the_same_bits(tmp_path):
    wanted = experiment(policy="rolling", rounds=3)
    in_open_fleet(wanted, tmp_path / "run", {7: place(0), 8: place(1)}, {})
    assert checkpoints(tmp_path / "run") == reference(wanted, tmp_path / "here")


def test_a_node_that_is_known_and_comes_back_with_less_is_asked_again(tmp_path):
    """Between two looks, so that nobody saw it leave: its refusal is what tells."""
    wanted = experiment(policy="homogeneous", rounds=3, clients=4, active=4, fleet="1x1.0")
    changes = {0: {8: place(1, capacity=0.5)}}
    lines = in_open_fleet(
        wanted, tmp_path / "run", {7: place(0), 8: place(1, capacity=1.0)}, changes
    ).metrics
    assert [line["rejected"] for line in lines] == [0, 2, 0]
    assert {of["capacity"] for of in lines[2]["clients"].values()} == {1.0, 0.5}


def test_a_fleet_is_closed_where_capacities_or_turns_are_counted_beforehand():
    assert has_open_fleet(fc.Experiment())
    assert not has_open_fleet(fc.Experiment(assignment="slot"))
    private = {
        "privacy": "gaussian(noise=4.0, delta=1e-5)",
        "clip_updates": 0.5,
        "norm": "group",
        "model": "mlp",
    }
    assert not has_open_fleet(fc.Experiment(**private))
    assert not has_open_fleet(fc.Experiment(policy='regions(codename="1122")', active=4))


def test_a_node_that_comes_late_and_holds_too_little_is_refused(tmp_path, caplog):
    wanted = experiment(policy="prefix", rounds=2, clients=4, active=4, fleet="1x1.0")
    found = training(wanted, tmp_path / "run")
    found.node_registry.capacities = required_capacities(wanted)
    found.transport.nodes[8]["capacity"] = 0.25
    run = fc.run(
        wanted, tmp_path / "run", machine=fc.Machine("flower", "cpu"), engine=found.engine()
    )
    assert [(line["lost"], sorted(line["dropped"])) for line in run.metrics] == [(2, [2, 3])] * 2
    (told,) = [e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "rejected"]
    assert "capacity must be at least 1, as the clients of partition 1" in told["why"]
    assert "the server does not accept this node: capacity must be at least 1" in caplog.text


def test_whoever_fails_is_told_of_and_left_out(tmp_path):
    wanted = experiment(policy="prefix", rounds=2, active=8)

    def spoil(node, message, reply):
        return FailedReply("late", "no answer in 60 s") if node == 8 else reply

    run = fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run", spoil).engine(),
    )
    assert [(line["late"], sorted(line["dropped"])) for line in run.metrics] == [
        (4, [4, 5, 6, 7])
    ] * 2


def test_a_run_that_waits_for_its_nodes_has_not_stopped(tmp_path, monkeypatch):
    """Whoever watches its folder meanwhile sees that somebody is at work there."""
    wanted = experiment(policy="prefix", rounds=2, name="mine")
    done = fc.run(
        wanted,
        tmp_path / "run",
        machine=fc.Machine("flower", "cpu"),
        engine=training(wanted, tmp_path / "run").engine(),
    )
    assert not read_run_view(tmp_path / "run").running
    seen = []

    def waiting(*given, **named):
        seen.append(read_run_view(tmp_path / "run").running)
        raise RunError("nobody came")

    monkeypatch.setattr(server, "wait_for_nodes", waiting)
    again = RunConfig(wanted.to_toml(), str(tmp_path / "run"), resume=True)
    assert serve(None, again).metrics == done.metrics  # it is finished, so it needs no nodes
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunError, match="nobody came"):
        serve(None, again)
    assert seen == [True]


@pytest.mark.parametrize(
    "policy", ["planned", "planned(tolerate=1)", "rolling", "magnitude", "random", "exclude"]
)
def test_policies_go_on_with_half_of_the_fleet(tmp_path, policy):
    wanted = experiment(
        policy=policy, rounds=3, clients=4, active=4, fleet="1x1.0 + 1x0.75 + 2x0.5"
    )
    changes = {0: {7: None}, 1: {7: place(0, capacity=0.25)}}
    lines = in_open_fleet(wanted, tmp_path / "run", {7: place(0), 8: place(1)}, changes).metrics
    few = (
        4 if "tolerate" in policy else 2
    )  # two cannot hold everything twice, so that round is of all four
    assert [len(line["clients"]) + len(line["dropped"]) for line in lines] == [4, few, 4]
    assert [line["lost"] for line in lines] == [0, few - 2, 0]
    assert [line["rejected"] for line in lines] == [0, 0, 2 if "tolerate" in policy else 0]
