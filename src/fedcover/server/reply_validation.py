"""What a client may send back: every reply is compared with what was asked, before any of it is believed.

A reply is arrays by name and a few numbers. Its names, shapes and types are known before it comes, so nothing of it is
parsed that could be compared instead; nothing is unpickled, and what is too large is refused by its size alone.
"""

import hmac
import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.models.norms import statistics_key
from fedcover.server.npy_codec import (
    HEADER,
    ArraySpec,
    InvalidReply,
    RawArray,
    array_spec,
    as_array,
    decode_array,
    safe_repr,
)
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.types import Client, Params, Reduction, State, Task, Update

REJECTION_REASONS = {
    "unknown nonce": "the reply answers no task that is out, or another client's",
    "replayed nonce": "the task was answered before, or its round ended more than four rounds ago",
    "late": "the reply came after its round had ended",
    "too large": "the reply has more bytes than an answer to its task can have",
    "malformed metrics": "the numbers beside the arrays are not the expected ones, not finite, or beyond 3.4e38",
    "missing array": "an array that was asked for is not there",
    "extra array": "an array came that nobody asked for",
    "pickled": "an array is stored in another way than NumPy's own, or as Python objects",
    "wrong dtype": "an array's numbers are of another type, as declared or as stored",
    "wrong shape": "an array has another shape, as declared or as stored",
    "damaged array": "an array's bytes are no stored array, or not as many as its shape needs",
    "not finite": "an array holds NaN or infinity",
    "negative variance": "a running variance is below zero",
    "absurd norm": "the update is longer than any honest one",
    "mask malformed": "the mask of trained entries is too short, or sets bits beyond its end",
    "mask over capacity": "the mask, or what is measured of it, is not that of the entries that the client was given",
}
"""Why a reply is refused: the whole list."""

NORM_LIMIT = 1e6
"""Updates longer than this are not believed."""
MAX_METRIC = float(np.finfo(np.float32).max)
"""No number beside the arrays is larger: means of a few that are near the largest double would overflow."""
LATE_ROUNDS_KEPT = 4
"""Rounds of which is remembered who was late; whoever comes later still is refused like one who has answered."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """A reply as it arrived; nothing in it can be trusted to be of any type."""

    nonce: Any
    client: Any
    arrays: Mapping[Any, RawArray]
    metrics: Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class PendingTask:
    """A task that was sent: who was asked, for which part of which tensors, and how large an answer may be.

    `allow_bits` clients may say which entries of their part they trained; kinds in `marks` are measured as that number in
    the mask and 0 outside of it.
    """

    nonce: str
    client: Client
    reduction: Reduction
    params: Params
    statistics: Params = field(default_factory=dict)
    measures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("loss",)
    allow_bits: bool = True
    marks: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> Params:
        """The part that the client began with."""
        return self.reduction.extract(self.params)

    @cached_property
    def wanted(self) -> dict[str, ArraySpec]:
        """Every array that may come, by name; only bits may be left out."""
        masks, part = self.reduction.gradient_mask(), self.start
        plain = {
            f"params/{name}": array_spec(tensor, masks.get(name)) for name, tensor in part.items()
        }
        plain |= {
            f"buffers/{n}": array_spec(t)
            for n, t in self.reduction.extract(self.statistics).items()
        }
        whole = without_masks(self.reduction).extract(self.params)
        for kind, names in self.measures.items():
            plain |= {
                f"measured/{kind}/{name}": array_spec(whole[name])
                for name in names
                if name in whole
            }
        chosen = part if self.allow_bits else {}
        return plain | {
            f"bits/{n}": ArraySpec((-(-t.numel() // 8),), "uint8", True) for n, t in chosen.items()
        }

    @cached_property
    def byte_limit(self) -> int:
        """More bytes than any honest answer has."""
        return sum(wanted.bytes + HEADER for wanted in self.wanted.values())


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a reply is not used: a reason from the table, and what exactly is wrong, safe to print."""

    client: int | None
    reason: str
    detail: str


def pending_task(
    nonce: str,
    task: Task,
    state: State,
    client: Client,
    reduction: Reduction,
    *,
    allow_bits: bool = True,
) -> PendingTask:
    """What is asked of a client that is sent its part of the model."""
    known = state.statistics.get(statistics_key(task.norm, client.capacity) or "", {})
    scope = {
        "all": tuple(state.params),
        "prunable": task.model.prunable,
        "round": task.model.prunable,
    }
    measures = {kind: scope[which] for kind, which in task.recipe.measures.items()}
    marks = {
        kind: state.round + 1 for kind, which in task.recipe.measures.items() if which == "round"
    }
    return PendingTask(
        nonce, client, reduction, state.params, known, measures, allow_bits=allow_bits, marks=marks
    )


