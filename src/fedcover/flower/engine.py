"""Flower as an engine: the clients of a round are trained by the nodes that hold them. The rest is as everywhere."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedcover.data.client_data import Holding
from fedcover.errors import InvalidValue, RunError, printable
from fedcover.flower.client_training import sent_parcel
from fedcover.flower.messages import Answer, Order, Orders, read_answers, to_node
from fedcover.flower.nodes import Introduction, Roster, place_of
from fedcover.flower.payloads import as_sent, unbundle
from fedcover.flower.transport import GRACE, Failed, Link
from fedcover.host.disk import append
from fedcover.models.norms import statistics_key
from fedcover.runs.metrics_log import MOVES, UNANSWERED, WARNED, lines_in
from fedcover.runs.run_folder import Folder
from fedcover.server.npy_codec import Refused
from fedcover.server.reply_validation import Asked, Ledger, RawReply, Rejection, ask
from fedcover.server.round import Setup
from fedcover.submodels.unit_groups import to_json
from fedcover.types import Assignment, Client, Reduction, State, Task, Update
from fedcover.version import __version__

log = logging.getLogger("fedcover")
Work = Sequence[tuple[Client, Reduction]]
HELLO, HELLOS = 60.0, 3
"""Seconds that a node has to introduce itself, and how often it is asked before a round goes on without it for good."""


@dataclass(frozen=True)
class Events:
    """What became of whom, one line each in `events.jsonl` of the run folder.

    What happens before there is a folder is kept in `early`, if that is given, and written with the first line after.
    """

    path: Path | None
    early: list[str] | None = None

    def __post_init__(self) -> None:
        """After a full disk the last line may be half one: what comes next must not be written behind it."""
        if self.path and not all(line.endswith(b"\n") for line in lines_in(self.path)[-1:]):
            self._append("\n")

    def write(self, round: int, event: str, node: int | None, client: int | None, why: str = "") -> None:
        """Add an event."""
        if event in MOVES:
            log.info("round %d: node %s %s: %s", round + 1, node, event, why)
        elif event != "answered":
            whose = "a node" if client is None else f"client {client}"
            of = "no node" if node is None else f"node {node}"
            log.warning("round %d: %s (%s) %s: %s", round + 1, whose, of, event, why)  # people count from 1
        record = {"round": round, "time": time.time(), "event": event, "node": node, "client": client, "why": why}
        line, before = json.dumps(record) + "\n", self.early if self.early is not None else []
        if self.path is None:
            before.append(line)
        else:
            self._append("".join([*before, line]))
            before.clear()

    def _append(self, text: str) -> None:
        assert self.path is not None
        with Folder(self.path.parent).writing(self.path) as path:
            append(path, text.encode(), durable=False)


@dataclass(frozen=True)
class Terms:
    """What holds for every round: how long it may take, what every node is told, and whether updates are private.

    In an `open` fleet cohorts are drawn among the clients whose nodes are there, with the capacities that they declare.
    Nodes are sent the groups of an `own_model`, a module that a user has brought along.
    """

    experiment: str
    clients: int
    deadline: float
    private: bool = False
    open: bool = False
    own_model: bool = False


@dataclass
class FlowerEngine:
    """Sends every node its clients' parts, waits until the deadline, and believes only what was asked for."""

    link: Link
    roster: Roster
    terms: Terms
    events: Events
    ledger: Ledger = field(default_factory=Ledger)
    counted: Counter[str] = field(default_factory=Counter)
    tried: bool = False

    @property
    def holdings(self) -> Mapping[int, Holding]:
        """What nodes say of clients' rows, where these are on nodes; it becomes more as nodes come."""
        return self.roster.holdings

    def members(self, setup: Setup, round: int) -> Mapping[int, float] | None:
        """The clients that can be asked in a round, with what they can hold; None where the fleet is closed."""
        meet(self.link, self.roster, self.events, round)
        if not self.terms.open:
            return None
        known = [setup.fleet.capacity(client) for client in range(setup.clients)]
        return self.roster.members(self.link.present(), known)

    def __call__(self, task: Task, state: State, work: Work, lr: float) -> list[Update]:
        """Train the given clients from the given state on their nodes."""
        self.counted.clear()
        if not self.tried:
            _try_recipe(task, state, work)
            self.tried = True
        meet(self.link, self.roster, self.events, state.round)
        by_node = self._shared_out(state.round, self._as_told(task, work))
        asked: dict[int, dict[int, Asked]] = {}
        messages = {}
        for node, mine in by_node.items():
            orders, asked[node] = self._orders(task, state, mine, lr)
            messages[node] = to_node(node, orders, ttl=self.terms.deadline + GRACE)
        allowed = {node: sum(a.byte_limit for a in mine.values()) for node, mine in asked.items()}
        replies = self.link.exchange(messages, patience=self.terms.deadline, allowed=allowed)
        updates: list[Update] = []
        for node, reply in replies.items():
            if isinstance(reply, Failed):
                self.roster.silent.add(node)
                for client in asked[node]:
                    self._tell(state.round, reply.event, node, client, reply.why)
                continue
            self.roster.silent.discard(node)
            updates += self._believed(state.round, node, asked[node], reply)
        self.ledger.close()
        return updates

    def figures(self) -> dict[str, Any]:
        """How many clients of the last round were rejected, late or lost."""
        return {event: self.counted[event] for event in UNANSWERED}

    def _as_told(self, task: Task, work: Work) -> Work:
        """The clients as their nodes tell of them: one may have come since the cohort was chosen."""
        if self.roster.wanted is None:
            return work
        source = task.source
        return [(replace(c, samples=source.count(c.id), labels=source.labels(c.id)), part) for c, part in work]

    def _shared_out(self, round: int, work: Work) -> dict[int, Work]:
        """The work of each node that is there; clients without one are lost for this round."""
        holders = self.roster.holders(self.link.present())
        places = self.roster.places or 1
        shared: dict[int, list[tuple[Client, Reduction]]] = {}
        for client, reduction in work:
            node = holders.get(place_of(client.id, self.terms.clients, places))
            if node is None:
                self._tell(round, "lost", None, client.id, "no node holds this client")
            else:
                shared.setdefault(node, []).append((client, reduction))
        return dict(shared)

    def _orders(self, task: Task, state: State, work: Work, lr: float) -> tuple[Orders, dict[int, Asked]]:
        """A node's message, in which clients of the same part share one parcel, and what must come back."""
        parcels: dict[object, bytes] = {}
        places: dict[object, int] = {}
        decoded: dict[bytes, Reduction] = {}
        orders, asked = [], {}
        for client, reduction in work:
            encoded, wire = as_sent(reduction, task.model)
            wire = decoded.setdefault(encoded, wire)
            key = (encoded, statistics_key(task.norm, client.capacity))
            if key not in parcels:
                parcels[key] = sent_parcel(task, state, client, wire)
            make = partial(ask, task=task, state=state, client=client, reduction=wire, choosing=not self.terms.private)
            asked[client.id] = self.ledger.expect(make)
            place = places.setdefault(key, len(places))
            orders.append(Order(client.id, client.capacity, client.slot, encoded, place, asked[client.id].nonce))
        told = state.round, lr, torch.get_num_threads(), self.terms.experiment
        source = task.source
        own = {"classes": source.classes, "shape": list(source.test.x.shape[1:])}
        unit_groups = to_json(task.model.groups) if self.terms.own_model else ""
        return Orders(*told, tuple(orders), tuple(parcels.values()), own, unit_groups), asked

    def _believed(self, round: int, node: int, asked: dict[int, Asked], reply: Any) -> Iterable[Update]:
        """The updates of a reply that are what was asked for; the others are told of."""
        try:
            answers = read_answers(reply)
        except InvalidValue as error:
            for client in asked:
                self._tell(round, "rejected", node, client, str(error))
            return
        mine: dict[int, Answer] = {}
        for answer in answers:
            if answer.client in asked:
                mine.setdefault(answer.client, answer)
        if len(mine) < len(answers):  # told once, however many they are
            why = f"{len(answers) - len(mine)} answers for clients that this node was not asked for, or twice for one"
            self._tell(round, "rejected", node, None, why)
        for client in asked:
            found = checked(mine[client], self.ledger) if client in mine else "its node did not answer for it"
            if client in mine and mine[client].error:
                self.roster.doubtful.add(node)  # it may have come back with less than it had
            if isinstance(found, str):
                self._tell(round, "rejected", node, client, found)
            else:
                self._tell(round, "answered", node, client)
                yield found

    def _tell(self, round: int, event: str, node: int | None, client: int | None, why: str = "") -> None:
        if client is not None:  # what a node did beside is told of, but no client's task
            self.counted[event] += 1
        self.events.write(round, event, node, client, why)


