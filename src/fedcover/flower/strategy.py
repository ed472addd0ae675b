"""For a Flower App of your own: a strategy that gives every node the part of the model that it can hold."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedcover import coverage as cov
from fedcover import groups, spec
from fedcover.aggregation import WEIGHTS
from fedcover.contracts import named_rule
from fedcover.errors import InvalidValue, unknown
from fedcover.evaluation import WHOLE
from fedcover.flower.engine import Events, checked, meet
from fedcover.flower.link import Failed, Link
from fedcover.flower.messages import TRAIN, Order, Orders, read_answers, to_node
from fedcover.flower.parcels import as_sent, bundle, headed, kept
from fedcover.flower.places import Roster
from fedcover.flower.rows import MOST_SAMPLES
from fedcover.models import tensors
from fedcover.norms import calibrate, running
from fedcover.policies import POLICIES
from fedcover.replies import Asked, Ledger
from fedcover.submodel import submodel
from fedcover.types import Client, Coverage, Model, Params, Policy, Update, View

log = logging.getLogger("fedcover")
DAY = 86_400.0
MEASURES = ("width", "parameters")
"""What a capacity may be a share of."""


class CoverageStrategy(Strategy):
    """Every node trains the part of one model that fits the capacity it declares; what was trained is averaged.

    A node is started with `--node-config "partition-id=K num-partitions=N capacity=0.5"`; its app is `client_app`. The
    policy and the rule are those of an experiment. `weights` is "uniform", or "samples" for what nodes say they have.
    `calibration` are inputs on which norm statistics are computed, or the .npy file that holds them.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "rolling",
        *,
        rule: str = "coverage_mean",
        weights: str = "uniform",
        capacity: str = "width",
        window: int = 10,
        seed: int = 0,
        calibration: Tensor | str | Path | None = None,
    ) -> None:
        if not isinstance(model, Model):
            like = "fc.Model(module, fc.trace(module, example))"
            raise InvalidValue(f"model must be a fedcover Model, such as {like}; got {type(model).__name__}")
        groups.check(model.groups, tensors(model.module))
        if weights not in WEIGHTS:
            raise unknown("weights", weights, WEIGHTS)
        if capacity not in MEASURES:
            raise unknown("capacity", capacity, MEASURES)
        for name, value, least in (("window", window, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or value < least:
                raise InvalidValue(f"{name} must be a whole number of at least {least}; got {value!r}")
        self.model, self.capacity, self.window, self.seed = model, capacity, window, seed
        self.policy = (
            spec.look_up("policy", spec.parse("policy", policy), POLICIES) if isinstance(policy, str) else policy
        )
        self.rule = named_rule(rule)
        self.weight = WEIGHTS[weights]
        self.calibration = _inputs(calibration) if isinstance(calibration, str | Path) else calibration
        self.coverage = Coverage((), {})
        self._roster, self._ledger, self._events = Roster(), Ledger(), Events(None)
        self._sent: Params = {}
        self._allowed: dict[int, int] = {}
        if running(model.module) and calibration is None:
            log.warning(_NO_CALIBRATION)

    def initial_arrays(self) -> ArrayRecord:
        """The model's parameters as they are, to start from."""
        return _record({name: p.detach() for name, p in self.model.module.named_parameters()})

    def ready(self, arrays: ArrayRecord) -> nn.Module:
        """The global model with norm statistics of the calibration inputs: ready to use, or to be evaluated."""
        if running(self.model.module) and self.calibration is None:
            raise InvalidValue(_NO_CALIBRATION)
        whole = submodel(self.model.module, WHOLE, self._params(arrays))
        return whole.eval() if self.calibration is None else calibrate(whole, self.calibration)

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds, as every strategy of Flower does; of a reply no more is read than was asked for."""
        bounded: Any = _Bounded(grid, self._allowed, self._roster.silent)
        return super().start(bounded, *args, **kwargs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each node that is there, with its part of the model."""
        link = Link(grid)
        meet(link, self._roster, self._events, server_round - 1)
        holders = sorted(self._roster.holders(link.present()).items())
        known = self._roster.known
        cohort = tuple(
            Client(place, known[node].capacity or 1.0, slot, 1, ()) for slot, (place, node) in enumerate(holders)
        )
        if not cohort:
            raise InvalidValue("no SuperNode with --node-config 'partition-id=K num-partitions=N' is there")
        self._ledger.close()
        self._sent = self._params(arrays)
        parts = self.policy(self._view(server_round - 1, cohort))
        return [  # a list: Flower goes through it twice
            self._message(node, server_round - 1, client, part, config)
            for (_, node), client, part in zip(holders, cohort, parts, strict=True)
            if part is not None
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of every parameter over the nodes that trained it; what is not as asked for is rejected."""
        updates: list[Update] = []
        rejected = 0
        for reply in replies:
            found = self._read(reply)
            if isinstance(found, str):
                rejected += 1
                log.warning("round %d: rejected: %s", server_round, found)
            else:
                updates.append(found)
        updates.sort(key=lambda update: update.client.id)  # so that nothing depends on who answers first
        counts = cov.count(self._sent, [update.trained for update in updates])
        self.coverage = cov.record(self.coverage, counts, self.window)
        figures: dict[str, Any] = {
            "answered": len(updates),
            "rejected": rejected,
            "gamma_round": cov.minimum(counts),
            "gamma_window": cov.minimum(cov.over_window(self.coverage)),
        }
        if not updates:
            return None, MetricRecord(figures)
        new = self.rule(self._sent, [(u.trained, u.params, self.weight(u.client)) for u in updates])
        return _record(new), MetricRecord({**figures, "loss": fmean(update.loss for update in updates)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the server evaluates, with `start(evaluate_fn=...)`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing, as nothing was asked."""
        return None

    def summary(self) -> None:
        """Say what the strategy does."""
        log.info("coverage strategy: %s, %d parameters", self.policy, sum(t.numel() for t in self._whole().values()))

    def _whole(self) -> Params:
        return {name: p.detach() for name, p in self.model.module.named_parameters()}

    def _params(self, arrays: ArrayRecord) -> Params:
        return {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in self._whole()}

    def _view(self, round: int, cohort: tuple[Client, ...]) -> View:
        levels = tuple(sorted({client.capacity for client in cohort}, reverse=True))
        return View(
            round, self._sent, self.model.groups, self.model.prunable, cohort, levels, self.capacity, self.coverage,
            self.seed,
        )  # fmt: skip

    def _message(self, node: int, round: int, client: Client, part: Any, config: ConfigRecord) -> Message:
        encoded, wire = as_sent(part, self.model)
        parcel = bundle(headed({"params": kept(wire, wire.extract(self._sent))}))
        asked = self._ledger.expect(lambda nonce: Asked(nonce, client, wire, self._sent))
        self._allowed[node] = asked.byte_limit
        order = Order(client.id, client.capacity, client.slot, encoded, 0, asked.nonce)
        orders = Orders(round, 0.0, torch.get_num_threads(), "", (order,), (parcel,), dict(config))
        return to_node(node, orders, ttl=DAY)

    def _read(self, reply: Message) -> Update | str:
        """The update in a node's reply, or why it is not believed."""
        if reply.has_error():
            return f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
        try:
            answers = read_answers(reply)
        except InvalidValue as error:
            return str(error)
        if len(answers) != 1:
            return f"{len(answers)} answers, where one was asked for"
        found = checked(answers[0], self._ledger)
        if isinstance(found, str):
            return found
        samples = answers[0].samples
        if not 1 <= samples <= MOST_SAMPLES:
            return f"num-examples must be in 1..{MOST_SAMPLES}; got {samples}"
        return replace(found, client=replace(found.client, samples=samples))


@dataclass(frozen=True)
class _Bounded:
    """A grid whose replies to training are fetched as those of an experiment: by size first, and in turns."""

    grid: Grid
    allowed: Mapping[int, int]
    silent: set[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send each node its message; a node without a usable reply is told of by an error."""
        sent = {message.metadata.dst_node_id: message for message in messages}
        if any(message.metadata.message_type != TRAIN for message in sent.values()):
            return self.grid.send_and_receive(sent.values(), timeout=timeout)  # of an app of one's own
        replies = Link(self.grid).exchange(sent, patience=timeout or DAY, allowed=self.allowed)
        failed = {node for node, reply in replies.items() if isinstance(reply, Failed)}
        self.silent.update(failed)
        self.silent.difference_update(replies.keys() - failed)
        return [
            Message(Error(0, f"{reply.event}: {reply.why}"), reply_to=sent[node])
            if isinstance(reply, Failed)
            else reply
            for node, reply in replies.items()
        ]


_NO_CALIBRATION = (
    "this model has norm layers whose statistics no client sends: give CoverageStrategy(calibration=...) some hundred "
    "inputs (a tensor, or an .npy file), on which the server computes them, or use group norms"
)


def _inputs(path: str | Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(f"calibration must be an .npy file of inputs; {str(path)!r}: {error}") from error


def _record(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in params.items()})
