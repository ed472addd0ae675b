"""Validation of replies: a reply from a client is used only if it is exactly what was asked for.

Names, shapes and types of all arrays are known before a reply arrives, so they are compared, never
parsed. Nothing is unpickled. Cheap checks come first; see `_validate` for their order.

A reply that fails a check becomes a `Rejection` with one of the reasons in `REJECTION_REASONS`. The
checks raise `InvalidReply` internally; `validate_reply` never raises. Whether a reply belongs to a
pending task at all is the concern of `task_ledger`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.server.raw_arrays import InvalidReply, RawArray, decode_array, safe_repr
from fedcover.server.reply_format import PendingTask, RawReply
from fedcover.submodels.reductions import TrainedSubset
from fedcover.tensors import norm
from fedcover.types import Params, Update

REJECTION_REASONS = {
    "unknown nonce": "the reply belongs to no pending task, or to that of another client",
    "replayed nonce": "the task was answered before, or its round ended more than four rounds ago",
    "round closed": "the reply came after its round had ended",
    "too large": "the reply has more bytes than any valid reply to its task",
    "malformed metrics": "the metrics are not the expected ones, not finite, or beyond 3.4e38",
    "missing array": "an expected array is missing",
    "extra array": "the reply has an array that was not asked for",
    "wrong dtype": "an array has another number type",
    "wrong shape": "an array has another shape",
    "damaged array": "an array does not have the number of bytes that its shape needs",
    "not finite": "an array holds NaN or infinity",
    "negative variance": "a running variance is below zero",
    "absurd norm": "the update is longer than any honest one",
    "mask malformed": "the mask of trained entries is too short, or sets bits beyond its end",
    "mask over capacity": (
        "the mask, or a measurement of it, claims entries that the client was not given"
    ),
}
"""All reasons for which a reply is rejected, with their meaning."""

NORM_LIMIT = 1e6
"""The largest accepted length of an update."""
MAX_METRIC = float(np.finfo(np.float32).max)
"""The largest accepted metric: a mean of numbers near the largest double would overflow."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected reply: a reason from `REJECTION_REASONS`, and a detail that is safe to log.

    The reason is empty if no array was validated; the detail then says all.
    """

    client: int | None
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.reason else self.detail


def validate_reply(raw: RawReply, task: PendingTask) -> Update | Rejection:
    """Validate a reply to a task. Never raises.

    Args:
        raw: the reply as it arrived.
        task: the task that the reply answers.

    Returns:
        The client's update if the reply is exactly what was asked for, otherwise a rejection.
    """
    try:
        return _validate(raw, task)
    except InvalidReply as error:
        return Rejection(task.client.id, error.reason, error.detail)


def _validate(raw: RawReply, task: PendingTask) -> Update:
    """Run all checks, and raise at the first that fails.

    1. The total size, without reading any bytes.
    2. The metrics and the names of the arrays.
    3. Each array by itself: format, type and shape (`decode_array`).
    4. The values: finite, consistent with the mask, and not absurdly far from the sent model.
    """
    _check_total_size(raw.arrays, task)
    metrics = _checked_metrics(raw.metrics, task.metrics)
    _check_names(raw.arrays, task)
    tensors = {
        name: decode_array(name, raw.arrays[name], spec)
        for name, spec in task.expected_arrays.items()
        if name in raw.arrays
    }
    params = _restore_shapes(_with_prefix("params/", tensors), task)
    buffers = _with_prefix("buffers/", tensors)
    measured = {kind: _with_prefix(f"measured/{kind}/", tensors) for kind in task.measures}
    _check_finite({"params": params, "buffers": buffers, **measured})
    _check_variances(buffers)
    _check_marks(measured, task)
    _check_norm("params", params, task.start)
    _check_norm("buffers", buffers, task.reduction.extract(task.statistics))
    bits = {
        name: _unpack_bits(name, packed, task)
        for name, packed in _with_prefix("bits/", tensors).items()
    }
    return Update(
        client=task.client,
        sent=task.reduction,
        trained=TrainedSubset(task.reduction, bits) if bits else task.reduction,
        params={name: tensor.to(task.params[name].device) for name, tensor in params.items()},
        buffers=buffers,
        measured=measured,
        private={},
        loss=metrics["loss"],
    )


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Params:
    """Select the tensors whose names have a prefix, and remove it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


