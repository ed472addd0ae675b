"""What a node does with its orders: the same local training as everywhere else, one client after another."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.flower.memory import own_pages
from fedcover.flower.messages import Answer, Order, Orders, Parcels, read_orders, to_server
from fedcover.flower.node_data import rows_here
from fedcover.flower.nodes import Wanted, clients_of, introduction
from fedcover.flower.payloads import bundle, headed, kept, read_reduction, received, sections, unbundle, wanted_part
from fedcover.models.meta_device import hollow_or_whole
from fedcover.models.norms import running, statistics_key
from fedcover.runs.components import hollow_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.setup import Machine, Parts, prepare
from fedcover.server.npy_codec import Refused
from fedcover.server.reply_validation import pack
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import dense
from fedcover.submodels.unit_groups import from_json
from fedcover.training.local_sgd import train_client
from fedcover.types import Client, Model, Params, Reduction, State, Task, Update
from fedcover.version import __version__

PRIVATE = "private"
ONLY_A_PART = "a node holds its part of the model only: assignment.reduction.extract(assignment.state.params) gives it"

log = logging.getLogger("fedcover")


def train_clients(message: Message, context: Context) -> Message:
    """Train an experiment's clients that live on this node."""
    orders = read_orders(message)
    parcels = Parcels(message, orders)
    orders = replace(orders, parcels=())  # which would keep them
    own_pages()
    try:
        machine = Machine("sequential", str(context.node_config.get("device", "cpu")), orders.threads).resolved()
        task = _task(orders, machine, context.node_id, context.node_config)
    except FedcoverError as error:
        return to_server(message, [_refusal(order, error) for order in orders.orders])
    answers = []
    with machine.applied():
        for order in orders.orders:
            answers.append(_answered(order, context, lambda order: _trained(order, orders, parcels, task, context)))
    return to_server(message, answers)


def _task(orders: Orders, machine: Machine, node: int, config: Mapping[str, Any]) -> Task:
    """The experiment as this node sees it: with its own rows, where those of the clients are on nodes."""
    experiment = Experiment.from_toml(orders.experiment)
    build = partial(hollow_model, known=from_json(orders.groups) if orders.groups else None)
    if experiment.partition != "nodes":
        data = config.get("data")
        return prepare(experiment, machine, data=str(data) if data else None, parts=Parts(build=build)).task
    me = introduction(node, config, __version__)
    mine = clients_of(me.place, experiment.clients, me.places)
    wanted = Wanted(experiment.clients, orders.own["classes"], tuple(orders.own["shape"]))
    rows = rows_here(str(config.get("rows", "")), experiment, mine, wanted, machine.device)
    return prepare(experiment, machine, parts=Parts(source=rows, build=build)).task


def _answered(order: Order, context: Context, work: Callable[[Order], Answer]) -> Answer:
    """A client's answer; what goes wrong with one client is told and does not keep the others from answering."""
    try:
        declared = context.node_config.get("capacity", 1.0)
        if isinstance(declared, int | float) and order.capacity > declared + 1e-9:
            raise InvalidValue(f"capacity {order.capacity:g} is more than the {declared:g} that this node declares")
        return work(order)
    except (FedcoverError, Refused) as error:
        return _refusal(order, error)
    except Exception as error:  # of a model, recipe or training function that somebody has brought along
        log.exception("training client %d has failed", order.client)
        return _refusal(order, error)


def _refusal(order: Order, error: Exception) -> Answer:
    known = isinstance(error, FedcoverError | Refused)
    why = f"{error}" if known else f"{error!r}"
    if not known and "meta" in why:  # the device of what has no values
        why = f"{ONLY_A_PART} ({why})"
    return Answer(order.client, order.nonce, nan, 0, b"", why[:300])


def _trained(order: Order, orders: Orders, parcels: Parcels, task: Task, context: Context) -> Answer:
    source = task.source
    client = Client(order.client, order.capacity, order.slot, source.count(order.client), source.labels(order.client))
    reduction = read_reduction(order.encoded, task.model)
    mine = _private(context, order.client)
    device = task.source.test.x.device
    state = partial(received_state, task=task, client=client, reduction=reduction, round=orders.round, private=mine)
    update = train_client(task, state(parcels.given_to(order), device=device), client, reduction, orders.lr)
    if update.private:
        _keep_private(context, order.client, update.private)
    return Answer(order.client, order.nonce, update.loss, client.samples, bundle(pack(update)))


