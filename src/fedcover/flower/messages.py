"""The messages themselves: one to each node with the work of all its clients, one back with all their answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcover.errors import InvalidValue

TASK, PARTS, REPORT, ANSWERS, OWN = "task", "parts", "report", "answers", "own"
BUNDLE = "fedcover.bundle"
ROWS, COLUMN, COLUMNS = "rows", "fedcover.column", ("samples", "labels")
"""Where an introduction tells of clients' rows, how, and what: as bytes, because Python makes no more of them."""
TRAIN, QUERY, EVALUATE = "train", "query", "evaluate"


@dataclass(frozen=True, slots=True)
class Order:
    """One client's work as it travels: who it is, how its part is cut, and which of the message's parcels it gets."""

    client: int
    capacity: float
    slot: int
    encoded: bytes
    parcel: int
    nonce: str


@dataclass(frozen=True)
class Orders:
    """All that a node is asked to do in a round."""

    round: int
    lr: float
    threads: int
    experiment: str
    orders: tuple[Order, ...]
    parcels: tuple[bytes, ...]
    own: Mapping[str, Any] = field(default_factory=dict)
    groups: str = ""
    """The groups of a module of a user's own, which a node cannot trace without its values."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back of one client: its tensors in a parcel, or why there are none."""

    client: int
    nonce: str
    loss: float
    samples: int
    parcel: bytes
    error: str = ""


def to_node(node: int, orders: Orders, *, ttl: float, kind: str = TRAIN) -> Message:
    """The message with a node's work; without the node's answer in `ttl` seconds Flower forgets it."""
    task = ConfigRecord(
        {
            "round": orders.round,
            "lr": orders.lr,
            "threads": orders.threads,
            "experiment": orders.experiment,
            "groups": orders.groups,
            "clients": [order.client for order in orders.orders],
            "nonces": [order.nonce for order in orders.orders],
            "capacities": [order.capacity for order in orders.orders],
            "slots": [order.slot for order in orders.orders],
            "encodings": [order.encoded for order in orders.orders],
            "parcels": [order.parcel for order in orders.orders],
        }
    )
    parts = ArrayRecord({str(place): _array(parcel) for place, parcel in enumerate(orders.parcels)})
    content = RecordDict({TASK: task, PARTS: parts, OWN: ConfigRecord(dict(orders.own))})
    return Message(content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=str(orders.round))


def read_orders(message: Message) -> Orders:
    """The work that `to_node` wrote; without parcels where these have been taken out."""
    content = message.content
    task: Any = content.config_records[TASK]
    parts: Mapping[str, Array] = content.array_records.get(PARTS, {})
    columns = ("clients", "capacities", "slots", "encodings", "parcels", "nonces")
    rows = zip(*(task[column] for column in columns), strict=True)
    parcels = tuple(parts[str(place)].data for place in range(len(parts)))
    return Orders(
        task["round"], task["lr"], task["threads"], task["experiment"],
        tuple(Order(*row) for row in rows), parcels, dict(content.config_records[OWN]),
        task.get("groups", ""),
    )  # fmt: skip


class Parcels:
    """The parcels of a message, each kept until the last of the clients that share it has been given it.

    They are taken out of the message, so that a node has one copy of what it is sent, and no longer than it needs it.
    """

    def __init__(self, message: Message, orders: Orders) -> None:
        message.content.pop(PARTS, None)
        self._contents = dict(enumerate(orders.parcels))
        self._waiting = Counter(order.parcel for order in orders.orders)

    def given_to(self, order: Order) -> bytes:
        """A client's parcel, to which nothing else refers once it was the last client's."""
        self._waiting[order.parcel] -= 1
        return self._contents[order.parcel] if self._waiting[order.parcel] else self._contents.pop(order.parcel)


def to_server(message: Message, answers: Sequence[Answer]) -> Message:
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
    parcels = ArrayRecord({str(a.client): _array(a.parcel) for a in answers if not a.error})
    return Message(RecordDict({REPORT: report, ANSWERS: parcels}), reply_to=message)


def read_answers(reply: Message) -> list[Answer]:
    """The answers in a reply, of which nothing is believed yet but that it has the form of one."""
    try:
        report: Any = reply.content.config_records[REPORT]
        parcels = reply.content.array_records[ANSWERS]
        columns = [list(report[column]) for column in ("clients", "nonces", "losses", "samples", "errors")]
        rows = list(zip(*columns, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"the reply lacks what a reply must have: {error}") from error
    if any(type(v) is not kind for row in rows for v, kind in zip(row, (int, str, float, int, str), strict=True)):
        raise InvalidValue("the reply's report has values of wrong types")
    answered = [str(client) for client, *_, error in rows if not error]
    if sorted(parcels) != sorted(answered):
        raise InvalidValue("the reply's arrays are not one for each client that answered")
    return [
        Answer(client, nonce, loss, samples, b"" if error else _parcel(parcels[str(client)]), error)
        for client, nonce, loss, samples, error in rows
    ]


def _array(parcel: bytes) -> Array:
    return Array("uint8", (len(parcel),), BUNDLE, parcel)


def _parcel(array: Array) -> bytes:
    if array.stype != BUNDLE:
        raise InvalidValue(f"tensors must travel as {BUNDLE}; got {array.stype!r:.40}")
    return array.data
