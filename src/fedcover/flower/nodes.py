"""Which node holds which clients, and how much it can hold: what a node says of itself, and who is there."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcover.errors import InvalidValue
from fedcover.flower.input_scales import InputScale

if TYPE_CHECKING:  # it knows torch, without which an introduction is quick
    from fedcover.data.client_data import ClientDataInfo


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself: its place among the nodes, what it can hold, and with which version it works.

    A node that names no place has place -1 of 0, until the roster gives it one. `holdings` are the rows that it has,
    client by client, where clients' rows are on nodes, and `scale` is that of their inputs, if it tells.
    """

    node: int
    partition_id: int
    num_partitions: int
    capacity: float | None
    version: str
    holdings: Sequence["ClientDataInfo"] = ()
    scale: InputScale | None = None

    @property
    def partition(self) -> str:
        """The place in words.

        >>> NodeInfo(7, 1, 4, None, "1").partition, NodeInfo(7, *NO_PARTITION, None, "1").partition
        ('partition 1 of 4', 'no partition')
        """
        if self.partition_id < 0:
            return "no partition"
        return (
            f"partition {self.partition_id} of {self.num_partitions}"
            if self.num_partitions
            else f"partition {self.partition_id}"
        )


NO_PARTITION = (-1, 0)
"""Place and number of places of a node whose configuration names neither."""


def read_node_config(node: int, config: Mapping[str, Any], version: str) -> NodeInfo:
    """Read a node's configuration: `partition-id` and `num-partitions`, or neither, and, if it is there, `capacity`.

    >>> read_node_config(7, {"partition-id": 1, "num-partitions": 4, "capacity": 0.25}, "1.0").capacity
    0.25
    """
    partition_id, num_partitions = config.get("partition-id"), config.get("num-partitions")
    if partition_id is None and num_partitions is None:
        partition_id, num_partitions = NO_PARTITION
    elif (
        not isinstance(partition_id, int)
        or not isinstance(num_partitions, int)
        or not 0 <= partition_id < num_partitions
    ):
        raise InvalidValue(
            "a SuperNode needs --node-config 'partition-id=K num-partitions=N' with K in 0..N-1, or neither of them; "
            f"got partition-id {partition_id!r}, num-partitions {num_partitions!r}"
        )
    capacity = config.get("capacity")
    if capacity is not None and (not isinstance(capacity, int | float) or not 0 < capacity <= 1):
        raise InvalidValue(f"capacity in --node-config must be in (0, 1]; got {capacity!r}")
    return NodeInfo(
        node, partition_id, num_partitions, None if capacity is None else float(capacity), version
    )


def partition_of(client: int, clients: int, num_partitions: int) -> int:
    """The place that holds a client: neighbours together, places as equal as can be.

    >>> [partition_of(client, 5, 2) for client in range(5)]
    [0, 0, 0, 1, 1]
    """
    return client * num_partitions // clients


