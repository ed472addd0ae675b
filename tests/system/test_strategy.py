"""Our strategy and client app, without processes: what they refuse, and what they say."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.flower import CoverageStrategy, Sampling, client_app
from fedcover.flower.messages import (
    ClientResult,
    ClientTask,
    TaskRequest,
    read_request,
    read_results,
    request_message,
    result_message,
)
from fedcover.flower.nodes import NodeInfo
from fedcover.flower.payloads import (
    encode_reduction,
    gather_kept,
    prefix_names,
)
from fedcover.flower.reply_download import FailedReply, PartialReply, TooLarge, decode_reply
from fedcover.flower.transport import Transport
from fedcover.models.norms import calibrate
from fedcover.server.reply_format import PendingTask, pack_update
from fedcover.server.safetensors_codec import pack_arrays, unpack_arrays
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import windows
from fedcover.types import Client, Update


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch):
    """Messages know the task in which they are made."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def with_norms() -> fc.Model:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return fc.Model(module, fc.trace(module, torch.randn(3, 1, 4, 4)))


def test_norm_statistics_need_the_servers_calibration(tmp_path):
    strategy = CoverageStrategy(with_norms())
    with pytest.raises(InvalidValue, match=r"calibration=\.\.\."):
        strategy.ready(strategy.initial_arrays())
    inputs, built = torch.randn(50, 1, 4, 4), with_norms()
    strategy = CoverageStrategy(built, calibration=inputs)
    model = strategy.ready(strategy.initial_arrays())
    assert float(model[1].running_mean.abs().sum()) > 0
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    strategy = CoverageStrategy(built, calibration=tmp_path / "inputs.npy")
    assert strategy.ready(strategy.initial_arrays())[1].running_mean.equal(model[1].running_mean)


@pytest.mark.parametrize("content", [None, b"no array", pickle.dumps([1])])
def test_wrong_calibration_file_is_named(tmp_path, content):
    path = tmp_path / "inputs.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        InvalidValue, match=r"calibration must be an \.npy file of inputs; .*inputs\.npy"
    ):
        CoverageStrategy(with_norms(), calibration=path)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"capacity": "depth"}, "capacity must be one of width, parameters; got 'depth'"),
        ({"window": 0}, "window must be a whole number of at least 1; got 0"),
        ({"seed": "a"}, "seed must be a whole number of at least 0; got 'a'"),
        ({"weights": "votes"}, "weights must be one of"),
        ({"server": "sgd"}, "server must be one of"),
    ],
)
def test_strategy_refuses_wrong_values(wrong, reason):
    with pytest.raises(InvalidValue, match=reason):
        CoverageStrategy(with_norms(), calibration=torch.randn(9, 1, 4, 4), **wrong)


def test_strategy_refuses_a_bare_module():
    with pytest.raises(InvalidValue, match=r"model must be a fedcover Model, such as fc\.Model"):
        CoverageStrategy(with_norms().module)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"fraction_train": 0.0}, r"fraction_train must be in \(0, 1\]; got 0.0"),
        ({"fraction_evaluate": 1.5}, r"fraction_evaluate must be in \[0, 1\]; got 1.5"),
        ({"min_train_nodes": 0}, "min_train_nodes must be a whole number of at least 1; got 0"),
        ({"min_available_nodes": 1.5}, "min_available_nodes must be a whole number"),
        ({"wait": float("nan")}, "wait must be a number of seconds"),
    ],
)
def test_sampling_refuses_wrong_values(wrong, reason):
    with pytest.raises(InvalidValue, match=reason):
        Sampling(**wrong)


def ordered(model: fc.Model, capacity: float) -> Message:
    encoded, wire = encode_reduction(windows(model.groups, capacity), model)
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    payload = pack_arrays(prefix_names({"params": gather_kept(wire, wire.extract(params))}))
    client_task = ClientTask(3, capacity, 0, encoded, 0, "nonce")
    message = request_message(
        7, TaskRequest(2, 0.1, 1, "", (client_task,), (payload,), {"lr": 0.5}), ttl=60.0
    )
    message.metadata.__dict__["_message_id"] = "1"
    return message