def pack_update(update: Update) -> dict[str, np.ndarray]:
    """The arrays in which a client sends its update: kept weights only, and bits where it chose what it trained.

    What is private stays with the client.
    """
    masks = update.sent.gradient_mask()
    arrays = {
        f"params/{name}": as_array(t[masks[name]] if name in masks else t)
        for name, t in update.params.items()
    }
    arrays |= {f"buffers/{name}": as_array(tensor) for name, tensor in update.buffers.items()}
    for kind, tensors in update.measured.items():
        arrays |= {f"measured/{kind}/{name}": as_array(tensor) for name, tensor in tensors.items()}
    chosen = update.trained.bits if isinstance(update.trained, TrainedSubset) else {}
    for name, bits in chosen.items():
        held = bits & masks[name].to(bits.device) if name in masks else bits
        arrays[f"bits/{name}"] = np.packbits(as_array(held).ravel())
    return arrays


def nonce_of(number: int, secret: bytes) -> str:
    """A task's number with a seal: 128 bits that nobody can guess, and that tell whether they are ours.

    >>> len(nonce_of(7, b"secret")), nonce_of(7, b"secret")[:16]
    (48, '0000000000000007')
    """
    return f"{number:016x}{hmac.new(secret, str(number).encode(), 'sha256').hexdigest()[:32]}"


def validate_reply(raw: RawReply, asked: PendingTask) -> Update | Rejection:
    """The update in a reply that is exactly what was asked for; otherwise why it is refused. Never raises."""
    try:
        return _checked(raw, asked)
    except InvalidReply as refused:
        return Rejection(asked.client.id, refused.reason, refused.detail)


class TaskLedger:
    """The tasks that are out: each has a nonce of its own that is good for one reply, whether it is accepted or not.

    >>> from fedcover.submodels.reductions import Masks
    >>> ledger = TaskLedger()
    >>> asked = ledger.issue(lambda nonce: PendingTask(nonce, Client(7, 1.0, 0, 10, ()), Masks({}), {}))
    >>> raw = RawReply(asked.nonce, 7, {}, {"loss": 0.5})
    >>> ledger.receive(raw).loss, ledger.receive(raw).reason
    (0.5, 'replayed nonce')
    """

    def __init__(self) -> None:
        self._secret, self._given = secrets.token_bytes(32), 0
        self._open: dict[str, PendingTask] = {}
        self._late: deque[frozenset[str]] = deque(maxlen=LATE_ROUNDS_KEPT)  # by round

    def issue(self, make: Callable[[str], PendingTask]) -> PendingTask:
        """A task with a fresh nonce; `make` is given the nonce."""
        self._given += 1
        asked = make(nonce_of(self._given, self._secret))
        self._open[asked.nonce] = asked
        return asked

    def names(self, nonce: object) -> Container[str] | None:
        """The names of the arrays that an answer to a task may have; None if no such task is out."""
        asked = self._open.get(nonce) if isinstance(nonce, str) else None
        return None if asked is None else asked.wanted

    def receive(self, raw: RawReply) -> Update | Rejection:
        """Check a reply against the task that its nonce names, and use up the nonce."""
        asked = self._open.get(raw.nonce) if isinstance(raw.nonce, str) else None
        if asked is None or type(raw.client) is not int or raw.client != asked.client.id:
            reason = self._reason(raw.nonce) if isinstance(raw.nonce, str) else "unknown nonce"
            claimed = raw.client if type(raw.client) is int else None
            return Rejection(
                claimed, reason, f"nonce {safe_repr(raw.nonce)} of client {safe_repr(raw.client)}"
            )
        del self._open[asked.nonce]
        return validate_reply(raw, asked)

    def close(self) -> tuple[PendingTask, ...]:
        """End the round: what is still out is late from now on."""
        out = tuple(self._open.values())
        self._open.clear()
        self._late.append(frozenset(asked.nonce for asked in out))
        return out

    def _reason(self, nonce: str) -> str:
        """Why a nonce that came back is not taken."""
        if nonce in self._open:
            return "unknown nonce"  # to this client: it is another's
        if any(nonce in late for late in self._late):
            return "late"
        number = int(nonce[:16], 16) if re.fullmatch("[0-9a-f]{48}", nonce) else 0
        ours = 0 < number <= self._given and hmac.compare_digest(
            nonce, nonce_of(number, self._secret)
        )
        return "replayed nonce" if ours else "unknown nonce"


