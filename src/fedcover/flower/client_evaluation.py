"""Evaluation on the nodes of an app of one's own: each gets its part of the model, ready to use, and tells figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedcover.errors import FedcoverError, InvalidValue, printable
from fedcover.flower.client_training import whole_model
from fedcover.flower.messages import (
    EVALUATE,
    ClientTask,
    TaskRequest,
    read_request,
    request_message,
)
from fedcover.flower.node_data import MOST_SAMPLES
from fedcover.flower.payloads import (
    decode_reduction,
    encode_reduction,
    expected_part,
    gather_kept,
    pack_arrays,
    prefix_names,
    scatter_kept,
    unpack_sections,
)
from fedcover.log import log
from fedcover.models.meta_device import build_on_meta_or_cpu
from fedcover.models.norms import calibrate, running
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.types import Client, Model, Params, Reduction

FIGURES, FAILED, COUNT = "figures", "failed", "num-examples"
MOST_FIGURES = 100
"""How many figures one node may tell."""


def evaluation_message(
    node: int, round: int, client: Client, part: Reduction, model: Model, params: Params,
    calibration: Tensor | None, config: Mapping[str, Any], *, ttl: float,
) -> Message:  # fmt: skip
    """The message with a node's part of the model, whose norm statistics the server has computed for that part."""
    encoded, wire = encode_reduction(part, model)
    sent = {"params": gather_kept(wire, wire.extract(params))}
    if calibration is not None:
        sent["statistics"] = running(calibrate(submodel(model.module, wire, params), calibration))
    client_task = ClientTask(client.id, client.capacity, client.slot, encoded, 0, "")
    payloads = (pack_arrays(prefix_names(sent)),)
    unit_groups = groups_to_json(model.groups)
    request = TaskRequest(
        round, 0.0, torch.get_num_threads(), "", (client_task,), payloads, dict(config), unit_groups
    )
    return request_message(node, request, ttl=ttl, kind=EVALUATE)


def evaluate_module(
    message: Message,
    context: Context,
    evaluate_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]] | None,
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's own function evaluate this node's part of the model."""
    try:
        if evaluate_fn is None:
            raise InvalidValue("this node's client_app has no evaluate_fn")
        request = read_request(message)
        (client_task,) = request.client_tasks
        module = _load_submodel(
            client_task,
            request,
            build_on_meta_or_cpu(partial(whole_model, build, request.groups), "model"),
        )
        config = {
            **request.extra_config,
            "round": request.round,
            "server-round": request.round + 1,
            "capacity": client_task.capacity,
        }
        with torch.no_grad():
            told = dict(evaluate_fn(module.eval(), config, context))
        if objection := _metrics_violation(told):
            raise InvalidValue(f"evaluate_fn must give {objection}; got {told}")
        return Message(RecordDict({FIGURES: MetricRecord({**told})}), reply_to=message)
    except Exception as error:  # of a function that somebody has brought along
        if not isinstance(error, FedcoverError):
            log.exception("evaluation has failed")
        why = f"{error}" if isinstance(error, FedcoverError) else f"{error!r}"
        return Message(RecordDict({FAILED: ConfigRecord({"why": why[:300]})}), reply_to=message)


def _load_submodel(client_task: ClientTask, request: TaskRequest, model: Model) -> nn.Module:
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    reduction = decode_reduction(client_task.encoded, model)
    known = running(model.module)
    wanted = {"params": expected_part(reduction, params)}
    if known:
        wanted["statistics"] = expected_part(reduction, known)
    found = unpack_sections(request.payloads[client_task.payload_index], wanted)
    module = submodel(
        model.module, reduction, scatter_kept(reduction, found["params"], params, "cpu")
    )
    return load_tensors(module, found["statistics"]) if known else module


def aggregate_metrics(
    replies: Iterable[Message], tell: Callable[[str], None]
) -> MetricRecord | None:
    """Every figure averaged over the nodes that tell it, by their numbers of examples; None if nobody answered.

    `tell` hears why an answer does not count.
    """
    told: list[dict[str, float]] = []
    for reply in replies:
        found = _read_metrics(reply)
        if isinstance(found, str):
            tell(found)
        else:
            told.append(found)
    return MetricRecord({**weighted_mean_metrics(told)}) if told else None


def weighted_mean_metrics(told: Sequence[Mapping[str, float]]) -> dict[str, int | float]:
    """Figures of several nodes in one, each weighed by its number of examples, whose sum it also has.

    >>> weighted_mean_metrics([{"num-examples": 1, "accuracy": 1.0}, {"num-examples": 3, "accuracy": 0.0}])
    {'num-examples': 4, 'nodes': 2, 'accuracy': 0.25}
    """
    mean: dict[str, int | float] = {
        COUNT: int(sum(each[COUNT] for each in told)),
        "nodes": len(told),
    }
    names = {name: None for each in told for name in each if name not in mean}
    for name in names:
        having = [each for each in told if name in each]
        mean[name] = math.fsum(each[COUNT] * each[name] for each in having) / sum(
            each[COUNT] for each in having
        )
    return mean


def _read_metrics(reply: Message) -> dict[str, float] | str:
    if reply.has_error():
        return f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
    if (failed := reply.content.config_records.get(FAILED)) is not None:
        return f"its node says: '{printable(str(failed.get('why')))[:300]}'"
    if FIGURES not in reply.content.metric_records:
        return "the reply lacks what a reply must have"
    told: dict[str, Any] = dict(reply.content.metric_records[FIGURES])
    objection = _metrics_violation(told)
    return f"its figures must be {objection}" if objection else told


def _metrics_violation(told: Mapping[str, Any]) -> str:
    """What is wrong with figures; nothing if they are such."""
    count = told.get(COUNT)
    if type(count) is not int or not 1 <= count <= MOST_SAMPLES:
        return f"{COUNT} (a count in 1..{MOST_SAMPLES}) and numbers"
    numbers = all(type(value) in (int, float) and abs(value) < 1e300 for value in told.values())
    return (
        ""
        if numbers and len(told) <= MOST_FIGURES
        else f"at most {MOST_FIGURES} finite numbers, by name"
    )
