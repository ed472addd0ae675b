"""For a Flower App of your own: a strategy that gives every node the part of the model that it can hold."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedcover import registry
from fedcover.errors import InvalidValue, RunError, unknown
from fedcover.flower.bounded_grid import DAY, BoundedGrid
from fedcover.flower.client_evaluation import aggregate_metrics, evaluation_message
from fedcover.flower.engine import validate_result
from fedcover.flower.events import EventLog
from fedcover.flower.messages import ClientTask, TaskRequest, read_results, request_message
from fedcover.flower.node_data import MOST_SAMPLES
from fedcover.flower.nodes import NodeRegistry
from fedcover.flower.payloads import encode_reduction, gather_kept, pack_arrays, prefix_names
from fedcover.flower.registration import register_new_nodes
from fedcover.flower.sampling import Sampling
from fedcover.flower.transport import Transport
from fedcover.log import log
from fedcover.models import params_and_buffers
from fedcover.models.norms import calibrate, running
from fedcover.policies import POLICIES
from fedcover.runs import checkpoints
from fedcover.server.aggregation import WEIGHTS
from fedcover.server.contracts import build_rule, checked_server
from fedcover.server.evaluation import FULL_REDUCTION
from fedcover.server.optimizers import SERVERS, apply_server_step
from fedcover.server.reply_format import PendingTask
from fedcover.server.task_ledger import TaskLedger
from fedcover.submodels import coverage as cov
from fedcover.submodels import unit_groups
from fedcover.submodels.build import submodel
from fedcover.types import Client, Coverage, Model, Params, Policy, State, Update, View

MEASURES = ("width", "parameters")
"""What a capacity may be a share of."""


class CoverageStrategy(Strategy):
    """Every node trains the part of one model that fits the capacity it declares; what was trained is averaged.

    A node is started with `--node-config "capacity=0.5"`, and `partition-id=K num-partitions=N` if its place must be
    the same whenever it comes; its app is `client_app`. The policy and the rule are those of an experiment.
    `weights` is "uniform", or "samples" for what nodes say they have. `calibration` are inputs on which norm statistics
    are computed, or the .npy file that holds them.
    `server` is an experiment's server optimiser ("momentum(beta=0.9)", "adam(lr=0.01)"). `sampling` says which share of
    the nodes trains in a round, and which evaluates after it. With a `folder` the model is kept there after every
    round, and `start` goes on from the last one that it holds.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "rolling",
        *,
        rule: str = "coverage_mean",
        server: str = "none",
        sampling: Sampling | None = None,
        folder: str | Path | None = None,
        weights: str = "uniform",
        capacity: str = "width",
        window: int = 10,
        seed: int = 0,
        calibration: Tensor | str | Path | None = None,
    ) -> None:
        if not isinstance(model, Model):
            like = "fc.Model(module, fc.trace(module, example))"
            raise InvalidValue(
                f"model must be a fedcover Model, such as {like}; got {type(model).__name__}"
            )
        unit_groups.check_groups(model.groups, params_and_buffers(model.module))
        model = replace(
            model,
            groups=unit_groups.separate_buffers(
                model.groups, dict(model.module.named_parameters())
            ),
        )
        if weights not in WEIGHTS:
            raise unknown("weights", weights, WEIGHTS)
        if capacity not in MEASURES:
            raise unknown("capacity", capacity, MEASURES)
        for name, value, least in (("window", window, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or value < least:
                raise InvalidValue(
                    f"{name} must be a whole number of at least {least}; got {value!r}"
                )
        self.model, self.capacity, self.window, self.seed = model, capacity, window, seed
        if isinstance(policy, str):
            policy = registry.look_up("policy", registry.parse("policy", policy), POLICIES)
        self.policy = policy
        self.rule = build_rule(rule)
        self.server = checked_server(
            server, registry.look_up("server", registry.parse("server", server), SERVERS)()
        )
        self.sampling = sampling or Sampling()
        self.folder = None if folder is None else Path(folder)
        self.weight = WEIGHTS[weights]
        self.calibration = (
            _inputs(calibration) if isinstance(calibration, str | Path) else calibration
        )
        self.coverage = Coverage((), {})
        self._node_registry, self._ledger, self._event_log = (
            NodeRegistry(unlimited=True),
            TaskLedger(),
            EventLog(None),
        )
        self._sent: Params = {}
        self._max_bytes: dict[int, int] = {}
        self._server_state: dict[str, Params] = {}
        self._rounds_done = 0  # rounds that were done when this start began
        named = (
            policy
            if isinstance(policy, str)
            else getattr(policy, "__qualname__", type(policy).__name__)
        )
        told = {
            "policy": named,
            "rule": rule,
            "server": server,
            "weights": weights,
            "capacity": capacity,
        }
        self._identity = _digest(
            {**told, "window": window, "seed": seed, **asdict(self.sampling)}, self._whole()
        )
        if running(model.module) and calibration is None and self.sampling.fraction_evaluate:
            raise InvalidValue(f"fraction_evaluate: {_NO_CALIBRATION}")
        if running(model.module) and calibration is None:
            log.warning(_NO_CALIBRATION)

    def initial_arrays(self) -> ArrayRecord:
        """The model's parameters as they are, to start from."""
        return _record({name: p.detach() for name, p in self.model.module.named_parameters()})

    def ready(self, arrays: ArrayRecord) -> nn.Module:
        """The global model with norm statistics of the calibration inputs: ready to use, or to be evaluated."""
        if running(self.model.module) and self.calibration is None:
            raise InvalidValue(_NO_CALIBRATION)
        whole = submodel(self.model.module, FULL_REDUCTION, self._params(arrays))
        return whole.eval() if self.calibration is None else calibrate(whole, self.calibration)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds, as every strategy of Flower does; of a reply no more is read than was asked for.

        Without `initial_arrays` the model starts as it is. Where `folder` holds rounds already the run goes on after
        them, up to `num_rounds` in all; the result tells of the rounds that were run now, by their own numbers.
        """
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        arrays, self._rounds_done = self._load_checkpoint(arrays)
        done = self._rounds_done
        bounded: Any = BoundedGrid(grid, self._max_bytes, self._node_registry.silent)
        shifted = (
            None if evaluate_fn is None else lambda round, arrays: evaluate_fn(round + done, arrays)
        )
        left = max(0, num_rounds - done)
        result = super().start(
            bounded, arrays, left, timeout, train_config, evaluate_config, shifted
        )
        self._rounds_done = 0
        return _renumbered(result, arrays, done) if done else result

    def _load_checkpoint(self, arrays: ArrayRecord) -> tuple[ArrayRecord, int]:
        """What to start from, and how many rounds are done: of the folder, if it holds any."""
        if self.folder is None:
            return arrays, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if not checkpoints.list_checkpoints(self.folder):
            return arrays, 0
        state, complaints = checkpoints.load_newest(self.folder, self._identity, "cpu")
        for complaint in complaints.values():
            log.warning("%s", complaint)
        self.coverage, self._server_state = state.coverage, dict(state.server)
        log.info("going on after round %d, from %s", state.round, self.folder)
        return _record(state.params), state.round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each node that takes part in the round, with its part of the model."""
        round = self._rounds_done + server_round - 1
        node_of_partition = self._wait_for_nodes(Transport(grid), round)
        partition_ids = self.sampling.to_train(sorted(node_of_partition), self.seed, round)
        cohort = self._cohort(partition_ids, node_of_partition)
        self._ledger.close()
        self._sent = self._params(arrays)
        parts = self.policy(self._view(round, cohort, node_of_partition))
        return [  # a list: Flower goes through it twice
            self._message(node_of_partition[client.id], round, client, part, config)
            for client, part in zip(cohort, parts, strict=True)
            if part is not None
        ]

    def _wait_for_nodes(self, transport: Transport, round: int) -> dict[int, int]:
        """The node that answers for each place, once as many are there as there must be."""
        end = time.monotonic() + self.sampling.wait
        while True:
            register_new_nodes(transport, self._node_registry, self._event_log, round)
            node_of_partition = self._node_registry.node_of_partition(transport.connected_nodes())
            if len(node_of_partition) >= self.sampling.min_available_nodes:
                return node_of_partition
            if time.monotonic() > end:
                raise RunError(
                    f"{len(node_of_partition)} SuperNodes that can take part are there after "
                    f"{self.sampling.wait:g} s; min_available_nodes is {self.sampling.min_available_nodes}"
                )
            time.sleep(0.5)

    def _cohort(
        self, partition_ids: Sequence[int], node_of_partition: dict[int, int]
    ) -> tuple[Client, ...]:
        return tuple(
            Client(partition_id, self._capacity(node_of_partition[partition_id]), slot, 1, ())
            for slot, partition_id in enumerate(partition_ids)
        )

    def _capacity(self, node: int) -> float:
        return self._node_registry.node_info[node].capacity or 1.0

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
                log.warning("round %d: rejected: %s", self._rounds_done + server_round, found)
            else:
                updates.append(found)
        updates.sort(
            key=lambda update: update.client.id
        )  # so that nothing depends on who answers first
        counts = cov.count(self._sent, [update.trained for update in updates])
        self.coverage = cov.record(self.coverage, counts, self.window)
        figures: dict[str, Any] = {
            "answered": len(updates),
            "rejected": rejected,
            "gamma_round": cov.minimum(counts),
            "gamma_window": cov.minimum(cov.over_window(self.coverage)),
        }
        new = self._sent
        if updates:
            mean = self.rule(
                self._sent, [(u.trained, u.params, self.weight(u.client)) for u in updates]
            )
            new, self._server_state = apply_server_step(
                self.server, self._sent, mean, counts, self._server_state, "keep"
            )
        if self.folder is not None:
            checkpoint = State(
                self._rounds_done + server_round,
                new,
                coverage=self.coverage,
                server=self._server_state,
            )
            checkpoints.save_checkpoint(self.folder, checkpoint, self._identity)
        if not updates:
            return None, MetricRecord(figures)
        return _record(new), MetricRecord(
            {**figures, "loss": fmean(update.loss for update in updates)}
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each node that evaluates: the part that the policy gives it for this round, ready to use."""
        round = self._rounds_done + server_round - 1
        node_of_partition = self._node_registry.node_of_partition(Transport(grid).connected_nodes())
        partition_ids = self.sampling.to_evaluate(sorted(node_of_partition), self.seed, round)
        if not partition_ids:
            return []
        cohort, params = self._cohort(partition_ids, node_of_partition), self._params(arrays)
        parts = self.policy(replace(self._view(round, cohort, node_of_partition), params=params))
        self._max_bytes.update(
            dict.fromkeys(node_of_partition.values(), 0)
        )  # figures are no tensors
        calibration = self.calibration if running(self.model.module) else None
        return [
            evaluation_message(
                node_of_partition[client.id],
                round,
                client,
                part,
                self.model,
                params,
                calibration,
                config,
                ttl=DAY,
            )
            for client, part in zip(cohort, parts, strict=True)
            if part is not None
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Every figure averaged over the nodes that evaluated, by their numbers of examples."""
        round = self._rounds_done + server_round
        return aggregate_metrics(
            replies, lambda why: log.warning("round %d: evaluation rejected: %s", round, why)
        )

    def summary(self) -> None:
        """Say what the strategy does."""
        log.info(
            "coverage strategy: %s, %d parameters",
            self.policy,
            sum(t.numel() for t in self._whole().values()),
        )

    def _whole(self) -> Params:
        return {name: p.detach() for name, p in self.model.module.named_parameters()}

    def _params(self, arrays: ArrayRecord) -> Params:
        return {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in self._whole()}

    def _view(
        self, round: int, cohort: tuple[Client, ...], node_of_partition: dict[int, int]
    ) -> View:
        levels = tuple(
            sorted({self._capacity(node) for node in node_of_partition.values()}, reverse=True)
        )
        return View(
            round, self._sent, self.model.groups, self.model.prunable, cohort, levels, self.capacity, self.coverage,
            self.seed,
        )  # fmt: skip

    def _message(
        self, node: int, round: int, client: Client, part: Any, config: ConfigRecord
    ) -> Message:
        encoded, wire = encode_reduction(part, self.model)
        payload = pack_arrays(prefix_names({"params": gather_kept(wire, wire.extract(self._sent))}))
        asked = self._ledger.issue(lambda nonce: PendingTask(nonce, client, wire, self._sent))
        self._max_bytes[node] = asked.byte_limit
        client_task = ClientTask(client.id, client.capacity, client.slot, encoded, 0, asked.nonce)
        groups_json = unit_groups.groups_to_json(self.model.groups)
        request = TaskRequest(
            round,
            0.0,
            torch.get_num_threads(),
            "",
            (client_task,),
            (payload,),
            dict(config),
            groups_json,
        )
        return request_message(node, request, ttl=DAY)

    def _read(self, reply: Message) -> Update | str:
        """The update in a node's reply, or why it is not believed."""
        if reply.has_error():
            return f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
        try:
            answers = read_results(reply)
        except InvalidValue as error:
            return str(error)
        if len(answers) != 1:
            return f"{len(answers)} answers, where one was asked for"
        found = validate_result(answers[0], self._ledger)
        if isinstance(found, str):
            return found
        samples = answers[0].samples
        if not 1 <= samples <= MOST_SAMPLES:
            return f"num-examples must be in 1..{MOST_SAMPLES}; got {samples}"
        return replace(found, client=replace(found.client, samples=samples))


_NO_CALIBRATION = (
    "this model has norm layers whose statistics no client sends: give CoverageStrategy(calibration=...) some hundred "
    "inputs (a tensor, or an .npy file), on which the server computes them, or use group norms"
)


def _inputs(path: str | Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"calibration must be an .npy file of inputs; {str(path)!r}: {error}"
        ) from error


def _record(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in params.items()})


def _digest(settings: dict[str, Any], params: Params) -> str:
    """What a kept round must have been made with."""
    about = {**settings, "shapes": {name: list(tensor.shape) for name, tensor in params.items()}}
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _renumbered(result: Result, arrays: ArrayRecord, done: int) -> Result:
    """A result whose rounds are counted from the beginning of the run."""
    for kind in (
        "train_metrics_clientapp",
        "evaluate_metrics_clientapp",
        "evaluate_metrics_serverapp",
    ):
        setattr(
            result,
            kind,
            {round + done: figures for round, figures in getattr(result, kind).items()},
        )
    result.arrays = result.arrays or arrays
    return result
