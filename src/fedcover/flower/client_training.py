"""Training on a node: the same local training as in one process, one client after another."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import safetensors.torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.flower.messages import (
    ClientResult,
    ClientTask,
    SharedPayloads,
    TaskRequest,
    read_request,
    result_message,
)
from fedcover.flower.node_task import LAST_TASK, TaskInputs
from fedcover.flower.payloads import (
    decode_reduction,
    expected_part,
    scatter_kept,
    unpack_sections,
)
from fedcover.flower.state_payload import state_from_payload
from fedcover.log import log
from fedcover.models.meta_device import build_on_meta_or_cpu
from fedcover.runs.machine import Machine
from fedcover.server.raw_arrays import InvalidReply
from fedcover.server.reply_format import pack_update
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.build import submodel
from fedcover.submodels.unit_groups import groups_from_json
from fedcover.training.local_sgd import train_client
from fedcover.types import Client, Model, Params, Task, Update

PRIVATE = "private"
ONLY_A_PART = (
    "a node holds its part of the model only: "
    "assignment.reduction.extract(assignment.state.params) gives it"
)


def train_clients(message: Message, context: Context) -> Message:
    """Train the clients of an experiment that belong to this node."""
    request = read_request(message)
    payloads = SharedPayloads(message, request)
    request = replace(request, payloads=())  # or it would keep them alive
    device = str(context.node_config.get("device", "cpu"))
    try:
        machine = Machine("sequential", device, request.threads).resolved()
        inputs = TaskInputs.of(request, machine, context)
        task = LAST_TASK.take(inputs)
    except FedcoverError as error:
        failures = [_failed_result(client_task, error) for client_task in request.client_tasks]
        return result_message(message, failures)

    def train(client_task: ClientTask) -> ClientResult:
        return _train_client_task(client_task, request, payloads, task, context)

    with machine.applied():
        results = [
            _run_client_task(client_task, context, train) for client_task in request.client_tasks
        ]
    LAST_TASK.put(inputs, task)
    return result_message(message, results)


def _run_client_task(
    client_task: ClientTask, context: Context, train: Callable[[ClientTask], ClientResult]
) -> ClientResult:
    """Train one client; report its error instead of keeping the other clients from answering."""
    try:
        declared = context.node_config.get("capacity", 1.0)
        if isinstance(declared, int | float) and client_task.capacity > declared + 1e-9:
            raise InvalidValue(
                f"capacity {client_task.capacity:g} is more than the {declared:g} "
                "that this node declares"
            )
        return train(client_task)
    except (FedcoverError, InvalidReply) as error:
        return _failed_result(client_task, error)
    except Exception as error:  # a user's model, recipe or function may raise anything
        log.exception("training client %d has failed", client_task.client)
        return _failed_result(client_task, error)


def _failed_result(client_task: ClientTask, error: Exception) -> ClientResult:
    """Return the result of a client that could not be trained."""
    if isinstance(error, FedcoverError | InvalidReply):
        why = str(error)
    else:
        why = repr(error)
        if "meta" in why:  # the device of tensors without values
            why = f"{ONLY_A_PART} ({why})"
    return ClientResult(client_task.client, client_task.nonce, nan, 0, b"", why[:300])


def _train_client_task(
    client_task: ClientTask,
    request: TaskRequest,
    payloads: SharedPayloads,
    task: Task,
    context: Context,
) -> ClientResult:
    """Train one client of an experiment from the state in its payload."""
    source = task.source
    client = Client(
        client_task.client,
        client_task.capacity,
        client_task.slot,
        source.count(client_task.client),
        source.labels(client_task.client),
    )
    reduction = decode_reduction(client_task.encoded, task.model)
    # neither payload nor state gets a name here, which would keep them alive during training
    update = train_client(
        task,
        state_from_payload(
            payloads.pop_for(client_task),
            task,
            client,
            reduction,
            request.round,
            _load_private(context, client.id),
            source.test.x.device,
        ),
        client,
        reduction,
        request.lr,
    )
    if update.private:
        _save_private(context, client.id, update.private)
    return _trained_result(client_task, update)


def _trained_result(client_task: ClientTask, update: Update) -> ClientResult:
    payload = pack_arrays(pack_update(update))
    return ClientResult(
        client_task.client, client_task.nonce, update.loss, update.client.samples, payload
    )


def train_module(
    message: Message,
    context: Context,
    train_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]],
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's function train the sub-models of this node's clients."""
    request = read_request(message)
    payloads = SharedPayloads(message, request)
    request = replace(request, payloads=())  # or it would keep them alive
    model = build_on_meta_or_cpu(partial(whole_model, build, request.groups), "model")
    params = {name: p.detach() for name, p in model.module.named_parameters()}

    def train(client_task: ClientTask) -> ClientResult:
        reduction = decode_reduction(client_task.encoded, model)
        expected = {"params": expected_part(reduction, params)}
        part = unpack_sections(payloads.pop_for(client_task), expected)["params"]
        module = submodel(model.module, reduction, scatter_kept(reduction, part, params, "cpu"))
        metrics = train_fn(module, user_config(request, client_task), context)
        samples, loss = _check_training_metrics(metrics)
        client = Client(client_task.client, client_task.capacity, client_task.slot, samples, ())
        trained = {name: p.detach() for name, p in module.named_parameters()}
        update = Update(client, reduction, reduction, trained, {}, {}, {}, loss)
        return _trained_result(client_task, update)

    results = [
        _run_client_task(client_task, context, train) for client_task in request.client_tasks
    ]
    return result_message(message, results)


def _check_training_metrics(metrics: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of examples and the loss that a user's function reports."""
    samples, loss = metrics.get("num-examples"), metrics.get("loss")
    if type(samples) is not int or samples < 1 or type(loss) not in (int, float):
        raise InvalidValue(
            f"train_fn must give num-examples (a count) and loss (a number); got {dict(metrics)}"
        )
    return samples, float(loss or 0.0)


def user_config(request: TaskRequest, client_task: ClientTask) -> dict[str, Any]:
    """Return the config of a user's function; rounds count from 0, Flower's from 1."""
    return {
        **request.extra_config,
        "round": request.round,
        "server-round": request.round + 1,
        "capacity": client_task.capacity,
    }


def whole_model(build: Callable[[], nn.Module | Model], groups: str) -> Model:
    """Build the user's model; a bare module gets the unit groups that the server sent."""
    model = build()
    if isinstance(model, nn.Module):
        return Model(model, groups_from_json(groups))
    if not isinstance(model, Model):
        raise InvalidValue(
            f"model must build an nn.Module or a fedcover Model; got {type(model).__name__}"
        )
    return model


def _load_private(context: Context, client: int) -> Params:
    """Return the tensors that a client keeps in the node's context, which never leaves the node."""
    private_arrays: Mapping[str, Array] = context.state.array_records.get(PRIVATE, {})
    if str(client) not in private_arrays:
        return {}
    return safetensors.torch.load(private_arrays[str(client)].data)


def _save_private(context: Context, client: int, private: Params) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in private.items()}
    content = safetensors.torch.save(tensors)
    records = context.state.array_records
    record = records[PRIVATE] if PRIVATE in records else ArrayRecord()
    record[str(client)] = Array("uint8", (len(content),), "safetensors", content)
    context.state[PRIVATE] = record
