"""Ask new nodes who they are before they get work."""

import time
from collections.abc import Collection, Sequence

from fedcover.errors import InvalidValue, RunError
from fedcover.flower.events import EventLog
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import MESSAGE_FORMAT, NodeInfo
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.sampling import Sampling
from fedcover.flower.transport import Transport
from fedcover.log import log
from fedcover.runs.metrics_log import WARNED
from fedcover.version import __version__

QUERY_TIMEOUT, MAX_QUERIES = 60.0, 3
"""The seconds that a node has to introduce itself, and how often it is asked in all."""
_PAUSE = 0.5
"""Seconds between two looks for new nodes."""


def register_new_nodes(
    transport: Transport, node_registry: NodeRegistry, event_log: EventLog, round: int
) -> None:
    """Query nodes that are not registered yet; record who joined and who left."""
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
    for event, info in node_registry.moves(connected_nodes):
        capacity = "" if info.capacity is None else f", capacity {info.capacity:g}"
        event_log.write(round, event, info.node, None, f"{info.partition}{capacity}")


def _query_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    event_log: EventLog,
    round: int,
    nodes_to_query: Sequence[int],
) -> None:
    """Ask nodes who they are, and register those that fit."""
    node_registry.num_queries.update(nodes_to_query)
    replies = transport.query_node_info(
        nodes_to_query, timeout=QUERY_TIMEOUT, client_info=node_registry.requirements is not None
    )
    for node, reply in replies.items():
        if isinstance(reply, FailedReply):
            if reply.event == "rejected":
                node_registry.rejected_nodes.add(node)
            event_log.write(round, reply.event, node, None, reply.why)
            continue
        why = _try_register(reply, node_registry, transport.connected_nodes())
        if why:
            transport.notify_rejected(node, why)
            node_registry.rejected_nodes.add(node)
            event_log.write(round, "rejected", node, None, f"{reply.partition}: {why}")
        elif doubt := _scale_doubt(reply, node_registry):
            event_log.write(round, WARNED, node, None, f"{reply.partition}: {doubt}")


def _scale_doubt(info: NodeInfo, node_registry: NodeRegistry) -> str:
    """Return why a node's inputs may be scaled differently, or an empty string."""
    if node_registry.requirements is None:
        return ""
    return node_registry.requirements.doubt(info.scale)


def _try_register(
    info: NodeInfo, node_registry: NodeRegistry, connected_nodes: Collection[int]
) -> str:
    """Register a node; return why it cannot take part, or an empty string."""
    if info.version != __version__:
        return f"the node has fedcover {info.version!a:.40}, the server {__version__}"
    if info.message_format != MESSAGE_FORMAT:
        return (
            f"the node's fedcover writes messages of format {info.message_format}, the server's "
            f"of format {MESSAGE_FORMAT}: install the server's fedcover on the node"
        )
    earlier_nodes = dict(node_registry.node_info)
    try:
        node_registry.add(info, connected_nodes)
    except InvalidValue as error:
        return str(error)
    partition_id = node_registry.node_info[info.node].partition_id
    first_claim = next(
        (
            earlier.node
            for earlier in earlier_nodes.values()
            if earlier.partition_id == partition_id
        ),
        None,
    )
    if first_claim not in (None, info.node) and first_claim in connected_nodes:
        log.warning(
            "nodes %d and %d both claim partition %d: the first keeps it while it answers, "
            "with the capacity that it declares",
            first_claim,
            info.node,
            partition_id,
        )
    return ""


def wait_for_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    event_log: EventLog,
    *,
    nodes: int,
    timeout: float,
) -> None:
    """Wait until a node answers for every partition, or until the time is up.

    Raises:
        RunError: If no node that can take part has connected by then.
    """
    node_registry.num_partitions = nodes or None
    deadline = time.monotonic() + timeout
    while True:
        register_new_nodes(transport, node_registry, event_log, 0)
        num_partitions = node_registry.num_partitions
        if num_partitions and _num_answering(transport, node_registry) == num_partitions:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    num_answering = _num_answering(transport, node_registry)
    if not num_answering:
        raise RunError(
            f"no SuperNode that can take part has connected in {timeout:g} s: "
            f"each needs fedcover {__version__} and --node-config "
            "'partition-id=K num-partitions=N', or, in a run with --nodes N, neither"
        )
    log.warning(
        "after %g s nodes answer for %d of %s partitions; continuing with these",
        timeout,
        num_answering,
        node_registry.num_partitions,
    )


def _num_answering(transport: Transport, node_registry: NodeRegistry) -> int:
    """Return the number of partitions that a connected node answers for."""
    return len(node_registry.node_of_partition(transport.connected_nodes()))


def wait_for_minimum_nodes(
    transport: Transport,
    node_registry: NodeRegistry,
    event_log: EventLog,
    sampling: Sampling,
    round: int,
) -> dict[int, int]:
    """Wait for the least number of nodes; return the node that answers for each partition.

    Raises:
        RunError: If fewer have connected when the time is up.
    """
    minimum = sampling.min_available_nodes
    deadline = time.monotonic() + sampling.wait
    while True:
        register_new_nodes(transport, node_registry, event_log, round)
        node_of_partition = node_registry.node_of_partition(transport.connected_nodes())
        if len(node_of_partition) >= minimum:
            return node_of_partition
        if time.monotonic() > deadline:
            raise RunError(
                f"{len(node_of_partition)} SuperNodes that can take part are connected after "
                f"{sampling.wait:g} s; min_available_nodes is {minimum}"
            )
        time.sleep(_PAUSE)
