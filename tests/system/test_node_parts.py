"""A node builds and holds its own part of a model, never the whole: the same answers, in less
memory.
"""

from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.flower import client_training
from fedcover.flower.messages import ClientTask, TaskRequest
from fedcover.flower.payloads import encode_reduction, prefix_names
from fedcover.flower.state_payload import build_payload
from fedcover.models.meta_device import build_on_meta_or_cpu, is_on_meta
from fedcover.registry import is_import_path
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.reply_format import pack_update
from fedcover.server.round import initial_state, run_round, start_round
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.reductions import windows
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.training.local_sgd import train_client
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Recipe
from tests.helpers.worlds import SMALL_MODELS

HOLLOW = {
    "windows": ("mlp", {"policy": "rolling(spread=true)"}),
    "a draw": ("cnn", {"policy": "random"}),
    "units": ("mlp", {"policy": "planned"}),
    "heads": ("transformer", {"policy": "prefix"}),
    "stages": ("depth_resnet", {"policy": "prefix", "recipe": "depthfl(exits='last')"}),
    "masks": ("mlp", {"policy": "magnitude", "recipe": "fiarse"}),
    "statistics of every width": ("wide_resnet", {"policy": "rolling", "norm": "per-width"}),
    "statistics of all": (
        "preact_resnet18",
        {"policy": "prefix", "norm": "tracked", "scaler": True},
    ),
    "batch statistics": ("wide_resnet", {"policy": "prefix"}),
    "widths of a batch": (
        "wide_resnet",
        {"policy": "prefix", "norm": "tracked", "recipe": "fjord(distil=0.5)"},
    ),
    "measured by clients": ("mlp", {"policy": "prunefl", "recipe": "prunefl"}),
    "measured, in slices": ("mlp", {"policy": "prefix", "recipe": "prunefl"}),
    "pruned by clients": ("mlp", {"policy": "full", "recipe": "hermes(good_enough=0.0)"}),
    "near what was sent": (
        "mlp",
        {"policy": "prefix", "recipe": "prox", "momentum": 0.0, "clip": 0.1},
    ),
    "own labels": ("mlp", {"policy": "prefix", "absent_labels": "zero", "label_rows": True}),
    "a model of one's own": (
        "mlp",
        {"policy": "prefix", "model": "tests.system.test_node_parts:by_hand"},
    ),
    "a bare module": ("mlp", {"policy": "rolling", "model": "tests.system.test_node_parts:traced"}),
    "a bare module, not cut": (
        "mlp",
        {"policy": "full", "model": "tests.system.test_node_parts:traced"},
    ),
    "a bare module, masked": (
        "mlp",
        {"policy": "magnitude", "model": "tests.system.test_node_parts:traced"},
    ),
    "a bare module with norms": (
        "cnn",
        {"policy": "prefix", "model": "tests.system.test_node_parts:normed"},
    ),
    "norms of a bare module": (
        "cnn",
        {"policy": "prefix", "norm": "tracked", "model": "tests.system.test_node_parts:normed"},
    ),
}
"""Models that a node builds without values."""


def by_hand(shape, classes, norm):
    """A model with its groups."""
    return fc.models.mlp(shape, classes, norm, hidden=(6,))


class Buffered(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(
            nn.Flatten(),
            nn.Linear(shape[0] * shape[1] * shape[2], 6),
            nn.ReLU(),
            nn.Linear(6, classes),
        )


def traced(shape, classes, norm):
    return Buffered(shape, classes)


def normed(shape, classes, norm):
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, classes),
    )


def with_groups(module):
    first, last = "1.weight", "3.weight"
    cuts = (fc.Cut(first, 0), fc.Cut("1.bias", 0), fc.Cut(last, 1))
    return fc.Model(module, (fc.UnitGroup("hidden", 6, cuts),), (first,), (last, "3.bias"))


def buffered(shape, classes, norm):
    module = Buffered(shape, classes)
    module.register_buffer("offset", torch.rand(3))
    return with_groups(module)


def with_attribute(shape, classes, norm):
    module = Buffered(shape, classes)
    module.kept = [{"offset": torch.rand(3)}]
    return with_groups(module)


