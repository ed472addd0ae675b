"""What a node does with its orders: the same local training as everywhere else, one client after another."""

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
from fedcover.flower.messages import (
    ClientResult,
    ClientTask,
    SharedPayloads,
    TaskRequest,
    read_request,
    result_message,
)
from fedcover.flower.node_data import load_node_data
from fedcover.flower.nodes import DataRequirements, clients_of, read_node_config
from fedcover.flower.payloads import (
    decode_reduction,
    expected_part,
    gather_kept,
    pack_arrays,
    prefix_names,
    scatter_kept,
    unpack_arrays,
    unpack_sections,
)
from fedcover.log import log
from fedcover.models.meta_device import build_on_meta_or_cpu
from fedcover.models.norms import running, statistics_key
from fedcover.runs.components import build_meta_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.npy_codec import InvalidReply
from fedcover.server.reply_format import pack_update
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import without_masks
from fedcover.submodels.unit_groups import groups_from_json
from fedcover.training.local_sgd import train_client
from fedcover.types import Client, Model, Params, Reduction, State, Task, Update
from fedcover.version import __version__

PRIVATE = "private"
ONLY_A_PART = "a node holds its part of the model only: assignment.reduction.extract(assignment.state.params) gives it"


def train_clients(message: Message, context: Context) -> Message:
    """Train an experiment's clients that live on this node."""
    request = read_request(message)
    payloads = SharedPayloads(message, request)
    request = replace(request, payloads=())  # which would keep them
    own_pages()
    try:
        machine = Machine(
            "sequential", str(context.node_config.get("device", "cpu")), request.threads
        ).resolved()
        task = _task(request, machine, context.node_id, context.node_config)
    except FedcoverError as error:
        return result_message(
            message, [_failed_result(client_task, error) for client_task in request.client_tasks]
        )
    answers = []
    with machine.applied():
        for client_task in request.client_tasks:
            answers.append(
                _run_client_task(
                    client_task,
                    context,
                    lambda client_task: _train_client_task(
                        client_task, request, payloads, task, context
                    ),
                )
            )
    return result_message(message, answers)


def _task(request: TaskRequest, machine: Machine, node: int, config: Mapping[str, Any]) -> Task:
    """The experiment as this node sees it: with its own rows, where those of the clients are on nodes."""
    experiment = Experiment.from_toml(request.experiment)
    build = partial(
        build_meta_model, known=groups_from_json(request.groups) if request.groups else None
    )
    if experiment.partition != "nodes":
        data = config.get("data")
        return prepare(
            experiment, machine, data=str(data) if data else None, overrides=Overrides(build=build)
        ).task
    me = read_node_config(node, config, __version__)
    mine = clients_of(me.partition_id, experiment.clients, me.num_partitions)
    wanted = DataRequirements(
        experiment.clients, request.extra_config["classes"], tuple(request.extra_config["shape"])
    )
    rows = load_node_data(str(config.get("rows", "")), experiment, mine, wanted, machine.device)
    return prepare(experiment, machine, overrides=Overrides(source=rows, build=build)).task


def _run_client_task(
    client_task: ClientTask, context: Context, work: Callable[[ClientTask], ClientResult]
) -> ClientResult:
    """A client's answer; what goes wrong with one client is told and does not keep the others from answering."""
    try:
        declared = context.node_config.get("capacity", 1.0)
        if isinstance(declared, int | float) and client_task.capacity > declared + 1e-9:
            raise InvalidValue(
                f"capacity {client_task.capacity:g} is more than the {declared:g} that this node declares"
            )
        return work(client_task)
    except (FedcoverError, InvalidReply) as error:
        return _failed_result(client_task, error)
    except (
        Exception
    ) as error:  # of a model, recipe or training function that somebody has brought along
        log.exception("training client %d has failed", client_task.client)
        return _failed_result(client_task, error)


def _failed_result(client_task: ClientTask, error: Exception) -> ClientResult:
    known = isinstance(error, FedcoverError | InvalidReply)
    why = f"{error}" if known else f"{error!r}"
    if not known and "meta" in why:  # the device of what has no values
        why = f"{ONLY_A_PART} ({why})"
    return ClientResult(client_task.client, client_task.nonce, nan, 0, b"", why[:300])


def _train_client_task(
    client_task: ClientTask,
    request: TaskRequest,
    payloads: SharedPayloads,
    task: Task,
    context: Context,
) -> ClientResult:
    source = task.source
    client = Client(
        client_task.client,
        client_task.capacity,
        client_task.slot,
        source.count(client_task.client),
        source.labels(client_task.client),
    )
    reduction = decode_reduction(client_task.encoded, task.model)
    mine = _private(context, client_task.client)
    device = task.source.test.x.device
    state = partial(
        state_from_payload,
        task=task,
        client=client,
        reduction=reduction,
        round=request.round,
        private=mine,
    )
    update = train_client(
        task, state(payloads.pop_for(client_task), device=device), client, reduction, request.lr
    )
    if update.private:
        _keep_private(context, client_task.client, update.private)
    return ClientResult(
        client_task.client,
        client_task.nonce,
        update.loss,
        client.samples,
        pack_arrays(pack_update(update)),
    )