def _try_recipe(task: Task, state: State, work: Work) -> None:
    """Let the recipe refuse here, as it would in one process, what every node would refuse."""
    for client, reduction in {id(reduction): (client, reduction) for client, reduction in work}.values():
        task.recipe.start(Assignment(task, state, client, reduction), dict(reduction.extract(state.params)))


def checked(answer: Answer, ledger: Ledger) -> Update | str:
    """The update in one client's answer, or why it is not believed."""
    if answer.error:
        return f"its node says: '{printable(answer.error)[:300]}'"
    names = ledger.names(answer.nonce)
    try:
        arrays = {} if names is None else unbundle(answer.parcel, names)
    except (InvalidValue, Refused) as error:
        return str(error)
    found = ledger.receive(RawReply(answer.nonce, answer.client, arrays, {"loss": answer.loss}))
    return f"{found.reason}: {found.detail}" if isinstance(found, Rejection) else found


def meet(link: Link, roster: Roster, events: Events, round: int) -> None:
    """Ask nodes that nobody knows yet who they are."""
    present = link.present()
    strangers = [node for node in roster.strangers(present) if roster.asked[node] < HELLOS]
    if strangers:
        _introduce(link, roster, events, round, strangers)
        present = link.present()
    roster.fill(present)
    for move, who in roster.moves(present):
        holds = "" if who.capacity is None else f", capacity {who.capacity:g}"
        events.write(round, move, who.node, None, f"{who.partition}{holds}")


