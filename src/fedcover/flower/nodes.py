"""What a node is: its configuration, its partition of the clients, and the data it must have."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcover.errors import InvalidValue
from fedcover.flower.input_scales import InputScale

if TYPE_CHECKING:  # it imports torch, which would delay the answer to a query
    from fedcover.types import ClientInfo

MESSAGE_FORMAT = 2
"""The format of messages: 2 since tensors travel as safetensors. Nodes before it report none."""
NO_PARTITION = (-1, 0)
"""The partition id and the number of partitions of a node whose configuration names neither."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node reports about itself.

    A node without a partition has `NO_PARTITION` until the registry assigns one.
    `client_info` describe its clients' rows, if clients' data are on nodes; `scale` is that of
    their inputs, if the node reports it. `message_format` is `MESSAGE_FORMAT` as the node knows it.
    """

    node: int
    partition_id: int
    num_partitions: int
    capacity: float | None
    version: str
    client_info: Sequence["ClientInfo"] = ()
    scale: InputScale | None = None
    message_format: int = MESSAGE_FORMAT

    @property
    def partition(self) -> str:
        """Name the partition for people.

        >>> NodeInfo(7, 1, 4, None, "1").partition, NodeInfo(7, *NO_PARTITION, None, "1").partition
        ('partition 1 of 4', 'no partition')
        """
        if self.partition_id < 0:
            return "no partition"
        if not self.num_partitions:
            return f"partition {self.partition_id}"
        return f"partition {self.partition_id} of {self.num_partitions}"


def read_node_config(node: int, config: Mapping[str, Any], version: str) -> NodeInfo:
    """Read `partition-id` with `num-partitions`, or neither, and the optional `capacity`.

    >>> config = {"partition-id": 1, "num-partitions": 4, "capacity": 0.25}
    >>> read_node_config(7, config, "1.0").capacity
    0.25
    """
    partition_id, num_partitions = _read_partition(config)
    capacity = config.get("capacity")
    if capacity is not None:
        if not isinstance(capacity, int | float) or not 0 < capacity <= 1:
            raise InvalidValue(f"capacity in --node-config must be in (0, 1]; got {capacity!r}")
        capacity = float(capacity)
    return NodeInfo(node, partition_id, num_partitions, capacity, version)


def _read_partition(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the partition id and the number of partitions in a node's configuration."""
    partition_id, num_partitions = config.get("partition-id"), config.get("num-partitions")
    if partition_id is None and num_partitions is None:
        return NO_PARTITION
    if (
        not isinstance(partition_id, int)
        or not isinstance(num_partitions, int)
        or not 0 <= partition_id < num_partitions
    ):
        raise InvalidValue(
            "a SuperNode needs --node-config 'partition-id=K num-partitions=N' with K in 0..N-1, "
            f"or neither of them; got partition-id {partition_id!r}, "
            f"num-partitions {num_partitions!r}"
        )
    return partition_id, num_partitions


def partition_of(client: int, clients: int, num_partitions: int) -> int:
    """Return the partition of a client; partitions are consecutive and of nearly equal size.

    >>> [partition_of(client, 5, 2) for client in range(5)]
    [0, 0, 0, 1, 1]
    """
    return client * num_partitions // clients


def clients_of(partition_id: int, clients: int, num_partitions: int) -> range:
    """Return the clients of a partition, the inverse of `partition_of`.

    >>> clients_of(1, 5, 2)
    range(3, 5)
    """
    first = -(-partition_id * clients // num_partitions)
    end = -(-(partition_id + 1) * clients // num_partitions)
    return range(first, end)


def declared_fleet(nodes: Iterable[NodeInfo], clients: int, fallback: Sequence[float]) -> str:
    """Return the fleet that the nodes declare, with fallback capacities where they declare none.

    If several nodes claim one partition, the first one counts, as it does for training.

    >>> declared_fleet([NodeInfo(7, 0, 2, 0.25, "1")], 4, [1.0, 1.0, 1.0, 0.5])
    '2x0.25 + 1x1.0 + 1x0.5'
    """
    first_claims: dict[int, NodeInfo] = {}
    for info in nodes:
        first_claims.setdefault(info.partition_id, info)
    declared = {
        partition_id: info.capacity
        for partition_id, info in first_claims.items()
        if info.capacity is not None
    }
    num_partitions = next((first_claims[id].num_partitions for id in declared), 1)
    capacities = [
        declared.get(partition_of(client, clients, num_partitions), fallback[client])
        for client in range(clients)
    ]
    terms = []
    for capacity, group in groupby(capacities):
        # positional: the notation of fleets has no exponents
        terms.append(f"{len(list(group))}x{np.format_float_positional(capacity, trim='0')}")
    return " + ".join(terms)


@dataclass(frozen=True, slots=True)
class DataRequirements:
    """What clients' rows on nodes must be like: how many clients, which labels and which shape.

    `scale` is that of the server's inputs; rows of another scale only cause a warning.
    """

    clients: int
    classes: int
    shape: tuple[int, ...]
    scale: InputScale | None = None

    def violation(self, client_info: Sequence["ClientInfo"], clients: range) -> str:
        """Return why rows cannot be those of the given clients, or an empty string."""
        if not client_info:
            return (
                "the rows of this experiment are on its nodes (partition 'nodes'): each needs its "
                "own, --node-config 'rows=\"/path/of/file.npz\" ...', a file with train_x, "
                "train_y and, for several clients, train_owner"
            )
        if len(client_info) != len(clients):
            return (
                f"rows must be of {len(clients)} owners, as many as this node has of the "
                f"{self.clients} clients (train_owner says whose each is; without it all are of "
                f"one); got {len(client_info)}"
            )
        if client_info[0].shape != self.shape:
            return (
                f"train_x must have rows of shape {self.shape}, as the server has; "
                f"got {client_info[0].shape}"
            )
        largest_label = max(max(info.labels, default=0) for info in client_info)
        if largest_label >= self.classes:
            return (
                f"train_y must be labels 0 to {self.classes - 1}, as the server has; "
                f"got {largest_label}"
            )
        return ""

    def doubt(self, scale: InputScale | None) -> str:
        """Return why a node's inputs may be scaled differently, or an empty string."""
        if scale is None or self.scale is None or not scale.differs(self.scale):
            return ""
        return (
            f"its inputs seem to be scaled differently: {scale}; the server's are {self.scale}. "
            "It is accepted, but numbers must mean the same everywhere"
        )