def clients_of(partition_id: int, clients: int, num_partitions: int) -> range:
    """The clients that a place holds: those whose `partition_of` it is.

    >>> clients_of(1, 5, 2)
    range(3, 5)
    """
    first, end = (
        -(-border * clients // num_partitions) for border in (partition_id, partition_id + 1)
    )
    return range(first, end)


def declared_fleet(
    introductions: Iterable[NodeInfo], clients: int, fallback: Sequence[float]
) -> str:
    """The fleet that the nodes declare; a client whose node declares nothing has the capacity of the fallback.

    Of several nodes that claim one place the first counts, as it does for who answers.

    >>> declared_fleet([NodeInfo(7, 0, 2, 0.25, "1")], 4, [1.0, 1.0, 1.0, 0.5])
    '2x0.25 + 1x1.0 + 1x0.5'
    """
    first: dict[int, NodeInfo] = {}
    for known in introductions:
        first.setdefault(known.partition_id, known)
    said = {
        partition_id: known.capacity
        for partition_id, known in first.items()
        if known.capacity is not None
    }
    num_partitions = next((first[partition_id].num_partitions for partition_id in said), 1)
    capacities = [
        said.get(partition_of(client, clients, num_partitions), fallback[client])
        for client in range(clients)
    ]
    alike = [
        (len(list(group)), np.format_float_positional(share, trim="0"))
        for share, group in groupby(capacities)
    ]
    return " + ".join(
        f"{count}x{share}" for count, share in alike
    )  # no exponents: a fleet is not written with them


@dataclass(frozen=True, slots=True)
class DataRequirements:
    """What rows that are on nodes must be like: of so many clients together, with labels and a shape that fit.

    `scale` is that of the server's inputs; rows of another one are taken with a warning.
    """

    clients: int
    classes: int
    shape: tuple[int, ...]
    scale: InputScale | None = None

    def violation(self, told: Sequence["ClientDataInfo"], mine: range) -> str:
        """Why rows are not those of some of the clients; nothing if they are."""
        if not told:
            return (
                "the rows of this experiment are on its nodes (partition 'nodes'): each needs its own, --node-config "
                "'rows=\"/path/of/file.npz\" ...', a file with train_x, train_y and, for several clients, train_owner"
            )
        if len(told) != len(mine):
            return (
                f"rows must be of {len(mine)} owners, as many as this node has of the {self.clients} clients "
                f"(train_owner says whose each is; without it all are of one); got {len(told)}"
            )
        if told[0].shape != self.shape:
            return f"train_x must have rows of shape {self.shape}, as the server has; got {told[0].shape}"
        most = max(max(holding.labels, default=0) for holding in told)
        if most >= self.classes:
            return f"train_y must be labels 0 to {self.classes - 1}, as the server has; got {most}"
        return ""

    def doubt(self, scale: InputScale | None) -> str:
        """Why rows may mean something else than the server's; nothing if they need not, or nobody tells."""
        if scale is None or self.scale is None or not scale.differs(self.scale):
            return ""
        return (
            f"its inputs seem to be scaled differently: {scale}; the server's are {self.scale}. It is taken all the "
            "same: numbers must mean the same everywhere"
        )


@dataclass
class NodeRegistry:
    """Who has introduced itself, in that order, who was refused, how often others were asked, and who was silent last.

    Two nodes may claim one place: a SuperNode that comes back may be a new node to Flower. The first claim holds while
    its node answers, so that nobody takes the place of a node that works. Where clients must keep their `capacities`, a
    node that holds less than those of its place is refused. Where clients' rows are on nodes,
    `requirements` says what these must be like, and `holdings` is what is known of them.

    A `movable` node is one that names no place. It gets the one with the fewest claims that it can hold, and another
    one when nobody answers for that. There are `num_partitions` of them, or, if it is `unlimited`, as many as nodes have come.
    """

    num_partitions: int | None = None
    capacities: Sequence[float] = ()
    requirements: DataRequirements | None = None
    holdings: dict[int, "ClientDataInfo"] = field(default_factory=dict)
    node_info: dict[int, NodeInfo] = field(default_factory=dict)
    rejected_nodes: set[int] = field(default_factory=set)
    num_queries: Counter[int] = field(default_factory=Counter)
    silent: set[int] = field(default_factory=set)
    connected_before: set[int] = field(default_factory=set)
    to_be_queried: set[int] = field(default_factory=set)
    unlimited: bool = False
    movable: set[int] = field(default_factory=set)

    def nodes_to_query(self, connected_nodes: Collection[int]) -> list[int]:
        """The nodes of those that are present that must say who they are: new ones, and such as may have changed."""
        settled = (
            self.connected_before & self.node_info.keys() - self.to_be_queried
        ) | self.rejected_nodes
        return sorted(set(connected_nodes) - settled)

    def moves(self, connected_nodes: Collection[int]) -> Iterator[tuple[str, NodeInfo]]:
        """Who of those that are known has come since the last look, or has left."""
        for node, introduced in self.node_info.items():
            if (node in connected_nodes) != (node in self.connected_before):
                yield ("came" if node in connected_nodes else "left"), introduced
        self.connected_before = self.node_info.keys() & set(connected_nodes)

    def members(
        self, connected_nodes: Collection[int], fallback: Sequence[float]
    ) -> dict[int, float]:
        """The clients whose node is present, with the capacity that it declares; else that of the fallback.

        >>> node_registry = NodeRegistry(num_partitions=2, node_info={7: NodeInfo(7, 1, 2, 0.25, "1")})
        >>> node_registry.members({7}, [1.0, 1.0, 1.0, 1.0])
        {2: 0.25, 3: 0.25}
        """
        clients = len(fallback)
        found: dict[int, float] = {}
        for partition_id, node in sorted(self.node_of_partition(connected_nodes).items()):
            declared = self.node_info[node].capacity
            mine = clients_of(partition_id, clients, self.num_partitions or 1)
            found |= {client: fallback[client] if declared is None else declared for client in mine}
        return found

    def add(self, introduced: NodeInfo, connected_nodes: Collection[int] = ()) -> None:
        """Remember a node; refused if it counts other places than the rest, or holds too little for its clients.

        `connected_nodes` are the nodes whose places are not free.
        """
        if introduced.partition_id < 0:
            introduced = self._with_partition(introduced, connected_nodes)
        self.num_partitions = self.num_partitions or introduced.num_partitions or None
        if introduced.num_partitions != (self.num_partitions or 0):
            raise InvalidValue(
                f"num-partitions must be {self.num_partitions}, as elsewhere; got {introduced.num_partitions}"
            )
        partition_id = introduced.partition_id
        if not self._fits(introduced, partition_id):
            raise InvalidValue(
                f"capacity must be at least {self._needed(partition_id):g}, as the clients of partition {partition_id} have had "
                f"since the run began; got {introduced.capacity:g} (a new run would take it)"
            )
        if self.requirements is not None:
            self._note_rows(
                introduced,
                self.requirements,
                clients_of(
                    introduced.partition_id, self.requirements.clients, introduced.num_partitions
                ),
            )
        self.node_info[introduced.node] = introduced
        self.to_be_queried.discard(introduced.node)
        self.num_queries[introduced.node] = (
            0  # it answers, so it may be asked again when it has been away
        )

    def _with_partition(self, introduced: NodeInfo, connected_nodes: Collection[int]) -> NodeInfo:
        """The same node with a place of its own."""
        if self.requirements is not None:
            raise InvalidValue(
                "a node with rows of its own needs --node-config 'partition-id=K num-partitions=N', so that its "
                "clients are the same whenever it comes"
            )
        if self.num_partitions is None and not self.unlimited:
            raise InvalidValue(
                "a node without partition-id needs a run that says how many nodes share the clients (--nodes N)"
            )
        self.movable.add(introduced.node)
        before = self.node_info.get(introduced.node)
        partition_id = (
            self._least_claimed_partition(introduced, connected_nodes)
            if before is None
            else before.partition_id
        )
        return replace(
            introduced, partition_id=partition_id, num_partitions=self.num_partitions or 0
        )

    def _least_claimed_partition(
        self, introduced: NodeInfo, connected_nodes: Collection[int]
    ) -> int:
        claims = Counter(
            known.partition_id
            for node, known in self.node_info.items()
            if node in connected_nodes and node not in self.silent
        )
        num_partitions = range(self.num_partitions or len(self.node_info) + 1)
        fitting = [
            partition_id for partition_id in num_partitions if self._fits(introduced, partition_id)
        ]
        return min(
            fitting or num_partitions, key=lambda partition_id: (claims[partition_id], partition_id)
        )

    def reassign_vacant_partitions(self, connected_nodes: Collection[int]) -> None:
        """Give places that nobody answers for to movable nodes that have nothing to answer for."""
        node_of_partition = self.node_of_partition(connected_nodes)
        busy = set(node_of_partition.values())
        spare = [
            node
            for node in self.node_info
            if node in connected_nodes and node in self.movable - self.silent - busy
        ]
        for partition_id in range(self.num_partitions or 0):
            if node_of_partition.get(partition_id) in self.silent | {None}:
                node = next(
                    (node for node in spare if self._fits(self.node_info[node], partition_id)), None
                )
                if node is not None:
                    spare.remove(node)
                    self.node_info[node] = replace(self.node_info[node], partition_id=partition_id)

    def _note_rows(self, introduced: NodeInfo, requirements: DataRequirements, mine: range) -> None:
        if violation := requirements.violation(introduced.holdings, mine):
            raise InvalidValue(violation)
        others = (known for node, known in self.node_info.items() if node not in self.silent)
        if all(known.partition_id != introduced.partition_id for known in others):
            self.holdings.update(zip(mine, introduced.holdings, strict=True))

    def _fits(self, introduced: NodeInfo, partition_id: int) -> bool:
        return introduced.capacity is None or introduced.capacity >= self._needed(partition_id)

    def _needed(self, partition_id: int) -> float:
        mine = clients_of(partition_id, len(self.capacities), self.num_partitions or 1)
        return max((self.capacities[client] for client in mine), default=0.0)

    def node_of_partition(self, connected_nodes: Iterable[int]) -> dict[int, int]:
        """The node that answers for each place, among those that are present."""
        here = set(connected_nodes)
        candidates = [node for node in self.node_info if node in here]
        node_of_partition: dict[int, int] = {}
        for node in sorted(
            candidates, key=lambda node: node in self.silent
        ):  # stable: else by order of claims
            node_of_partition.setdefault(self.node_info[node].partition_id, node)
        return node_of_partition