def context(**config: object) -> Context:
    return Context(1, 7, {"partition-id": 3, "num-partitions": 4, **config}, RecordDict(), {})


def test_user_function_trains_a_module_of_the_nodes_size():
    modules = {}

    def train(module, config, context):
        modules.update(config, units=module[0].out_channels)
        with torch.no_grad():
            module[0].weight.fill_(1.0)
        return {"num-examples": 5, "loss": 0.25}

    (answer,) = read_results(
        client_app(train, with_norms)(ordered(with_norms(), 0.5), context(capacity=0.5))
    )
    assert (answer.client, answer.nonce, answer.samples, answer.loss, answer.error) == (
        3,
        "nonce",
        5,
        0.25,
        "",
    )
    assert modules == {"lr": 0.5, "round": 2, "server-round": 3, "capacity": 0.5, "units": 2}


def test_node_refuses_more_than_its_capacity():
    app = client_app(lambda *_: {"num-examples": 1, "loss": 0.0}, with_norms)
    (answer,) = read_results(app(ordered(with_norms(), 1.0), context(capacity=0.5)))
    assert "more than the 0.5 that this node declares" in answer.error
    assert answer.payload == b""


def test_request_message_is_read_back():
    message = ordered(with_norms(), 0.5)
    request = read_request(message)
    assert (request.round, request.lr, request.threads, dict(request.extra_config)) == (
        2,
        0.1,
        1,
        {"lr": 0.5},
    )
    assert request.client_tasks[0].nonce == "nonce"


