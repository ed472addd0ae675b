"""The training messages and replies of `CoverageStrategy`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result
from torch import nn

from fedcover.errors import InvalidValue
from fedcover.flower.engine import validate_result
from fedcover.flower.messages import ClientTask, TaskRequest, read_results, request_message
from fedcover.flower.node_data import MAX_SAMPLES
from fedcover.flower.payloads import encode_reduction, gather_kept, prefix_names
from fedcover.server.reply_format import PendingTask
from fedcover.server.reply_validation import Rejection
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.server.task_ledger import TaskLedger
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.types import Client, Model, Params, Reduction, Update

EvaluateGlobalFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Evaluates the global model on the server after a round."""
_METRICS_BY_ROUND = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)


def training_message(
    node: int,
    round: int,
    client: Client,
    part: Reduction,
    model: Model,
    params: Params,
    ledger: TaskLedger,
    config: Mapping[str, Any],
    *,
    ttl: float,
) -> tuple[Message, int]:
    """Return the message with a node's part of the model, and the most bytes of its reply."""
    encoded, reduction = encode_reduction(part, model)
    tensors = gather_kept(reduction, reduction.extract(params))
    pending_task = ledger.issue(lambda nonce: PendingTask(nonce, client, reduction, params))
    request = TaskRequest(
        round=round,
        lr=0.0,
        threads=torch.get_num_threads(),
        experiment="",
        client_tasks=(
            ClientTask(client.id, client.capacity, client.slot, encoded, 0, pending_task.nonce),
        ),
        payloads=(pack_arrays(prefix_names({"params": tensors})),),
        extra_config=dict(config),
        groups=groups_to_json(model.groups),
    )
    return request_message(node, request, ttl=ttl), pending_task.byte_limit


def read_updates(
    replies: Iterable[Message], ledger: TaskLedger, on_reject: Callable[[str], None]
) -> list[Update]:
    """Return the valid updates, ordered by client; call `on_reject` with the reason for any other.

    The order makes results independent of who answers first.
    """
    updates: list[Update] = []
    for reply in replies:
        result = _read_update(reply, ledger)
        if isinstance(result, Rejection):
            on_reject(str(result))
        else:
            updates.append(result)
    return sorted(updates, key=lambda update: update.client.id)


def _read_update(reply: Message, ledger: TaskLedger) -> Update | Rejection:
    """Return the update in a node's reply, or why it is rejected."""
    if reply.has_error():
        detail = f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
        return Rejection(None, "", detail)
    try:
        results = read_results(reply)
    except InvalidValue as error:
        return Rejection(None, "", str(error))
    if len(results) != 1:
        return Rejection(None, "", f"{len(results)} answers, where one was expected")
    result = results[0]
    update = validate_result(result, ledger)
    if isinstance(update, Rejection):
        return update
    samples = result.samples
    if not 1 <= samples <= MAX_SAMPLES:
        detail = f"num-examples must be in 1..{MAX_SAMPLES}; got {samples}"
        return Rejection(result.client, "", detail)
    return replace(update, client=replace(update.client, samples=samples))


def module_params(module: nn.Module) -> Params:
    """Return the parameters of a module, without gradients."""
    return {name: p.detach() for name, p in module.named_parameters()}


def params_to_record(params: Params) -> ArrayRecord:
    """Return parameters as Flower's record of arrays."""
    return ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in params.items()})


def params_from_record(arrays: ArrayRecord, names: Iterable[str]) -> Params:
    """Return the named tensors of a record, as copies."""
    return {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in names}


def count_all_rounds(evaluate_fn: EvaluateGlobalFn, rounds_done: int) -> EvaluateGlobalFn:
    """Let a function for evaluation on the server count rounds from the beginning of the run."""
    return lambda server_round, arrays: evaluate_fn(server_round + rounds_done, arrays)


def renumber_rounds(result: Result, rounds_done: int) -> Result:
    """Count the rounds of a result from the beginning of the run."""
    for field in _METRICS_BY_ROUND:
        metrics_by_round = getattr(result, field)
        renumbered = {round + rounds_done: metrics for round, metrics in metrics_by_round.items()}
        setattr(result, field, renumbered)
    return result
