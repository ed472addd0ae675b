"""The messages of a round: one request to each node, one reply with the results of its clients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcover.errors import InvalidValue

# Names on the wire, such as "own", "parcels" and "rows", are kept from message format 2; change
# them only with `MESSAGE_FORMAT`.
TASK, PARTS, REPORT, ANSWERS, EXTRA_CONFIG = "task", "parts", "report", "answers", "own"
PAYLOAD_STYPE = "fedcover.safetensors"
CLIENT_INFO, CLIENT_INFO_STYPE = "rows", "fedcover.column"
CLIENT_INFO_ARRAYS = ("samples", "labels")
"""How a node describes its clients' rows: as bytes, since Python objects take more memory."""
TRAIN, QUERY, EVALUATE = "train", "query", "evaluate"

_REPORT_COLUMNS = {"clients": int, "nonces": str, "losses": float, "samples": int, "errors": str}


@dataclass(frozen=True, slots=True)
class ClientTask:
    """The work of one client: who it is, how its part is cut, and the index of its payload."""

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
    """The unit groups of a user's module; a node cannot trace it without values."""


@dataclass(frozen=True, slots=True)
class ClientResult:
    """The result of one client: a payload of tensors, or the error that prevented it."""

    client: int
    nonce: str
    loss: float
    samples: int
    payload: bytes
    error: str = ""


def request_message(node: int, request: TaskRequest, *, ttl: float, kind: str = TRAIN) -> Message:
    """Build the message with a node's work; Flower drops it after `ttl` seconds without a reply."""
    client_tasks = request.client_tasks
    task = ConfigRecord(
        {
            "round": request.round,
            "lr": request.lr,
            "threads": request.threads,
            "experiment": request.experiment,
            "groups": request.groups,
            "clients": [client_task.client for client_task in client_tasks],
            "nonces": [client_task.nonce for client_task in client_tasks],
            "capacities": [client_task.capacity for client_task in client_tasks],
            "slots": [client_task.slot for client_task in client_tasks],
            "encodings": [client_task.encoded for client_task in client_tasks],
            "parcels": [client_task.payload_index for client_task in client_tasks],
        }
    )
    payloads = {str(index): _to_array(payload) for index, payload in enumerate(request.payloads)}
    content = RecordDict(
        {
            TASK: task,
            PARTS: ArrayRecord(payloads),
            EXTRA_CONFIG: ConfigRecord(dict(request.extra_config)),
        }
    )
    group = str(request.round)
    return Message(content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=group)


def read_request(message: Message) -> TaskRequest:
    """Read the work that `request_message` wrote; without payloads if they have been removed."""
    content = message.content
    task: Any = content.config_records[TASK]
    arrays: Mapping[str, Array] = content.array_records.get(PARTS, {})
    columns = ("clients", "capacities", "slots", "encodings", "parcels", "nonces")
    rows = zip(*(task[column] for column in columns), strict=True)
    return TaskRequest(
        round=task["round"],
        lr=task["lr"],
        threads=task["threads"],
        experiment=task["experiment"],
        client_tasks=tuple(ClientTask(*row) for row in rows),
        payloads=tuple(_from_array(arrays[str(index)]) for index in range(len(arrays))),
        extra_config=dict(content.config_records[EXTRA_CONFIG]),
        groups=task.get("groups", ""),
    )


class SharedPayloads:
    """The payloads of a message, each kept until the last client that shares it has taken it.

    They are removed from the message, so that a node holds one copy, and only while it needs it.
    """

    def __init__(self, message: Message, request: TaskRequest) -> None:
        message.content.pop(PARTS, None)
        self._payloads = dict(enumerate(request.payloads))
        self._num_waiting = Counter(task.payload_index for task in request.client_tasks)

    def pop_for(self, client_task: ClientTask) -> bytes:
        """Return a client's payload, and drop it here if no other client waits for it."""
        index = client_task.payload_index
        self._num_waiting[index] -= 1
        return self._payloads[index] if self._num_waiting[index] else self._payloads.pop(index)


def result_message(message: Message, results: Sequence[ClientResult]) -> Message:
    """Build the reply with the results of all of a node's clients."""
    report = ConfigRecord(
        {
            "clients": [result.client for result in results],
            "nonces": [result.nonce for result in results],
            "losses": [float(result.loss) for result in results],
            "samples": [result.samples for result in results],
            "errors": [result.error for result in results],
        }
    )
    payloads = ArrayRecord(
        {str(result.client): _to_array(result.payload) for result in results if not result.error}
    )
    return Message(RecordDict({REPORT: report, ANSWERS: payloads}), reply_to=message)


def read_results(reply: Message) -> list[ClientResult]:
    """Read the results in a reply; only its form is checked here.

    Raises:
        InvalidValue: If the reply is not of the form that `result_message` writes.
    """
    try:
        report: Any = reply.content.config_records[REPORT]
        payloads = reply.content.array_records[ANSWERS]
        columns = [list(report[column]) for column in _REPORT_COLUMNS]
        rows = list(zip(*columns, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"the reply lacks a required field: {error}") from error
    for row in rows:
        for value, column_type in zip(row, _REPORT_COLUMNS.values(), strict=True):
            if type(value) is not column_type:
                raise InvalidValue("the reply's report has values of wrong types")
    successful = [str(client) for client, *_, why in rows if not why]
    if sorted(payloads) != sorted(successful):
        raise InvalidValue("the reply's arrays are not one for each client that answered")
    results = []
    for client, nonce, loss, samples, why in rows:
        payload = b"" if why else _from_array(payloads[str(client)])
        results.append(ClientResult(client, nonce, loss, samples, payload, why))
    return results


def _to_array(payload: bytes) -> Array:
    return Array("uint8", (len(payload),), PAYLOAD_STYPE, payload)


def _from_array(array: Array) -> bytes:
    if array.stype != PAYLOAD_STYPE:
        raise InvalidValue(
            f"tensors must travel as {PAYLOAD_STYPE}; got {array.stype!r:.40}: "
            "server and nodes need the same fedcover"
        )
    return array.data
