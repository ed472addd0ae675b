"""Nodes introduce themselves before they get work."""

import time
from collections.abc import Collection, Sequence

from fedcover.errors import InvalidValue, RunError
from fedcover.flower.events import EventLog
from fedcover.flower.nodes import NodeInfo, NodeRegistry
from fedcover.flower.transport import FailedReply, Transport
from fedcover.log import log
from fedcover.runs.metrics_log import WARNED
from fedcover.version import __version__

QUERY_TIMEOUT, MAX_QUERIES = 60.0, 3
"""Seconds that a node has to introduce itself, and how often it is asked before a round goes on without it for good."""


def register_new_nodes(
    transport: Transport, node_registry: NodeRegistry, event_log: EventLog, round: int
) -> None:
    """Ask nodes that nobody knows yet who they are."""
    connected_nodes = transport.connected_nodes()
    nodes_to_query = [
        node
        for node in node_registry.nodes_to_query(connected_nodes)
        if node_registry.num_queries[node] < MAX_QUERIES
    ]
    if nodes_to_query:
        _query_nodes(transport, node_registry, event_log, round, nodes_to_query)
        connected_nodes = transport.connected_nodes()
    node_registry.reassign_vacant_partitions(connected_nodes)
    for move, who in node_registry.moves(connected_nodes):
        holds = "" if who.capacity is None else f", capacity {who.capacity:g}"
        event_log.write(round, move, who.node, None, f"{who.partition}{holds}")


def _query_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    event_log: EventLog,
    round: int,
    nodes_to_query: Sequence[int],
) -> None:
    node_registry.num_queries.update(nodes_to_query)
    for node, said in transport.query_node_info(
        nodes_to_query, timeout=QUERY_TIMEOUT, rows=node_registry.requirements is not None
    ).items():
        why = (
            said.why
            if isinstance(said, FailedReply)
            else _try_register(said, node_registry, transport.connected_nodes())
        )
        if why:
            if not isinstance(said, FailedReply):
                transport.notify_rejected(node, why)
                why = f"{said.partition}: {why}"
            event = said.event if isinstance(said, FailedReply) else "rejected"
            if event == "rejected":
                node_registry.rejected_nodes.add(node)
            event_log.write(round, event, node, None, why)
        elif (
            isinstance(said, NodeInfo)
            and node_registry.requirements
            and (doubt := node_registry.requirements.doubt(said.scale))
        ):
            event_log.write(round, WARNED, node, None, f"{said.partition}: {doubt}")


def _try_register(
    said: NodeInfo, node_registry: NodeRegistry, connected_nodes: Collection[int]
) -> str:
    """Why a node that introduced itself cannot take part; nothing if it now does."""
    if said.version != __version__:
        return f"the node has fedcover {said.version!a:.40}, the server {__version__}"
    others = dict(node_registry.node_info)
    try:
        node_registry.add(said, connected_nodes)
    except InvalidValue as error:
        return str(error)
    partition_id = node_registry.node_info[said.node].partition_id
    first = next(
        (known.node for known in others.values() if known.partition_id == partition_id), None
    )
    if first not in (None, said.node) and first in connected_nodes:
        log.warning(
            "nodes %d and %d both claim partition %d: the first keeps it while it answers, with the capacity that it "
            "declares", first, said.node, partition_id,
        )  # fmt: skip
    return ""


def wait_for_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    event_log: EventLog,
    *,
    nodes: int,
    timeout: float,
) -> None:
    """Wait until a node answers for every place, or until patience runs out; complain if nobody has come."""
    node_registry.num_partitions = nodes or None
    end = time.monotonic() + timeout
    while True:
        register_new_nodes(transport, node_registry, event_log, 0)
        if (
            node_registry.num_partitions
            and len(node_registry.node_of_partition(transport.connected_nodes()))
            == node_registry.num_partitions
        ):
            return
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    found = len(node_registry.node_of_partition(transport.connected_nodes()))
    if not found:
        raise RunError(
            f"no SuperNode that can take part has come in {timeout:g} s: each needs fedcover {__version__} and "
            "--node-config 'partition-id=K num-partitions=N', or, in a run with --nodes N, neither"
        )
    log.warning(
        "after %g s nodes answer for %d of %s places; going on with these",
        timeout,
        found,
        node_registry.num_partitions,
    )