def build_payload(task: Task, state: State, client: Client, reduction: Reduction) -> bytes:
    """What a client is sent: its part of the parameters, of its width's statistics and of what was measured."""
    known = state.statistics.get(statistics_key(task.norm, client.capacity) or "", {})
    measured = {
        f"measured-{kind}": without_masks(reduction).extract(tensors)
        for kind, tensors in state.measured.items()
    }
    part = gather_kept(reduction, reduction.extract(state.params))
    return pack_arrays(
        prefix_names({"params": part, "statistics": reduction.extract(known), **measured})
    )


def state_from_payload(
    payload: bytes,
    task: Task,
    client: Client,
    reduction: Reduction,
    round: int,
    private: Params,
    device: torch.device,
) -> State:
    """The part of the server's state that a client knows: as a `PartialParams`, unless its part is masked, not cut."""
    module = task.model.module
    params = {name: p.detach() for name, p in module.named_parameters()}
    key = statistics_key(task.norm, client.capacity)
    known = running(module) if key else {}
    names = [tuple(name.split("/", 1)) for name in unpack_arrays(payload)]
    kinds = dict.fromkeys(
        head.removeprefix("measured-") for head, _ in names if head.startswith("measured-")
    )
    whole = without_masks(reduction)
    of_kind = {
        kind: {n: params[n] for head, n in names if head == f"measured-{kind}" and n in params}
        for kind in kinds
    }
    wanted = {
        "params": expected_part(reduction, params),
        "statistics": expected_part(reduction, known),
        **{f"measured-{kind}": expected_part(whole, tensors) for kind, tensors in of_kind.items()},
    }
    found = unpack_sections(payload, wanted)
    return State(
        round,
        scatter_kept(reduction, found["params"], params, device),
        {key: scatter_kept(reduction, found["statistics"], known, device)} if key else {},
        measured={
            k: scatter_kept(whole, found[f"measured-{k}"], tensors, device)
            for k, tensors in of_kind.items()
        },
        private={client.id: {name: tensor.to(device) for name, tensor in private.items()}},
    )


def train_module(
    message: Message,
    context: Context,
    train_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]],
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's own function train the sub-models of this node's clients."""
    request = read_request(message)
    payloads = SharedPayloads(message, request)
    request = replace(request, payloads=())  # which would keep them
    own_pages()
    model = build_on_meta_or_cpu(partial(whole_model, build, request.groups), "model")
    params = {name: p.detach() for name, p in model.module.named_parameters()}

    def work(client_task: ClientTask) -> ClientResult:
        reduction = decode_reduction(client_task.encoded, model)
        part = unpack_sections(
            payloads.pop_for(client_task), {"params": expected_part(reduction, params)}
        )["params"]
        module = submodel(model.module, reduction, scatter_kept(reduction, part, params, "cpu"))
        config = {
            **request.extra_config,
            "round": request.round,
            "server-round": request.round + 1,
            "capacity": client_task.capacity,
        }
        told = train_fn(module, config, context)
        samples, loss = told.get("num-examples"), told.get("loss")
        if type(samples) is not int or samples < 1 or type(loss) not in (int, float):
            raise InvalidValue(
                f"train_fn must give num-examples (a count) and loss (a number); got {dict(told)}"
            )
        client = Client(client_task.client, client_task.capacity, client_task.slot, samples, ())
        trained = {name: p.detach() for name, p in module.named_parameters()}
        update = Update(client, reduction, reduction, trained, {}, {}, {}, float(loss or 0.0))
        return ClientResult(
            client_task.client,
            client_task.nonce,
            update.loss,
            samples,
            pack_arrays(pack_update(update)),
        )

    return result_message(
        message,
        [_run_client_task(client_task, context, work) for client_task in request.client_tasks],
    )


def whole_model(build: Callable[[], nn.Module | Model], groups: str) -> Model:
    """The model that a user's function builds; the unit groups of a bare module are those that the server has sent."""
    built = build()
    if isinstance(built, nn.Module):
        return Model(built, groups_from_json(groups))
    if not isinstance(built, Model):
        raise InvalidValue(
            f"model must build an nn.Module or a fedcover Model; got {type(built).__name__}"
        )
    return built


def _private(context: Context, client: int) -> Params:
    """What a client kept for itself: in the node's context, which never leaves the node."""
    records = context.state.array_records
    kept_here: Mapping[str, Array] = records.get(PRIVATE, {})
    return safetensors.torch.load(kept_here[str(client)].data) if str(client) in kept_here else {}


def _keep_private(context: Context, client: int, private: Params) -> None:
    content = safetensors.torch.save(
        {name: tensor.contiguous().cpu() for name, tensor in private.items()}
    )
    records = context.state.array_records
    record = records[PRIVATE] if PRIVATE in records else ArrayRecord()
    record[str(client)] = Array("uint8", (len(content),), "safetensors", content)
    context.state[PRIVATE] = record