# ── the reply as a whole ────────────────────────────────────────────────────────────────────────


def _check_total_size(arrays: Mapping[Any, RawArray], task: PendingTask) -> None:
    if not isinstance(arrays, Mapping):
        raise InvalidReply("damaged array", "the reply has no arrays by name")
    total = 0
    for array in arrays.values():
        if not isinstance(array, RawArray):
            raise InvalidReply("damaged array", "the reply has no arrays by name")
        if array.bytes is None:
            raise InvalidReply("damaged array", "an array has no bytes")
        total += array.bytes
    if total > task.byte_limit:
        raise InvalidReply("too large", f"{total} bytes; at most {task.byte_limit} are possible")


def _checked_metrics(metrics: Mapping[Any, Any], names: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics if they have exactly these names and are finite numbers."""
    if not isinstance(metrics, Mapping) or set(metrics) != set(names):
        raise InvalidReply("malformed metrics", f"expected {', '.join(names)}")
    for name in names:
        value = metrics[name]
        is_number = type(value) in (int, float)
        if not is_number or not abs(value) <= MAX_METRIC:  # NaN is not <= anything
            raise InvalidReply("malformed metrics", f"{name} is {safe_repr(value)}")
    return {name: float(metrics[name]) for name in names}


def _check_names(arrays: Mapping[Any, RawArray], task: PendingTask) -> None:
    for name in arrays:
        if name not in task.expected_arrays:
            raise InvalidReply("extra array", safe_repr(name))
    for name, spec in task.expected_arrays.items():
        if name not in arrays and not spec.bits:
            raise InvalidReply("missing array", name)


# ── the values ──────────────────────────────────────────────────────────────────────────────────


def _restore_shapes(values: Params, task: PendingTask) -> Params:
    """Put masked parameters back in the client's shapes, with zeros outside of the mask."""
    masks = task.reduction.gradient_mask()
    restored = dict(values)
    for name in values.keys() & masks.keys():
        mask = masks[name].cpu()
        zeros = torch.zeros(mask.shape, dtype=values[name].dtype)
        restored[name] = zeros.masked_scatter_(mask, values[name])
    return restored


def _check_finite(tensors_by_kind: Mapping[str, Params]) -> None:
    for kind, tensors in tensors_by_kind.items():
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise InvalidReply("not finite", f"{kind}/{name}")


def _check_variances(buffers: Params) -> None:
    for name, tensor in buffers.items():
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise InvalidReply("negative variance", name)


def _check_marks(measured: Mapping[str, Params], task: PendingTask) -> None:
    """Check measurements whose values the server knows: the next masks are derived from them."""
    masks = task.reduction.gradient_mask()
    for kind, mark in task.marks.items():
        for name, tensor in measured[kind].items():
            mask = masks[name].cpu() if name in masks else torch.tensor(1)
            if not torch.equal(tensor, torch.full_like(tensor, mark) * mask):
                detail = f"measured/{kind}/{name} is not {mark} in the mask and 0 elsewhere"
                raise InvalidReply("mask over capacity", detail)


def _check_norm(kind: str, new: Params, old: Params) -> None:
    """Check how far the client moved the tensors of one kind from what it was sent."""
    length = norm(tensor.double() - old[name].double().cpu() for name, tensor in new.items())
    if not length <= NORM_LIMIT:
        detail = f"{kind} moved by {length:.3g}; at most {NORM_LIMIT:g} is accepted"
        raise InvalidReply("absurd norm", detail)


def _unpack_bits(name: str, packed: Tensor, task: PendingTask) -> Tensor:
    """Return the mask of trained entries of one parameter, in the client's shape."""
    start = task.start[name]
    size = start.numel()
    unpacked = np.unpackbits(packed.numpy())
    if unpacked[size:].any():
        raise InvalidReply("mask malformed", f"bits/{name} sets bits beyond its {size} entries")
    bits = torch.from_numpy(unpacked[:size].astype(bool)).view(start.shape)
    masks = task.reduction.gradient_mask()
    if name in masks and bool((bits & ~masks[name].cpu()).any()):
        raise InvalidReply("mask over capacity", f"bits/{name} claims weights that were cut")
    return bits.to(start.device)
