"""The messages themselves: one to each node with the work of all its clients, one back with all their answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcover.errors import InvalidValue

TASK, PARTS, REPORT, ANSWERS, EXTRA_CONFIG = "task", "parts", "report", "answers", "own"
PAYLOAD_STYPE = "fedcover.bundle"
ROWS, COLUMN, COLUMNS = "rows", "fedcover.column", ("samples", "labels")
"""Where an introduction tells of clients' rows, how, and what: as bytes, because Python makes no more of them."""
TRAIN, QUERY, EVALUATE = "train", "query", "evaluate"


@dataclass(frozen=True, slots=True)
class ClientTask:
    """One client's work as it travels: who it is, how its part is cut, and which of the message's parcels it gets."""

    client: int
    capacity: float
    slot: int
    encoded: bytes
    payload_index: int
    nonce: str


@dataclass(frozen=True)
class TaskRequest:
    """All that a node is asked to do in a round."""

    round: int
    lr: float
    threads: int
    experiment: str
    client_tasks: tuple[ClientTask, ...]
    payloads: tuple[bytes, ...]
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    groups: str = ""
    """The groups of a module of a user's own, which a node cannot trace without its values."""


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What comes back of one client: its tensors in a parcel, or why there are none."""

    client: int
    nonce: str
    loss: float
    samples: int
    payload: bytes
    error: str = ""


def request_message(node: int, request: TaskRequest, *, ttl: float, kind: str = TRAIN) -> Message:
    """The message with a node's work; without the node's answer in `ttl` seconds Flower forgets it."""
    task = ConfigRecord(
        {
            "round": request.round,
            "lr": request.lr,
            "threads": request.threads,
            "experiment": request.experiment,
            "groups": request.groups,
            "clients": [client_task.client for client_task in request.client_tasks],
            "nonces": [client_task.nonce for client_task in request.client_tasks],
            "capacities": [client_task.capacity for client_task in request.client_tasks],
            "slots": [client_task.slot for client_task in request.client_tasks],
            "encodings": [client_task.encoded for client_task in request.client_tasks],
            "parcels": [client_task.payload_index for client_task in request.client_tasks],
        }
    )
    parts = ArrayRecord(
        {str(place): _array(payload) for place, payload in enumerate(request.payloads)}
    )
    content = RecordDict(
        {TASK: task, PARTS: parts, EXTRA_CONFIG: ConfigRecord(dict(request.extra_config))}
    )
    return Message(
        content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=str(request.round)
    )


def read_request(message: Message) -> TaskRequest:
    """The work that `request_message` wrote; without parcels where these have been taken out."""
    content = message.content
    task: Any = content.config_records[TASK]
    parts: Mapping[str, Array] = content.array_records.get(PARTS, {})
    columns = ("clients", "capacities", "slots", "encodings", "parcels", "nonces")
    rows = zip(*(task[column] for column in columns), strict=True)
    payloads = tuple(parts[str(place)].data for place in range(len(parts)))
    return TaskRequest(
        task["round"], task["lr"], task["threads"], task["experiment"],
        tuple(ClientTask(*row) for row in rows), payloads, dict(content.config_records[EXTRA_CONFIG]),
        task.get("groups", ""),
    )  # fmt: skip


class SharedPayloads:
    """The parcels of a message, each kept until the last of the clients that share it has been given it.

    They are taken out of the message, so that a node has one copy of what it is sent, and no longer than it needs it.
    """

    def __init__(self, message: Message, request: TaskRequest) -> None:
        message.content.pop(PARTS, None)
        self._contents = dict(enumerate(request.payloads))
        self._waiting = Counter(client_task.payload_index for client_task in request.client_tasks)

    def pop_for(self, client_task: ClientTask) -> bytes:
        """A client's parcel, to which nothing else refers once it was the last client's."""
        self._waiting[client_task.payload_index] -= 1
        return (
            self._contents[client_task.payload_index]
            if self._waiting[client_task.payload_index]
            else self._contents.pop(client_task.payload_index)
        )


def result_message(message: Message, answers: Sequence[ClientResult]) -> Message:
    """The reply with the answers of all of a node's clients."""
    report = ConfigRecord(
        {
            "clients": [answer.client for answer in answers],
            "nonces": [answer.nonce for answer in answers],
            "losses": [float(answer.loss) for answer in answers],
            "samples": [answer.samples for answer in answers],
            "errors": [answer.error for answer in answers],
        }
    )
    payloads = ArrayRecord({str(a.client): _array(a.payload) for a in answers if not a.error})
    return Message(RecordDict({REPORT: report, ANSWERS: payloads}), reply_to=message)


def read_results(reply: Message) -> list[ClientResult]:
    """The answers in a reply, of which nothing is believed yet but that it has the form of one."""
    try:
        report: Any = reply.content.config_records[REPORT]
        payloads = reply.content.array_records[ANSWERS]
        columns = [
            list(report[column]) for column in ("clients", "nonces", "losses", "samples", "errors")
        ]
        rows = list(zip(*columns, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"the reply lacks what a reply must have: {error}") from error
    if any(
        type(v) is not kind
        for row in rows
        for v, kind in zip(row, (int, str, float, int, str), strict=True)
    ):
        raise InvalidValue("the reply's report has values of wrong types")
    answered = [str(client) for client, *_, error in rows if not error]
    if sorted(payloads) != sorted(answered):
        raise InvalidValue("the reply's arrays are not one for each client that answered")
    return [
        ClientResult(
            client, nonce, loss, samples, b"" if error else _parcel(payloads[str(client)]), error
        )
        for client, nonce, loss, samples, error in rows
    ]


def _array(payload: bytes) -> Array:
    return Array("uint8", (len(payload),), PAYLOAD_STYPE, payload)


def _parcel(array: Array) -> bytes:
    if array.stype != PAYLOAD_STYPE:
        raise InvalidValue(f"tensors must travel as {PAYLOAD_STYPE}; got {array.stype!r:.40}")
    return array.data
