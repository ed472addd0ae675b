"""The evaluation messages and replies of `CoverageStrategy`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Message, MetricRecord
from torch import Tensor

from fedcover.errors import printable
from fedcover.flower.client_evaluation import (
    EVALUATION_ERROR,
    EVALUATION_METRICS,
    NUM_EXAMPLES,
    metrics_violation,
)
from fedcover.flower.messages import EVALUATE, ClientTask, TaskRequest, request_message
from fedcover.flower.payloads import encode_reduction, gather_kept, prefix_names
from fedcover.models.norms import calibrate, running_statistics
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.build import submodel
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.types import Client, Model, Params, Reduction


def evaluation_message(
    node: int,
    round: int,
    client: Client,
    part: Reduction,
    model: Model,
    params: Params,
    calibration: Tensor | None,
    config: Mapping[str, Any],
    *,
    ttl: float,
) -> Message:
    """Return the message with a node's part of the model and that part's norm statistics."""
    encoded, reduction = encode_reduction(part, model)
    sections = {"params": gather_kept(reduction, reduction.extract(params))}
    if calibration is not None:
        module = calibrate(submodel(model.module, reduction, params), calibration)
        sections["statistics"] = running_statistics(module)
    request = TaskRequest(
        round=round,
        lr=0.0,
        threads=torch.get_num_threads(),
        experiment="",
        client_tasks=(ClientTask(client.id, client.capacity, client.slot, encoded, 0, ""),),
        payloads=(pack_arrays(prefix_names(sections)),),
        extra_config=dict(config),
        groups=groups_to_json(model.groups),
    )
    return request_message(node, request, ttl=ttl, kind=EVALUATE)


def aggregate_metrics(
    replies: Iterable[Message], on_reject: Callable[[str], None]
) -> MetricRecord | None:
    """Average every metric over the nodes that report it, weighted by their examples.

    Return None if no reply is valid; call `on_reject` with the reason for each one that is not.
    """
    node_metrics: list[dict[str, float]] = []
    for reply in replies:
        metrics = _read_metrics(reply)
        if isinstance(metrics, str):
            on_reject(metrics)
        else:
            node_metrics.append(metrics)
    if not node_metrics:
        return None
    return MetricRecord({**weighted_mean_metrics(node_metrics)})


def weighted_mean_metrics(
    node_metrics: Sequence[Mapping[str, float]],
) -> dict[str, int | float]:
    """Average the metrics of several nodes, weighted by examples; add up the examples.

    >>> first = {"num-examples": 1, "accuracy": 1.0}
    >>> weighted_mean_metrics([first, {"num-examples": 3, "accuracy": 0.0}])
    {'num-examples': 4, 'nodes': 2, 'accuracy': 0.25}
    """
    mean: dict[str, int | float] = {
        NUM_EXAMPLES: int(sum(metrics[NUM_EXAMPLES] for metrics in node_metrics)),
        "nodes": len(node_metrics),
    }
    names = {name: None for metrics in node_metrics for name in metrics if name not in mean}
    for name in names:
        reporting = [metrics for metrics in node_metrics if name in metrics]
        total = math.fsum(metrics[NUM_EXAMPLES] * metrics[name] for metrics in reporting)
        mean[name] = total / sum(metrics[NUM_EXAMPLES] for metrics in reporting)
    return mean


def _read_metrics(reply: Message) -> dict[str, float] | str:
    """Return the metrics in a node's reply, or the reason to reject it."""
    if reply.has_error():
        return f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
    if (failure := reply.content.config_records.get(EVALUATION_ERROR)) is not None:
        return f"its node says: '{printable(str(failure.get('why')))[:300]}'"
    if EVALUATION_METRICS not in reply.content.metric_records:
        return "the reply has no metrics"
    metrics: dict[str, Any] = dict(reply.content.metric_records[EVALUATION_METRICS])
    violation = metrics_violation(metrics)
    return f"its metrics must be {violation}" if violation else metrics