def looking(shape, classes, norm):
    module = Buffered(shape, classes)
    module.size = float(module[1].weight.detach().norm())
    return with_groups(module)


def drawing(shape, classes, norm):
    module = Buffered(shape, classes)
    module.rate = float(torch.rand((), device="cpu"))
    return with_groups(module)


def placed(shape, classes, norm):
    module = Buffered(shape, classes)
    module[1].weight = nn.Parameter(torch.ones(module[1].weight.shape, device="cpu"))
    return with_groups(module)


MINE = "tests.system.test_node_parts"
WHOLE = {
    "softmax": ({"model": "softmax"}, "its buffer features.place is not sent to nodes"),
    "lora": ({"model": "lora(hidden=[8], rank=4)"}, "its buffer"),
    "fedmask": ({"recipe": "fedmask"}, "its buffer"),
    "buffered": (
        {"model": f"{MINE}:buffered"},
        "its buffer offset is not sent to nodes",
    ),
    "attribute": ({"model": f"{MINE}:with_attribute"}, "it keeps a tensor in its attribute kept"),
    "looking": ({"model": f"{MINE}:looking"}, "it looks at values while it is built"),
    "drawing": ({"model": f"{MINE}:drawing"}, "it draws numbers of its own while it is built"),
    "placed": (
        {"model": f"{MINE}:placed"},
        "its parameter 1.weight fixes the device on which it is created",
    ),
}
"""Models that a node must build with their values, and why."""


def experiment(model="mlp", /, **fields):
    spec, dataset = SMALL_MODELS[model]
    small = {
        "model": spec,
        "dataset": dataset,
        "fleet": "2x1.0 + 2x0.5 + 2x0.25",
        "clients": 6,
        "active": 6,
    }
    return fc.Experiment(
        **{**small, "rounds": 4, "epochs": 2, "batch_size": 3, "calibration": 40, **fields}
    )


def asked(setup, state, wanted):
    """A node's work of a round, as it would arrive, and what a simulation answers to it."""
    orders, payloads, expected = [], [], []
    for client, reduction in start_round(setup, state).work:
        encoded, wire = encode_reduction(reduction, setup.task.model)
        payloads.append(build_payload(setup.task, state, client, wire))
        orders.append(
            ClientTask(
                client.id, client.capacity, client.slot, encoded, len(orders), f"nonce{client.id}"
            )
        )
        expected.append(
            pack_arrays(pack_update(train_client(setup.task, state, client, wire, 0.05)))
        )
    unit_groups = groups_to_json(setup.task.model.groups) if is_import_path(wanted.model) else ""
    arguments = state.round, 0.05, 1, wanted.to_toml(), tuple(orders), tuple(payloads)
    return TaskRequest(*arguments, groups=unit_groups), expected


@pytest.fixture
def answers(monkeypatch):
    """The answers of a node to orders, the task that it makes of them, and the states that its
    clients are given.
    """

    def answer(orders):
        calls = []
        monkeypatch.setattr(client_training, "read_request", lambda message: orders)
        monkeypatch.setattr(client_training, "result_message", lambda message, answers: answers)
        monkeypatch.setattr(
            client_training,
            "train_client",
            lambda task, state, *rest: (
                calls.append((task, state)) or train_client(task, state, *rest)
            ),
        )
        context = SimpleNamespace(run_id=1, node_config={}, node_id=7, state=RecordDict())
        return client_training.train_clients(SimpleNamespace(content={}), context), calls

    return answer


def world(wanted, rounds=1):
    setup = prepare(wanted, Machine(engine="sequential", device="cpu").resolved())
    state = initial_state(setup)
    for _ in range(rounds):
        state, _ = run_round(setup, state)
    return setup, state


@pytest.mark.parametrize("case", HOLLOW)
def test_node_results_equal_a_simulation(answers, caplog, case):
    name, fields = HOLLOW[case]
    settings = experiment(name, **fields)
    setup, state = world(
        settings, rounds=0 if "hermes" in str(fields) else 1
    )  # what clients keep stays on their nodes
    orders, expected = asked(setup, state, settings)
    replies, calls = answers(orders)
    assert [(answer.error, answer.payload) for answer in replies] == [
        ("", payload) for payload in expected
    ]
    assert "builds all of" not in caplog.text
    masked = settings.policy in ("magnitude", "prunefl")
    for task, arguments in calls:
        assert is_on_meta(task.model.module)
        assert isinstance(arguments.params, PartialParams) != masked