def sent_parcel(task: Task, state: State, client: Client, reduction: Reduction) -> bytes:
    """What a client is sent: its part of the parameters, of its width's statistics and of what was measured."""
    known = state.statistics.get(statistics_key(task.norm, client.capacity) or "", {})
    measured = {f"measured-{kind}": dense(reduction).extract(tensors) for kind, tensors in state.measured.items()}
    part = kept(reduction, reduction.extract(state.params))
    return bundle(headed({"params": part, "statistics": reduction.extract(known), **measured}))


def received_state(
    parcel: bytes, task: Task, client: Client, reduction: Reduction, round: int, private: Params, device: torch.device
) -> State:
    """The part of the server's state that a client knows: as a `Portion`, unless its part is masked, not cut."""
    module = task.model.module
    params = {name: p.detach() for name, p in module.named_parameters()}
    key = statistics_key(task.norm, client.capacity)
    known = running(module) if key else {}
    names = [tuple(name.split("/", 1)) for name in unbundle(parcel)]
    kinds = dict.fromkeys(head.removeprefix("measured-") for head, _ in names if head.startswith("measured-"))
    whole = dense(reduction)
    of_kind = {
        kind: {n: params[n] for head, n in names if head == f"measured-{kind}" and n in params} for kind in kinds
    }
    wanted = {
        "params": wanted_part(reduction, params),
        "statistics": wanted_part(reduction, known),
        **{f"measured-{kind}": wanted_part(whole, tensors) for kind, tensors in of_kind.items()},
    }
    found = sections(parcel, wanted)
    return State(
        round,
        received(reduction, found["params"], params, device),
        {key: received(reduction, found["statistics"], known, device)} if key else {},
        measured={k: received(whole, found[f"measured-{k}"], tensors, device) for k, tensors in of_kind.items()},
        private={client.id: {name: tensor.to(device) for name, tensor in private.items()}},
    )


def train_module(
    message: Message,
    context: Context,
    train_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]],
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's own function train the sub-models of this node's clients."""
    orders = read_orders(message)
    parcels = Parcels(message, orders)
    orders = replace(orders, parcels=())  # which would keep them
    own_pages()
    model = hollow_or_whole(partial(whole_model, build, orders.groups), "model")
    params = {name: p.detach() for name, p in model.module.named_parameters()}

    def work(order: Order) -> Answer:
        reduction = read_reduction(order.encoded, model)
        part = sections(parcels.given_to(order), {"params": wanted_part(reduction, params)})["params"]
        module = submodel(model.module, reduction, received(reduction, part, params, "cpu"))
        config = {**orders.own, "round": orders.round, "server-round": orders.round + 1, "capacity": order.capacity}
        told = train_fn(module, config, context)
        samples, loss = told.get("num-examples"), told.get("loss")
        if type(samples) is not int or samples < 1 or type(loss) not in (int, float):
            raise InvalidValue(f"train_fn must give num-examples (a count) and loss (a number); got {dict(told)}")
        client = Client(order.client, order.capacity, order.slot, samples, ())
        trained = {name: p.detach() for name, p in module.named_parameters()}
        update = Update(client, reduction, reduction, trained, {}, {}, {}, float(loss or 0.0))
        return Answer(order.client, order.nonce, update.loss, samples, bundle(pack(update)))

    return to_server(message, [_answered(order, context, work) for order in orders.orders])


def whole_model(build: Callable[[], nn.Module | Model], groups: str) -> Model:
    """The model that a user's function builds; the unit groups of a bare module are those that the server has sent."""
    built = build()
    if isinstance(built, nn.Module):
        return Model(built, from_json(groups))
    if not isinstance(built, Model):
        raise InvalidValue(f"model must build an nn.Module or a fedcover Model; got {type(built).__name__}")
    return built


def _private(context: Context, client: int) -> Params:
    """What a client kept for itself: in the node's context, which never leaves the node."""
    records = context.state.array_records
    kept_here: Mapping[str, Array] = records.get(PRIVATE, {})
    return safetensors.torch.load(kept_here[str(client)].data) if str(client) in kept_here else {}


def _keep_private(context: Context, client: int, private: Params) -> None:
    content = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in private.items()})
    records = context.state.array_records
    record = records[PRIVATE] if PRIVATE in records else ArrayRecord()
    record[str(client)] = Array("uint8", (len(content),), "safetensors", content)
    context.state[PRIVATE] = record