WRONG = {
    "no report": lambda content: content.pop("report"),
    "no answers": lambda content: content.pop("answers"),
    "a column too short": lambda content: content["report"].update({"losses": []}),
    "losses as text": lambda content: content["report"].update({"losses": ["x"]}),
    "an answer too many": lambda content: content["answers"].update({"9": content["answers"]["3"]}),
    "a pickle": lambda content: setattr(content["answers"]["3"], "stype", "cloudpickle"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_reply_is_refused(wrong):
    reply = result_message(
        ordered(with_norms(), 0.5), [ClientResult(3, "nonce", 0.5, 1, b"parcel")]
    )
    assert read_results(reply) == [ClientResult(3, "nonce", 0.5, 1, b"parcel")]
    WRONG[wrong](reply.content)
    with pytest.raises(InvalidValue):
        read_results(reply)


def test_empty_reply_is_refused():
    message = ordered(with_norms(), 0.5)
    for content in (RecordDict(), RecordDict({"report": ConfigRecord(), "answers": ArrayRecord()})):
        with pytest.raises(InvalidValue):
            read_results(Message(content, reply_to=message))


def test_damaged_reply_pieces_are_read_or_refused():
    """The pieces in which Flower carries a reply, damaged at random: what opens them never
    stumbles.
    """
    message, chance, outcomes = ordered(with_norms(), 0.5), random.Random(0), Counter()
    reply = result_message(message, [ClientResult(3, "nonce", 0.5, 1, bytes(range(256)) * 4)])
    whole = pieces(reply)
    for _ in range(3000):
        contents = dict(whole)
        for _ in range(chance.choice([1, 1, 2, 4])):
            name = chance.choice(list(contents))
            contents[name] = damaged(contents[name], whole, chance)
        try:
            result = decode_reply(PartialReply(reply.object_id, [], 4096, 256, contents))
            if isinstance(result, Message):
                for answer in read_results(result):
                    unpack_arrays(answer.payload)
            outcomes["rejected" if isinstance(result, FailedReply) else "read"] += 1
        except (InvalidValue, TooLarge) as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["rejected"] > 500
    assert outcomes["InvalidValue"] > 100


def damaged(content, others, chance):
    """Another piece, some bytes changed, a number replaced by many, or a part cut out."""
    kind, where = chance.random(), chance.randrange(len(content))
    if kind < 0.2:
        return chance.choice(list(others.values()))
    if kind < 0.6:
        changed = bytearray(content)
        for _ in range(chance.choice([1, 2, 8])):
            changed[chance.randrange(min(len(content), chance.choice([40, 10_000])))] = (
                chance.randrange(256)
            )
        return bytes(changed)
    if kind < 0.8:
        return (
            content[:where]
            + chance.choice([b"", b"[", b"0,0,0", b"-1", b"9" * 5000, b'{"a":1}'])
            + content[where:]
        )
    return content[:where] + content[where + chance.randrange(1, 30) :]


def test_reply_of_records_or_repeated_tensors_is_too_large():
    """Python makes much of little: refused before anything is made of it."""
    message = ordered(with_norms(), 0.5)
    many = Message(RecordDict({"report": ConfigRecord({"x": [1] * 100_000})}), reply_to=message)
    with pytest.raises(TooLarge, match="not tensors"):
        decode_reply(PartialReply(many.object_id, [], 4096, 256, pieces(many)))
    fine = Message(RecordDict({"report": ConfigRecord({"x": [1] * 1000})}), reply_to=message)
    assert isinstance(
        decode_reply(PartialReply(fine.object_id, [], 4096, 256, pieces(fine))), Message
    )
    disguised = {
        many.object_id: b"ArrayChunk " + b"," * 200_000 + b" 1\x00x"
    }  # a head that is long itself
    with pytest.raises(TooLarge, match="not tensors"):
        decode_reply(PartialReply(many.object_id, [], 4096, 256, disguised))


def pieces(message):
    return {id: piece.deflate() for id, piece in get_all_nested_objects(message).items()}


def test_strategy_counts_a_flood_of_answers_as_one_rejection(caplog):
    strategy, message = (
        CoverageStrategy(with_norms(), calibration=torch.randn(9, 1, 4, 4)),
        ordered(with_norms(), 0.5),
    )
    strategy._sent = strategy._params(strategy.initial_arrays())
    flood = result_message(message, [ClientResult(n, "x", 0.5, 1, b"", "oh") for n in range(500)])
    arrays, figures = strategy.aggregate_train(1, [flood])
    assert (arrays, figures["rejected"], figures["answered"], len(caplog.records)) == (
        None,
        1,
        0,
        1,
    )


def answering(strategy, samples):
    """The reply of a node that trained nothing and claims to have so many samples."""
    model, part = strategy.model, windows(strategy.model.groups, 0.5)
    strategy._sent = strategy._params(strategy.initial_arrays())
    _, wire = encode_reduction(part, model)
    client = Client(3, 0.5, 0, 1, ())
    pending = strategy._ledger.issue(lambda nonce: PendingTask(nonce, client, wire, strategy._sent))
    untrained = Update(client, wire, wire, wire.extract(strategy._sent), {}, {}, {}, 0.5)
    answer = ClientResult(3, pending.nonce, 0.5, samples, pack_arrays(pack_update(untrained)))
    return result_message(ordered(model, 0.5), [answer])


@pytest.mark.parametrize(
    ("samples", "believed"), [(0, 0), (1, 1), (10**9, 1), (10**9 + 1, 0), (2**63 - 1, 0)]
)
def test_node_may_claim_at_most_a_billion_samples(samples, believed, caplog):
    strategy = CoverageStrategy(
        with_norms(), weights="samples", calibration=torch.randn(9, 1, 4, 4)
    )
    _, figures = strategy.aggregate_train(1, [answering(strategy, samples)])
    assert (figures["answered"], figures["rejected"]) == (believed, 1 - believed)
    assert believed or f"num-examples must be in 1..1000000000; got {samples}" in caplog.text


def trains(module, config, context):
    """A step that depends on the node, the round and the part."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 - 0.01 * (1 + context.node_config["partition-id"] + config["round"]))
    return {"num-examples": 10, "loss": 0.5}


@pytest.fixture
def fleet(monkeypatch):
    """A function that puts nodes of some capacities, which run an app, behind every link; it gives
    who was asked.
    """

    def build(app, capacities):
        nodes = {
            7 + place: {
                "partition-id": place,
                "num-partitions": len(capacities),
                "capacity": capacity,
            }
            for place, capacity in enumerate(capacities)
        }
        requests = []

        def send_and_wait(transport, messages, *, timeout, max_bytes):
            requests.append((sorted(messages), {node: max_bytes[node] for node in messages}))
            replies = {}
            for node, message in messages.items():
                message.metadata.__dict__["_message_id"] = f"{node}"
                replies[node] = app(message, Context(1, node, nodes[node], RecordDict(), {}))
            return replies

        def query_node_info(transport, nodes_to_query, *, timeout, client_info):
            configs = {
                node: (config["partition-id"], len(nodes), config["capacity"])
                for node, config in nodes.items()
            }
            return {node: NodeInfo(node, *configs[node], fc.__version__) for node in nodes_to_query}

        monkeypatch.setattr(Transport, "connected_nodes", lambda transport: set(nodes))
        monkeypatch.setattr(Transport, "query_node_info", query_node_info)
        monkeypatch.setattr(Transport, "send_and_wait", send_and_wait)
        return requests

    return build


def values(result):
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def test_sampling_trains_a_changing_share_of_nodes(fleet):
    requests = fleet(client_app(trains, with_norms), [1.0] * 4)
    inputs = torch.randn(9, 1, 4, 4)

    def who(sampling):
        requests.clear()
        CoverageStrategy(with_norms(), sampling=sampling, calibration=inputs).start(
            None, num_rounds=6
        )
        return [nodes for nodes, _ in requests if nodes]

    half = who(Sampling(fraction_train=0.5))
    assert [len(nodes) for nodes in half] == [2] * 6
    assert {node for nodes in half for node in nodes} == {7, 8, 9, 10}
    assert [len(nodes) for nodes in who(Sampling(fraction_train=0.1, min_train_nodes=3))] == [3] * 6
    assert who(None) == [[7, 8, 9, 10]] * 6
    with pytest.raises(RunError, match=r"4 SuperNodes .* min_available_nodes is 5"):
        who(Sampling(min_available_nodes=5, wait=0.0))


def test_nodes_evaluate_their_own_parts(fleet):
    """In evaluation mode, with the server's norm statistics for just that part."""
    evaluations = {}

    def evaluate(module, config, context):
        evaluations[context.node_config["partition-id"]] = module
        assert not torch.is_grad_enabled()
        assert (config["server-round"], config["what"]) == (2 - (config["round"] == 0), "test")
        place = context.node_config["partition-id"]
        return {"num-examples": 1 + 2 * place, "accuracy": float(place)}

    requests = fleet(client_app(trains, with_norms, evaluate), [1.0, 0.5])
    inputs, built = torch.randn(50, 1, 4, 4), with_norms()
    strategy = CoverageStrategy(
        built, "prefix", sampling=Sampling(fraction_evaluate=1.0), calibration=inputs
    )
    result = strategy.start(None, num_rounds=2, evaluate_config=ConfigRecord({"what": "test"}))
    assert dict(result.evaluate_metrics_clientapp[2]) == {
        "num-examples": 4,
        "nodes": 2,
        "accuracy": 0.75,
    }
    assert [set(limits.values()) == {0} for _, limits in requests] == [False, True, False, True]
    assert [evaluations[place][0].out_channels for place in (0, 1)] == [4, 2]
    whole = strategy.ready(result.arrays)
    assert not evaluations[0].training
    assert evaluations[0](inputs).equal(whole(inputs))
    part = submodel(built.module, windows(built.groups, 0.5), strategy._params(result.arrays))
    assert evaluations[1](inputs).equal(calibrate(part, inputs)(inputs))


@pytest.mark.parametrize(
    ("evaluate", "reason"),
    [
        (None, "this node's client_app has no evaluate_fn"),
        (lambda *_: 1 / 0, "division by zero"),
        (lambda *_: {"accuracy": 1.0}, "evaluate_fn must give num-examples"),
        (lambda *_: {"num-examples": 1, "loss": float("nan")}, "at most 100 finite numbers"),
    ],
)
def test_failed_evaluation_is_logged(fleet, caplog, evaluate, reason):
    fleet(client_app(trains, with_norms, evaluate), [1.0])
    inputs = torch.randn(9, 1, 4, 4)
    strategy = CoverageStrategy(
        with_norms(), sampling=Sampling(fraction_evaluate=1.0), calibration=inputs
    )
    assert strategy.start(None, num_rounds=1).evaluate_metrics_clientapp == {}
    assert "round 1: evaluation rejected" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("server", ["none", "momentum(beta=0.5)", "adam(lr=0.1)"])
def test_resumed_strategy_gives_the_same_bits(fleet, tmp_path, server):
    requests = fleet(client_app(trains, with_norms), [1.0, 0.5])
    inputs, built = torch.randn(9, 1, 4, 4), with_norms()
    states = []

    def evaluate(round, arrays):
        states.append(round)
        return MetricRecord({"round": round})

    def strategy(folder, policy="rolling", **changes):
        chosen = {"server": server, "sampling": Sampling(fraction_train=0.5), **changes}
        return CoverageStrategy(built, policy, calibration=inputs, folder=folder, **chosen)

    whole = strategy(None).start(None, num_rounds=4)
    strategy(tmp_path / "run").start(None, num_rounds=2)
    again = strategy(tmp_path / "run").start(None, num_rounds=4, evaluate_fn=evaluate)
    assert values(again) == values(whole)
    assert list(again.train_metrics_clientapp) == states[1:] == [3, 4]
    requests.clear()
    result = strategy(tmp_path / "run").start(None, num_rounds=4)
    assert (values(result), requests) == (values(whole), [])
    with pytest.raises(RunError, match="belongs to another experiment"):
        strategy(tmp_path / "run", weights="samples").start(None, num_rounds=5)
    with pytest.raises(RunError, match="belongs to another experiment"):
        strategy(tmp_path / "run", policy="prefix").start(None, num_rounds=5)
    plain = strategy(None, server="none").start(None, num_rounds=4)
    assert (values(plain) == values(whole)) == (server == "none")


def test_silent_node_loses_its_partition_in_an_app(monkeypatch):
    """The strategy asks the next node that claims the place, until that one is silent, too."""
    message, answered = ordered(with_norms(), 0.5), result_message(ordered(with_norms(), 0.5), [])
    silent = {7}

    def send_and_wait(transport, messages, *, timeout, max_bytes):
        return {
            node: FailedReply("late", "no answer") if node in silent else answered
            for node in messages
        }

    monkeypatch.setattr(Transport, "send_and_wait", send_and_wait)
    strategy = CoverageStrategy(with_norms(), calibration=torch.randn(9, 1, 4, 4))
    for node in (7, 8):
        strategy._node_registry.add(NodeInfo(node, 3, 4, 0.5, fc.__version__))

    def start(self, grid, *args, **kwargs):
        assert [bool(reply.has_error()) for reply in grid.send_and_receive([message])] == [
            7 in silent
        ]

    monkeypatch.setattr(Strategy, "start", start)
    strategy.start(None)
    assert strategy._node_registry.node_of_partition([7, 8]) == {3: 8}
    silent.clear()
    strategy.start(None)
    assert strategy._node_registry.node_of_partition([7, 8]) == {3: 7}