@pytest.mark.parametrize("case", WHOLE)
def test_model_that_needs_its_values_is_built_whole_with_a_warning(answers, caplog, case):
    fields, why = WHOLE[case]
    settings = experiment(**{"policy": "prefix", **fields})
    setup, state = world(settings)
    orders, expected = asked(setup, state, settings)
    replies, calls = answers(orders)
    assert [(answer.error, answer.payload) for answer in replies] == [
        ("", payload) for payload in expected
    ]
    assert caplog.text.count("this device builds all of model") == 1
    assert why in caplog.text
    assert not any(is_on_meta(task.model.module) for task, _ in calls)


def test_builder_that_returns_one_module_again_is_refused():
    modules = []

    def build():
        modules or modules.append(
            fc.Model(nn.Linear(2, 2).requires_grad_(bool(torch.ones(1, device="cpu"))), ())
        )
        modules[0].module.register_buffer("more", torch.zeros(1))
        return modules[0]

    with pytest.raises(InvalidValue, match="must be created anew in every call"):
        build_on_meta_or_cpu(build, "model 'kept'")


def peeking():
    """A recipe that looks at the server's values in another way than through its part."""

    def start(assignment, params):
        return {name: params[name].sum() - assignment.state.params[name].sum() for name in params}

    def loss(forward, params, batch, carry):
        return (
            cross_entropy(forward, params, batch, carry) + torch.stack(list(carry.values())).sum()
        )

    return Recipe(loss, start)


def test_recipe_that_reads_outside_the_part_gets_a_hint(answers):
    settings = experiment(policy="prefix", recipe=f"{MINE}:peeking")
    orders, _ = asked(*world(settings, rounds=0), settings)
    replies, _ = answers(orders)
    assert all("a node holds its part of the model only" in answer.error for answer in replies)
    assert all(
        "assignment.reduction.extract(assignment.state.params)" in answer.error
        for answer in replies
    )


def test_partial_params_refuse_another_part():
    model = fc.models.mlp((1, 4, 4), 3, "batch")
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    half, whole = windows(model.groups, 0.5), windows(model.groups, 1.0)
    part = PartialParams(params, half.extract(params), half)
    assert all(tensor is part.part[name] for name, tensor in half.extract(part).items())
    with pytest.raises(InvalidValue, match="its own part of the model only"):
        whole.extract(part)


BUILDERS = {
    "with groups": lambda: by_hand((1, 4, 4), 3, "batch"),
    "with a buffer": lambda: buffered((1, 4, 4), 3, "batch"),
    "bare": lambda: Buffered((1, 4, 4), 3),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_own_train_function_trains_the_part(monkeypatch, caplog, build):
    """A bare module is cut by the groups that the server has found, and is not built
    whole either.
    """
    model = build()
    if not isinstance(model, fc.Model):
        model = with_groups(model)
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    encoded, wire = encode_reduction(windows(model.groups, 0.5), model)
    payload = pack_arrays(prefix_names({"params": wire.extract(params)}))
    each = tuple(ClientTask(n, 0.5, 0, encoded, 0, f"nonce{n}") for n in range(2))
    orders = TaskRequest(0, 0.1, 1, "", each, (payload,), groups=groups_to_json(model.groups))
    monkeypatch.setattr(client_training, "read_request", lambda message: orders)
    monkeypatch.setattr(client_training, "result_message", lambda message, answers: answers)

    def train(module, config, context):
        assert module(torch.zeros(2, 1, 4, 4)).shape == (2, 3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 1
        return {"num-examples": 1, "loss": 0.0}

    answers = client_training.train_module(
        SimpleNamespace(content={}), SimpleNamespace(node_config={}), train, build
    )
    more = pack_arrays(
        {f"params/{name}": tensor.numpy() + 1 for name, tensor in wire.extract(params).items()}
    )
    assert [(answer.error, answer.payload) for answer in answers] == [("", more)] * 2
    assert ("builds all of" in caplog.text) == (build is BUILDERS["with a buffer"])