def _introduce(link: Link, roster: Roster, events: Events, round: int, strangers: Sequence[int]) -> None:
    roster.asked.update(strangers)
    for node, said in link.introductions(strangers, patience=HELLO, rows=roster.wanted is not None).items():
        why = said.why if isinstance(said, Failed) else _objection(said, roster, link.present())
        if why:
            if not isinstance(said, Failed):
                link.refuse(node, why)
                why = f"{said.partition}: {why}"
            event = said.event if isinstance(said, Failed) else "rejected"
            if event == "rejected":
                roster.refused.add(node)
            events.write(round, event, node, None, why)
        elif isinstance(said, Introduction) and roster.wanted and (doubt := roster.wanted.doubt(said.scale)):
            events.write(round, WARNED, node, None, f"{said.partition}: {doubt}")


def _objection(said: Introduction, roster: Roster, present: Collection[int]) -> str:
    """Why a node that introduced itself cannot take part; nothing if it now does."""
    if said.version != __version__:
        return f"the node has fedcover {said.version!a:.40}, the server {__version__}"
    others = dict(roster.known)
    try:
        roster.add(said, present)
    except InvalidValue as error:
        return str(error)
    place = roster.known[said.node].place
    first = next((known.node for known in others.values() if known.place == place), None)
    if first not in (None, said.node) and first in present:
        log.warning(
            "nodes %d and %d both claim partition %d: the first keeps it while it answers, with the capacity that it "
            "declares", first, said.node, place,
        )  # fmt: skip
    return ""


def gather(link: Link, roster: Roster, events: Events, *, nodes: int, patience: float) -> None:
    """Wait until a node answers for every place, or until patience runs out; complain if nobody has come."""
    roster.places = nodes or None
    end = time.monotonic() + patience
    while True:
        meet(link, roster, events, 0)
        if roster.places and len(roster.holders(link.present())) == roster.places:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    found = len(roster.holders(link.present()))
    if not found:
        raise RunError(
            f"no SuperNode that can take part has come in {patience:g} s: each needs fedcover {__version__} and "
            "--node-config 'partition-id=K num-partitions=N', or, in a run with --nodes N, neither"
        )
    log.warning("after %g s nodes answer for %d of %s places; going on with these", patience, found, roster.places)


def log_to_stderr() -> None:
    """Show what is logged where Flower's own log goes."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fedcover: %(message)s"))
    log.addHandler(handler)
    log.setLevel(os.environ.get("FEDCOVER_LOG", "INFO"))