def _checked(raw: RawReply, asked: PendingTask) -> Update:
    _check_sizes(raw.arrays, asked)
    metrics = _check_metrics(raw.metrics, asked.metrics)
    _check_names(raw.arrays, asked)
    arrays = {
        name: decode_array(name, raw.arrays[name], wanted)
        for name, wanted in asked.wanted.items()
        if name in raw.arrays
    }
    params = _scatter_masked(_under("params/", arrays), asked)
    buffers = _under("buffers/", arrays)
    measured = {kind: _under(f"measured/{kind}/", arrays) for kind in asked.measures}
    _check_finite({"params": params, "buffers": buffers, **measured})
    _check_marks(measured, asked)
    _check_norms(asked, params, buffers)
    bits = {
        name: _decode_bits(name, packed, asked) for name, packed in _under("bits/", arrays).items()
    }
    trained = TrainedSubset(asked.reduction, bits) if bits else asked.reduction
    device = {name: tensor.device for name, tensor in asked.params.items()}
    params = {name: tensor.to(device[name]) for name, tensor in params.items()}
    return Update(
        asked.client, asked.reduction, trained, params, buffers, measured, {}, metrics["loss"]
    )


def _check_marks(measured: Mapping[str, Params], asked: PendingTask) -> None:
    """What the server knows itself must be so: the next masks are made of it."""
    masks = asked.reduction.gradient_mask()
    for kind, mark in asked.marks.items():
        for name, tensor in measured[kind].items():
            if not torch.equal(
                tensor, torch.full_like(tensor, mark) * masks.get(name, torch.tensor(1)).cpu()
            ):
                raise InvalidReply(
                    "mask over capacity",
                    f"measured/{kind}/{name} is not {mark} in the mask and 0 elsewhere",
                )


def _check_sizes(arrays: Mapping[Any, RawArray], asked: PendingTask) -> None:
    """Before anything else, and without looking into a single byte."""
    if not isinstance(arrays, Mapping) or not all(
        isinstance(array, RawArray) for array in arrays.values()
    ):
        raise InvalidReply("damaged array", "the reply has no arrays by name")
    sizes = [array.bytes for array in arrays.values()]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise InvalidReply("damaged array", "an array has no bytes")
    if sum(known) > asked.byte_limit:
        raise InvalidReply(
            "too large", f"{sum(known)} bytes; at most {asked.byte_limit} are possible"
        )


def _check_metrics(given: Mapping[Any, Any], names: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(given, Mapping) or set(given) != set(names):
        raise InvalidReply("malformed metrics", f"expected {', '.join(names)}")
    for name in names:
        value = given[name]
        if type(value) not in (int, float) or not abs(value) <= MAX_METRIC:
            raise InvalidReply("malformed metrics", f"{name} is {safe_repr(value)}")
    return {name: float(given[name]) for name in names}


def _check_names(arrays: Mapping[Any, RawArray], asked: PendingTask) -> None:
    for name in arrays:
        if name not in asked.wanted:
            raise InvalidReply("extra array", safe_repr(name))
    for name, wanted in asked.wanted.items():
        if name not in arrays and not wanted.bits:
            raise InvalidReply("missing array", name)


def _under(prefix: str, arrays: Mapping[str, Tensor]) -> Params:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _scatter_masked(values: Params, asked: PendingTask) -> Params:
    """The parameters in the client's shapes, with zeros where weights are cut."""
    masks = {name: mask.cpu() for name, mask in asked.reduction.gradient_mask().items()}
    return {
        name: torch.zeros(masks[name].shape, dtype=tensor.dtype).masked_scatter_(
            masks[name], tensor
        )
        if name in masks
        else tensor
        for name, tensor in values.items()
    }


def _check_finite(kinds: Mapping[str, Params]) -> None:
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise InvalidReply("not finite", f"{kind}/{name}")
            if kind == "buffers" and name.endswith("running_var") and bool((tensor < 0).any()):
                raise InvalidReply("negative variance", name)


def _check_norms(asked: PendingTask, params: Params, buffers: Params) -> None:
    """How far the client has moved everything from what it was given."""
    known = asked.reduction.extract(asked.statistics)
    for kind, new, old in (("params", params, asked.start), ("buffers", buffers, known)):
        squares = [
            float((t.double() - old[name].double().cpu()).square().sum()) for name, t in new.items()
        ]
        length = math.sqrt(sum(squares))
        if not length <= NORM_LIMIT:
            raise InvalidReply(
                "absurd norm", f"{kind} moved by {length:.3g}; at most {NORM_LIMIT:g} is believed"
            )


def _decode_bits(name: str, packed: Tensor, asked: PendingTask) -> Tensor:
    part = asked.start[name]
    unpacked = np.unpackbits(packed.numpy())
    if unpacked[part.numel() :].any():
        raise InvalidReply(
            "mask malformed", f"bits/{name} sets bits beyond its {part.numel()} entries"
        )
    bits = torch.from_numpy(unpacked[: part.numel()].astype(bool)).view(part.shape)
    masks = asked.reduction.gradient_mask()
    if name in masks and bool((bits & ~masks[name].cpu()).any()):
        raise InvalidReply("mask over capacity", f"bits/{name} claims weights that were cut")
    return bits.to(part.device)
