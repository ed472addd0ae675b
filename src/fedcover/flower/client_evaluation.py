"""Evaluation on the nodes of a user's own app, with a user's function."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.flower.client_training import user_config, whole_model
from fedcover.flower.messages import ClientTask, TaskRequest, read_request
from fedcover.flower.node_data import MAX_SAMPLES
from fedcover.flower.payloads import (
    decode_reduction,
    expected_part,
    scatter_kept,
    unpack_sections,
)
from fedcover.log import log
from fedcover.models.meta_device import build_on_meta_or_cpu
from fedcover.models.norms import running_statistics
from fedcover.submodels.build import load_tensors, submodel
from fedcover.types import Model

EVALUATION_METRICS, EVALUATION_ERROR, NUM_EXAMPLES = "figures", "failed", "num-examples"
MAX_METRICS = 100
"""The most metrics that one node may report."""


def evaluate_module(
    message: Message,
    context: Context,
    evaluate_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]] | None,
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's function evaluate this node's part of the model."""
    try:
        if evaluate_fn is None:
            raise InvalidValue("this node's client_app has no evaluate_fn")
        request = read_request(message)
        (client_task,) = request.client_tasks
        model = build_on_meta_or_cpu(partial(whole_model, build, request.groups), "model")
        module = _load_submodel(client_task, request, model)
        with torch.no_grad():
            metrics = dict(evaluate_fn(module.eval(), user_config(request, client_task), context))
        if violation := metrics_violation(metrics):
            raise InvalidValue(f"evaluate_fn must give {violation}; got {metrics}")
        return Message(
            RecordDict({EVALUATION_METRICS: MetricRecord({**metrics})}), reply_to=message
        )
    except Exception as error:  # a user's function may raise anything
        if isinstance(error, FedcoverError):
            why = str(error)
        else:
            log.exception("evaluation has failed")
            why = repr(error)
        failure = ConfigRecord({"why": why[:300]})
        return Message(RecordDict({EVALUATION_ERROR: failure}), reply_to=message)


def _load_submodel(client_task: ClientTask, request: TaskRequest, model: Model) -> nn.Module:
    """Build the module of a node's part, with the norm statistics that the server sent."""
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    reduction = decode_reduction(client_task.encoded, model)
    statistics = running_statistics(model.module)
    expected = {"params": expected_part(reduction, params)}
    if statistics:
        expected["statistics"] = expected_part(reduction, statistics)
    sections = unpack_sections(request.payloads[client_task.payload_index], expected)
    tensors = scatter_kept(reduction, sections["params"], params, "cpu")
    module = submodel(model.module, reduction, tensors)
    return load_tensors(module, sections["statistics"]) if statistics else module


def metrics_violation(metrics: Mapping[str, Any]) -> str:
    """Return what is wrong with the metrics of a node, or an empty string."""
    num_examples = metrics.get(NUM_EXAMPLES)
    if type(num_examples) is not int or not 1 <= num_examples <= MAX_SAMPLES:
        return f"{NUM_EXAMPLES} (a count in 1..{MAX_SAMPLES}) and numbers"
    are_numbers = all(
        type(value) in (int, float) and abs(value) < 1e300 for value in metrics.values()
    )
    if not are_numbers or len(metrics) > MAX_METRICS:
        return f"at most {MAX_METRICS} finite numbers, by name"
    return ""
