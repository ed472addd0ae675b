"""Flower as an engine: the clients of a round are trained by the nodes that hold them. The rest is as everywhere."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fedcover.data.client_data import ClientDataInfo
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
from fedcover.flower.payloads import encode_reduction, unpack_arrays
from fedcover.flower.registration import register_new_nodes
from fedcover.flower.reply_download import FailedReply
from fedcover.flower.state_payload import build_payload
from fedcover.flower.transport import GRACE, Transport
from fedcover.models.norms import statistics_key
from fedcover.runs.metrics_log import UNANSWERED
from fedcover.server.npy_codec import InvalidReply
from fedcover.server.reply_format import PendingTask, RawReply, pending_task
from fedcover.server.reply_validation import Rejection
from fedcover.server.round_setup import Setup
from fedcover.server.task_ledger import TaskLedger
from fedcover.submodels.unit_groups import groups_to_json
from fedcover.types import Assignment, Client, Reduction, State, Task, Update

ClientParts = Sequence[tuple[Client, Reduction]]


@dataclass(frozen=True)
class RoundOptions:
    """What holds for every round: how long it may take, what every node is told, and whether updates are private.

    In an `open_fleet` fleet cohorts are drawn among the clients whose nodes are there, with the capacities that they declare.
    Nodes are sent the groups of an `own_model`, a module that a user has brought along.
    """

    experiment: str
    clients: int
    deadline: float
    private: bool = False
    open_fleet: bool = False
    own_model: bool = False


@dataclass
class FlowerEngine:
    """Sends every node its clients' parts, waits until the deadline, and believes only what was asked for."""

    transport: Transport
    node_registry: NodeRegistry
    options: RoundOptions
    event_log: EventLog
    ledger: TaskLedger = field(default_factory=TaskLedger)
    outcome_counts: Counter[str] = field(default_factory=Counter)
    recipe_checked: bool = False

    @property
    def holdings(self) -> Mapping[int, ClientDataInfo]:
        """What nodes say of clients' rows, where these are on nodes; it becomes more as nodes come."""
        return self.node_registry.holdings

    def members(self, setup: Setup, round: int) -> Mapping[int, float] | None:
        """The clients that can be asked in a round, with what they can hold; None where the fleet is closed."""
        register_new_nodes(self.transport, self.node_registry, self.event_log, round)
        if not self.options.open_fleet:
            return None
        known = [setup.fleet.capacity(client) for client in range(setup.clients)]
        return self.node_registry.members(self.transport.connected_nodes(), known)

    def __call__(self, task: Task, state: State, work: ClientParts, lr: float) -> list[Update]:
        """Train the given clients from the given state on their nodes."""
        self.outcome_counts.clear()
        if not self.recipe_checked:
            _try_recipe(task, state, work)
            self.recipe_checked = True
        register_new_nodes(self.transport, self.node_registry, self.event_log, state.round)
        by_node = self._group_by_node(state.round, self._with_reported_data(task, work))
        asked: dict[int, dict[int, PendingTask]] = {}
        messages = {}
        for node, mine in by_node.items():
            request, asked[node] = self._build_request(task, state, mine, lr)
            messages[node] = request_message(node, request, ttl=self.options.deadline + GRACE)
        max_bytes = {node: sum(a.byte_limit for a in mine.values()) for node, mine in asked.items()}
        replies = self.transport.send_and_wait(
            messages, timeout=self.options.deadline, max_bytes=max_bytes
        )
        updates: list[Update] = []
        for node, reply in replies.items():
            if isinstance(reply, FailedReply):
                self.node_registry.silent.add(node)
                for client in asked[node]:
                    self._record_event(state.round, reply.event, node, client, reply.why)
                continue
            self.node_registry.silent.discard(node)
            updates += self._accept_updates(state.round, node, asked[node], reply)
        self.ledger.close()
        return updates

    def round_metrics(self) -> dict[str, Any]:
        """How many clients of the last round were rejected, late or lost."""
        return {event: self.outcome_counts[event] for event in UNANSWERED}

    def _with_reported_data(self, task: Task, work: ClientParts) -> ClientParts:
        """The clients as their nodes tell of them: one may have come since the cohort was chosen."""
        if self.node_registry.requirements is None:
            return work
        source = task.source
        return [
            (replace(c, samples=source.count(c.id), labels=source.labels(c.id)), part)
            for c, part in work
        ]

    def _group_by_node(self, round: int, work: ClientParts) -> dict[int, ClientParts]:
        """The work of each node that is there; clients without one are lost for this round."""
        node_of_partition = self.node_registry.node_of_partition(self.transport.connected_nodes())
        num_partitions = self.node_registry.num_partitions or 1
        shared: dict[int, list[tuple[Client, Reduction]]] = {}
        for client, reduction in work:
            node = node_of_partition.get(
                partition_of(client.id, self.options.clients, num_partitions)
            )
            if node is None:
                self._record_event(round, "lost", None, client.id, "no node holds this client")
            else:
                shared.setdefault(node, []).append((client, reduction))
        return dict(shared)

    def _build_request(
        self, task: Task, state: State, work: ClientParts, lr: float
    ) -> tuple[TaskRequest, dict[int, PendingTask]]:
        """A node's message, in which clients of the same part share one parcel, and what must come back."""
        payloads: dict[object, bytes] = {}
        payload_indices: dict[object, int] = {}
        decoded: dict[bytes, Reduction] = {}
        client_tasks, asked = [], {}
        for client, reduction in work:
            encoded, wire = encode_reduction(reduction, task.model)
            wire = decoded.setdefault(encoded, wire)
            key = (encoded, statistics_key(task.norm, client.capacity))
            if key not in payloads:
                payloads[key] = build_payload(task, state, client, wire)
            make = partial(
                pending_task,
                task=task,
                state=state,
                client=client,
                reduction=wire,
                allow_bits=not self.options.private,
            )
            asked[client.id] = self.ledger.issue(make)
            payload_index = payload_indices.setdefault(key, len(payload_indices))
            client_tasks.append(
                ClientTask(
                    client.id,
                    client.capacity,
                    client.slot,
                    encoded,
                    payload_index,
                    asked[client.id].nonce,
                )
            )
        told = state.round, lr, torch.get_num_threads(), self.options.experiment
        source = task.source
        extra_config = {"classes": source.classes, "shape": list(source.test.x.shape[1:])}
        unit_groups = groups_to_json(task.model.groups) if self.options.own_model else ""
        return TaskRequest(
            *told, tuple(client_tasks), tuple(payloads.values()), extra_config, unit_groups
        ), asked

    def _accept_updates(
        self, round: int, node: int, asked: dict[int, PendingTask], reply: Any
    ) -> Iterable[Update]:
        """The updates of a reply that are what was asked for; the others are told of."""
        try:
            answers = read_results(reply)
        except InvalidValue as error:
            for client in asked:
                self._record_event(round, "rejected", node, client, str(error))
            return
        mine: dict[int, ClientResult] = {}
        for answer in answers:
            if answer.client in asked:
                mine.setdefault(answer.client, answer)
        if len(mine) < len(answers):  # told once, however many they are
            why = f"{len(answers) - len(mine)} answers for clients that this node was not asked for, or twice for one"
            self._record_event(round, "rejected", node, None, why)
        for client in asked:
            found = (
                validate_result(mine[client], self.ledger)
                if client in mine
                else "its node did not answer for it"
            )
            if client in mine and mine[client].error:
                self.node_registry.to_be_queried.add(
                    node
                )  # it may have come back with less than it had
            if isinstance(found, str):
                self._record_event(round, "rejected", node, client, found)
            else:
                self._record_event(round, "answered", node, client)
                yield found

    def _record_event(
        self, round: int, event: str, node: int | None, client: int | None, why: str = ""
    ) -> None:
        if client is not None:  # what a node did beside is told of, but no client's task
            self.outcome_counts[event] += 1
        self.event_log.write(round, event, node, client, why)


def _try_recipe(task: Task, state: State, work: ClientParts) -> None:
    """Let the recipe refuse here, as it would in one process, what every node would refuse."""
    for client, reduction in {
        id(reduction): (client, reduction) for client, reduction in work
    }.values():
        task.recipe.start(
            Assignment(task, state, client, reduction), dict(reduction.extract(state.params))
        )


def validate_result(answer: ClientResult, ledger: TaskLedger) -> Update | str:
    """The update in one client's answer, or why it is not believed."""
    if answer.error:
        return f"its node says: '{printable(answer.error)[:300]}'"
    names = ledger.expected_names(answer.nonce)
    try:
        arrays = {} if names is None else unpack_arrays(answer.payload, names)
    except (InvalidValue, InvalidReply) as error:
        return str(error)
    found = ledger.receive(RawReply(answer.nonce, answer.client, arrays, {"loss": answer.loss}))
    return f"{found.reason}: {found.detail}" if isinstance(found, Rejection) else found
