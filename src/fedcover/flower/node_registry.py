"""The nodes that take part in a run, and which of them answers for each partition."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedcover.errors import InvalidValue
from fedcover.flower.nodes import DataRequirements, NodeInfo, clients_of

if TYPE_CHECKING:  # it imports torch, which would delay the answer to a query
    from fedcover.types import ClientInfo


@dataclass
class NodeRegistry:
    """The registered nodes, in order of registration, and what is known about them.

    Two nodes may claim one partition, because Flower may take a returning SuperNode for a new one.
    The first claim counts while its node answers, so that no node loses its partition while it
    works.

    A `movable` node is one whose configuration names no partition. It gets the partition with the
    fewest claims that fits its capacity, and may move to one that nobody answers for.

    Attributes:
        num_partitions: The number of partitions; None until it is known.
        capacities: The least capacity for each client, if clients must keep theirs.
        requirements: What clients' rows must be like, if their data are on nodes.
        client_info: What is known about these rows, by client.
        node_info: The registered nodes.
        rejected_nodes: Nodes that cannot take part.
        num_queries: How often each node was queried since it last answered.
        unresponsive_nodes: Nodes that did not answer last time.
        connected_before: The registered nodes that were connected at the last look.
        to_be_queried: Registered nodes that may have changed.
        unlimited: Whether there may be as many partitions as nodes.
        movable: Nodes whose partition was assigned here.
    """

    num_partitions: int | None = None
    capacities: Sequence[float] = ()
    requirements: DataRequirements | None = None
    client_info: dict[int, "ClientInfo"] = field(default_factory=dict)
    node_info: dict[int, NodeInfo] = field(default_factory=dict)
    rejected_nodes: set[int] = field(default_factory=set)
    num_queries: Counter[int] = field(default_factory=Counter)
    unresponsive_nodes: set[int] = field(default_factory=set)
    connected_before: set[int] = field(default_factory=set)
    to_be_queried: set[int] = field(default_factory=set)
    unlimited: bool = False
    movable: set[int] = field(default_factory=set)

    def nodes_to_query(self, connected_nodes: Collection[int]) -> list[int]:
        """Return the connected nodes that are new or may have changed."""
        unchanged = self.connected_before & self.node_info.keys() - self.to_be_queried
        return sorted(set(connected_nodes) - unchanged - self.rejected_nodes)

    def moves(self, connected_nodes: Collection[int]) -> Iterator[tuple[str, NodeInfo]]:
        """Yield the registered nodes that came or left since the last call."""
        for node, info in self.node_info.items():
            is_connected = node in connected_nodes
            if is_connected != (node in self.connected_before):
                yield ("came" if is_connected else "left"), info
        self.connected_before = self.node_info.keys() & set(connected_nodes)

    def members(self, connected_nodes: Collection[int], clients: int) -> dict[int, float | None]:
        """Return the clients whose node is connected, each with the capacity that it declares.

        >>> registry = NodeRegistry(num_partitions=2, node_info={7: NodeInfo(7, 1, 2, 0.25, "1")})
        >>> registry.members({7}, clients=4)
        {2: 0.25, 3: 0.25}
        """
        capacities: dict[int, float | None] = {}
        for partition_id, node in sorted(self.node_of_partition(connected_nodes).items()):
            declared = self.node_info[node].capacity
            for client in clients_of(partition_id, clients, self.num_partitions or 1):
                capacities[client] = declared
        return capacities

    def capacity_of(self, node: int) -> float:
        """Return the capacity that a node declares; 1 if it declares none."""
        return self.node_info[node].capacity or 1.0

    def node_of_partition(self, connected_nodes: Iterable[int]) -> dict[int, int]:
        """Return the connected node that answers for each partition."""
        connected = set(connected_nodes)
        candidates = [node for node in self.node_info if node in connected]
        # stable: nodes that answer first, and among these the first claim
        candidates.sort(key=lambda node: node in self.unresponsive_nodes)
        node_of_partition: dict[int, int] = {}
        for node in candidates:
            node_of_partition.setdefault(self.node_info[node].partition_id, node)
        return node_of_partition

    def add(self, info: NodeInfo, connected_nodes: Collection[int] = ()) -> None:
        """Register a node.

        Args:
            info: What the node reports.
            connected_nodes: The nodes whose partitions are not vacant.

        Raises:
            InvalidValue: If the node does not fit the run.
        """
        if info.partition_id < 0:
            info = self._assign_partition(info, connected_nodes)
        self.num_partitions = self.num_partitions or info.num_partitions or None
        if info.num_partitions != (self.num_partitions or 0):
            raise InvalidValue(
                f"num-partitions must be {self.num_partitions}, as elsewhere; "
                f"got {info.num_partitions}"
            )
        if not self._fits(info, info.partition_id):
            raise InvalidValue(
                f"capacity must be at least {self._required_capacity(info.partition_id):g}, "
                f"as the clients of partition {info.partition_id} have had since the run began; "
                f"got {info.capacity:g} (a new run would accept it)"
            )
        if self.requirements is not None:
            self._add_client_info(info, self.requirements)
        self.node_info[info.node] = info
        self.to_be_queried.discard(info.node)
        self.num_queries[info.node] = 0  # so that it can be queried again after an absence

    def _add_client_info(self, info: NodeInfo, requirements: DataRequirements) -> None:
        """Check the rows of a node, and note them unless another node answers for them."""
        clients = clients_of(info.partition_id, requirements.clients, info.num_partitions)
        if violation := requirements.violation(info.client_info, clients):
            raise InvalidValue(violation)
        claimed = {
            other.partition_id
            for node, other in self.node_info.items()
            if node not in self.unresponsive_nodes
        }
        if info.partition_id not in claimed:
            self.client_info.update(zip(clients, info.client_info, strict=True))

    def _assign_partition(self, info: NodeInfo, connected_nodes: Collection[int]) -> NodeInfo:
        """Return the same node with a partition: its earlier one, or one with few claims."""
        if self.requirements is not None:
            raise InvalidValue(
                "a node with rows of its own needs --node-config 'partition-id=K "
                "num-partitions=N', so that its clients are the same whenever it comes"
            )
        if self.num_partitions is None and not self.unlimited:
            raise InvalidValue(
                "a node without partition-id needs a run that says how many nodes share the "
                "clients (--nodes N)"
            )
        self.movable.add(info.node)
        earlier = self.node_info.get(info.node)
        if earlier is None:
            partition_id = self._least_claimed_partition(info, connected_nodes)
        else:
            partition_id = earlier.partition_id
        return replace(info, partition_id=partition_id, num_partitions=self.num_partitions or 0)

    def _least_claimed_partition(self, info: NodeInfo, connected_nodes: Collection[int]) -> int:
        """Return the partition with the fewest claims among those that fit the node, if any do."""
        claims = Counter(
            other.partition_id
            for node, other in self.node_info.items()
            if node in connected_nodes and node not in self.unresponsive_nodes
        )
        partition_ids = range(self.num_partitions or len(self.node_info) + 1)
        fitting = [id for id in partition_ids if self._fits(info, id)]
        return min(fitting or partition_ids, key=lambda id: (claims[id], id))

    def reassign_vacant_partitions(self, connected_nodes: Collection[int]) -> None:
        """Move spare nodes to partitions that nobody answers for."""
        node_of_partition = self.node_of_partition(connected_nodes)
        movable = self.movable - self.unresponsive_nodes - set(node_of_partition.values())
        spare_nodes = [
            node for node in self.node_info if node in connected_nodes and node in movable
        ]
        for partition_id in range(self.num_partitions or 0):
            if node_of_partition.get(partition_id) not in self.unresponsive_nodes | {None}:
                continue
            for node in spare_nodes:
                info = self.node_info[node]
                if self._fits(info, partition_id):
                    spare_nodes.remove(node)
                    self.node_info[node] = replace(info, partition_id=partition_id)
                    break

    def _fits(self, info: NodeInfo, partition_id: int) -> bool:
        """Return whether a node can hold the parts of all clients of a partition."""
        return info.capacity is None or info.capacity >= self._required_capacity(partition_id)

    def _required_capacity(self, partition_id: int) -> float:
        clients = clients_of(partition_id, len(self.capacities), self.num_partitions or 1)
        return max((self.capacities[client] for client in clients), default=0.0)
