"""Flower as an engine: the nodes train the clients of a round.

A reply passes through `send_and_wait`, `decode_reply`, `read_results`, `validate_result` and
`ledger.receive`; what became of it is an event, which `EventLog.write` writes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fedcover.errors import InvalidValue, printable
from fedcover.flower.events import EventLog
from fedcover.flower.messages import (
    ClientResult,
    ClientTask,
    TaskRequest,
    read_results,
    request_message,
)
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.nodes import partition_of
from fedcover.flower.payloads import encode_reduction
from fedcover.flower.registration import register_new_nodes
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.state_payload import build_payload
from fedcover.flower.transport import GRACE, Transport
from fedcover.models.norms import statistics_key
from fedcover.runs.metrics_log import UNANSWERED
from fedcover.server.raw_arrays import InvalidReply
from fedcover.server.reply_format import PendingTask, RawReply, pending_task
from fedcover.server.reply_validation import Rejection
from fedcover.server.safetensors_codec import unpack_arrays
from fedcover.server.task_ledger import TaskLedger
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.types import Assignment, Client, Engine, Reduction, State, Task, Update

ClientParts = Sequence[tuple[Client, Reduction]]
"""The clients of a round, each with its part of the model."""
PendingTasks = dict[int, PendingTask]
"""The tasks of one node, by client."""


@dataclass(frozen=True)
class RoundOptions:
    """What is the same in every round.

    Attributes:
        experiment: The experiment as TOML, as nodes read it.
        clients: The number of clients.
        deadline: Seconds that nodes have for a round.
        private: Whether updates are private; clients must not report which entries they trained.
        open_fleet: Whether cohorts are drawn among the clients whose nodes are connected, with the
            capacities that these declare.
        own_model: Whether the model is a module of the user's; nodes are sent its unit groups.
    """

    experiment: str
    clients: int
    deadline: float
    private: bool = False
    open_fleet: bool = False
    own_model: bool = False


@dataclass
class NodeTraining:
    """Send every node its clients' parts, wait until the deadline, and validate the replies."""

    transport: Transport
    node_registry: NodeRegistry
    options: RoundOptions
    event_log: EventLog
    ledger: TaskLedger = field(default_factory=TaskLedger)
    outcome_counts: Counter[str] = field(default_factory=Counter)
    recipe_checked: bool = False

    def engine(self) -> Engine:
        """Return the engine of a run whose clients train on the nodes."""
        return Engine(self, self.members, self.round_metrics, self.node_registry.client_info)

    def members(self, round: int) -> Mapping[int, float | None] | None:
        """Return the available clients with their capacities, or None if the fleet is closed."""
        register_new_nodes(self.transport, self.node_registry, self.event_log, round)
        if not self.options.open_fleet:
            return None
        connected_nodes = self.transport.connected_nodes()
        return self.node_registry.members(connected_nodes, self.options.clients)

    def __call__(self, task: Task, state: State, work: ClientParts, lr: float) -> list[Update]:
        """Let the nodes train the given clients from the given state."""
        self.outcome_counts.clear()
        if not self.recipe_checked:
            _check_recipe(task, state, work)
            self.recipe_checked = True
        register_new_nodes(self.transport, self.node_registry, self.event_log, state.round)
        work_by_node = self._group_by_node(state.round, self._with_reported_data(task, work))
        pending_by_node: dict[int, PendingTasks] = {}
        messages, max_bytes = {}, {}
        for node, node_work in work_by_node.items():
            request, pending_tasks = self._build_request(task, state, node_work, lr)
            messages[node] = request_message(node, request, ttl=self.options.deadline + GRACE)
            max_bytes[node] = sum(pending.byte_limit for pending in pending_tasks.values())
            pending_by_node[node] = pending_tasks
        replies = self.transport.send_and_wait(
            messages, timeout=self.options.deadline, max_bytes=max_bytes
        )
        updates: list[Update] = []
        for node, reply in replies.items():
            pending_tasks = pending_by_node[node]
            if isinstance(reply, FailedReply):
                self.node_registry.unresponsive_nodes.add(node)
                for client in pending_tasks:
                    self._record_event(state.round, reply.event, node, client, reply.why)
            else:
                self.node_registry.unresponsive_nodes.discard(node)
                updates += self._accept_updates(state.round, node, pending_tasks, reply)
        self.ledger.close()
        return updates

    def round_metrics(self) -> dict[str, Any]:
        """Return how many clients of the last round were rejected, late or lost."""
        return {event: self.outcome_counts[event] for event in UNANSWERED}

    def _with_reported_data(self, task: Task, work: ClientParts) -> ClientParts:
        """Update the clients' counts and labels; a node may have registered since the draw."""
        if self.node_registry.requirements is None:
            return work
        source = task.source
        updated = []
        for client, part in work:
            samples, labels = source.count(client.id), source.labels(client.id)
            updated.append((replace(client, samples=samples, labels=labels), part))
        return updated

    def _group_by_node(self, round: int, work: ClientParts) -> dict[int, ClientParts]:
        """Return the work of each connected node; clients without one are lost for this round."""
        node_of_partition = self.node_registry.node_of_partition(self.transport.connected_nodes())
        num_partitions = self.node_registry.num_partitions or 1
        work_by_node: dict[int, list[tuple[Client, Reduction]]] = {}
        for client, reduction in work:
            partition_id = partition_of(client.id, self.options.clients, num_partitions)
            node = node_of_partition.get(partition_id)
            if node is None:
                self._record_event(round, "lost", None, client.id, "no node holds this client")
            else:
                work_by_node.setdefault(node, []).append((client, reduction))
        return dict(work_by_node)

    def _build_request(
        self, task: Task, state: State, work: ClientParts, lr: float
    ) -> tuple[TaskRequest, PendingTasks]:
        """Build a node's request, and describe the results that it must return.

        Clients with the same part share one payload.
        """
        payloads: dict[object, bytes] = {}
        payload_indices: dict[object, int] = {}
        decoded_reductions: dict[bytes, Reduction] = {}
        client_tasks: list[ClientTask] = []
        pending_tasks: PendingTasks = {}
        for client, part in work:
            encoded, decoded = encode_reduction(part, task.model)
            reduction = decoded_reductions.setdefault(encoded, decoded)
            key = (encoded, statistics_key(task.norm, client.capacity))
            if key not in payloads:
                payload_indices[key] = len(payloads)
                payloads[key] = build_payload(task, state, client, reduction)
            pending = self.ledger.issue(
                partial(
                    pending_task,
                    task=task,
                    state=state,
                    client=client,
                    reduction=reduction,
                    allow_bits=not self.options.private,
                )
            )
            pending_tasks[client.id] = pending
            client_tasks.append(
                ClientTask(
                    client.id,
                    client.capacity,
                    client.slot,
                    encoded,
                    payload_indices[key],
                    pending.nonce,
                )
            )
        source = task.source
        request = TaskRequest(
            round=state.round,
            lr=lr,
            threads=torch.get_num_threads(),
            experiment=self.options.experiment,
            client_tasks=tuple(client_tasks),
            payloads=tuple(payloads.values()),
            extra_config={"classes": source.classes, "shape": list(source.test.x.shape[1:])},
            groups=groups_to_json(task.model.groups) if self.options.own_model else "",
        )
        return request, pending_tasks

    def _accept_updates(
        self, round: int, node: int, pending_tasks: PendingTasks, reply: Any
    ) -> list[Update]:
        """Return the valid updates of a reply, and record what became of every client."""
        try:
            results = read_results(reply)
        except InvalidValue as error:
            for client in pending_tasks:
                self._record_event(round, "rejected", node, client, str(error))
            return []
        result_of_client: dict[int, ClientResult] = {}
        for result in results:
            if result.client in pending_tasks:
                result_of_client.setdefault(result.client, result)
        num_extra = len(results) - len(result_of_client)
        if num_extra:  # one event, however many there are
            why = (
                f"{num_extra} answers for clients that this node was not asked for, "
                "or twice for one"
            )
            self._record_event(round, "rejected", node, None, why)
        updates = []
        for client in pending_tasks:
            update = self._accept_update(node, client, result_of_client.get(client))
            if isinstance(update, Rejection):
                self._record_event(round, "rejected", node, client, str(update))
            else:
                self._record_event(round, "answered", node, client)
                updates.append(update)
        return updates

    def _accept_update(
        self, node: int, client: int, result: ClientResult | None
    ) -> Update | Rejection:
        """Return the update of one client, or why there is none."""
        if result is None:
            return Rejection(client, "", "its node did not answer for it")
        if result.error:  # the node may have come back with less memory or data
            self.node_registry.to_be_queried.add(node)
        return validate_result(result, self.ledger)

    def _record_event(
        self, round: int, event: str, node: int | None, client: int | None, why: str = ""
    ) -> None:
        if client is not None:  # events of a node alone are no outcomes of tasks
            self.outcome_counts[event] += 1
        self.event_log.write(round, event, node, client, why)


def _check_recipe(task: Task, state: State, work: ClientParts) -> None:
    """Let the recipe raise here, as in one process, what it would raise on every node."""
    distinct_parts = {id(reduction): (client, reduction) for client, reduction in work}
    for client, reduction in distinct_parts.values():
        params = dict(reduction.extract(state.params))
        task.recipe.start(Assignment(task, state, client, reduction), params)


def validate_result(result: ClientResult, ledger: TaskLedger) -> Update | Rejection:
    """Return the update in one client's result, or why it is rejected."""
    if result.error:
        detail = f"its node says: '{printable(result.error)[:300]}'"
        return Rejection(result.client, "", detail)
    names = ledger.expected_names(result.nonce)
    try:
        arrays = {} if names is None else unpack_arrays(result.payload, names)
    except (InvalidValue, InvalidReply) as error:
        return Rejection(result.client, "", str(error))
    raw = RawReply(result.nonce, result.client, arrays, {"loss": result.loss})
    return ledger.receive(raw)
