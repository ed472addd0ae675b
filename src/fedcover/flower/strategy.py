"""A Flower strategy that sends every node the part of the model that fits its capacity."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedcover import registry
from fedcover.errors import InvalidValue
from fedcover.flower.bounded_grid import DAY, BoundedGrid
from fedcover.flower.events import EventLog
from fedcover.flower.node_registry import NodeRegistry
from fedcover.flower.registration import wait_for_minimum_nodes
from fedcover.flower.sampling import Sampling
from fedcover.flower.strategy_evaluation import aggregate_metrics, evaluation_message
from fedcover.flower.strategy_options import (
    NEEDS_CALIBRATION,
    check_choices,
    load_calibration,
    name_of_policy,
    prepare_model,
    settings_digest,
)
from fedcover.flower.strategy_training import (
    count_all_rounds,
    module_params,
    params_from_record,
    params_to_record,
    read_updates,
    renumber_rounds,
    training_message,
)
from fedcover.flower.transport import Transport
from fedcover.log import log
from fedcover.models.norms import calibrate, running_statistics
from fedcover.policies import as_policy, policy_from_spec
from fedcover.runs import checkpoints
from fedcover.server.aggregation import WEIGHTS
from fedcover.server.contracts import build_rule, checked_server, warn_of_unused_weights
from fedcover.server.evaluation import FULL_REDUCTION
from fedcover.server.optimizers import SERVERS, apply_server_step
from fedcover.server.task_ledger import TaskLedger
from fedcover.submodels import coverage as cov
from fedcover.submodels.build import submodel
from fedcover.types import Client, Coverage, Model, Params, PolicyFunction, State, Update, View


class CoverageStrategy(Strategy):
    """Train one model on nodes that hold only parts of it, and average what they trained.

    Start each node with `--node-config "capacity=0.5"`; its app is `client_app`.
    Add `partition-id=K num-partitions=N` if a node must keep its partition when it reconnects.

    Args:
        model: The module and its unit groups; `fc.Model(module, fc.trace(module, example))`.
        policy: Chooses the part for each node: the name of an experiment's policy, or a function.
        rule: How an experiment combines the updates of a round.
        server: The server optimizer: "none", "momentum(beta=0.9)", "adam(lr=0.01)", ...
        sampling: How many nodes train in a round, and how many evaluate after it.
        folder: Where to save the model after every round; `start` resumes from the last one there.
        weights: "uniform", or "samples" to weigh nodes by the samples that they report.
        capacity: What a capacity is a share of: "width" or "parameters".
        window: The number of rounds over which coverage is counted.
        seed: The seed of all random choices of the server.
        calibration: Inputs on which norm statistics are computed, or the .npy file that holds them.

    Raises:
        InvalidValue: If an argument is not allowed, or a model that needs calibration has none
            although nodes evaluate it.
    """

    def __init__(
        self,
        model: Model,
        policy: str | PolicyFunction = "rolling",
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
        self.model = prepare_model(model)
        check_choices(weights, capacity, window, seed)
        self.capacity, self.window, self.seed = capacity, window, seed
        self._policy_name = name_of_policy(policy)
        self.policy = policy_from_spec(policy) if isinstance(policy, str) else as_policy(policy)
        warn_of_unused_weights(rule, weights)
        self.rule = build_rule(rule)
        optimizer = registry.look_up("server", registry.parse("server", server), SERVERS)()
        self.server = checked_server(server, optimizer)
        self.sampling = sampling or Sampling()
        self.folder = None if folder is None else Path(folder)
        self.weight = WEIGHTS[weights]
        self.calibration = load_calibration(calibration)
        self.coverage = Coverage((), {})
        self._node_registry = NodeRegistry(unlimited=True)
        self._ledger = TaskLedger()
        self._event_log = EventLog(None)
        self._sent: Params = {}
        self._max_bytes: dict[int, int] = {}
        self._server_state: dict[str, Params] = {}
        self._rounds_done = 0  # before the current call of `start`
        self._identity = settings_digest(
            self._policy_name,
            self._initial_params(),
            rule=rule,
            server=server,
            weights=weights,
            capacity=capacity,
            window=window,
            seed=seed,
            **asdict(self.sampling),
        )
        if self._lacks_calibration():
            if self.sampling.fraction_evaluate:
                raise InvalidValue(f"fraction_evaluate: {NEEDS_CALIBRATION}")
            log.warning(NEEDS_CALIBRATION)

    def initial_arrays(self) -> ArrayRecord:
        """Return the parameters that the model has now, to start from."""
        return params_to_record(self._initial_params())

    def ready(self, arrays: ArrayRecord) -> nn.Module:
        """Build the global model for inference, with norm statistics of the calibration inputs.

        Args:
            arrays: The parameters, such as `result.arrays`.

        Returns:
            A new module in evaluation mode.

        Raises:
            InvalidValue: If the model needs calibration inputs and the strategy has none.
        """
        if self._lacks_calibration():
            raise InvalidValue(NEEDS_CALIBRATION)
        module = submodel(self.model.module, FULL_REDUCTION, self._params(arrays))
        return module.eval() if self.calibration is None else calibrate(module, self.calibration)

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
        """Run the rounds, as every strategy of Flower does, with a limit on the size of replies.

        If `folder` already holds rounds, the run resumes after them.

        Args:
            grid: The grid of the ServerApp.
            initial_arrays: The parameters to start from; by default those of the model.
            num_rounds: The number of rounds in all, including those in `folder`.
            timeout: The seconds that nodes have for a round.
            train_config: What every node gets for training.
            evaluate_config: What every node gets for evaluation.
            evaluate_fn: Evaluates the global model on the server after each round.

        Returns:
            The metrics of the rounds of this call, under their own numbers, and the parameters.

        Raises:
            RunError: If too few nodes connect, or the folder belongs to another experiment.
        """
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        arrays, self._rounds_done = self._load_checkpoint(arrays)
        rounds_done = self._rounds_done
        bounded_grid: Any = BoundedGrid(
            grid, self._max_bytes, self._node_registry.unresponsive_nodes
        )
        result = super().start(
            bounded_grid,
            arrays,
            max(0, num_rounds - rounds_done),
            timeout,
            train_config,
            evaluate_config,
            None if evaluate_fn is None else count_all_rounds(evaluate_fn, rounds_done),
        )
        self._rounds_done = 0
        if rounds_done:
            result = renumber_rounds(result, rounds_done)
            result.arrays = result.arrays or arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for each node that trains in the round, with its part of the model."""
        round = self._rounds_done + server_round - 1
        node_of_partition = wait_for_minimum_nodes(
            Transport(grid), self._node_registry, self._event_log, self.sampling, round
        )
        partition_ids = self.sampling.to_train(sorted(node_of_partition), self.seed, round)
        cohort = self._build_cohort(partition_ids, node_of_partition)
        self._ledger.close()
        self._sent = self._params(arrays)
        parts = self.policy(self._build_view(round, cohort, node_of_partition, self._sent))
        messages = []  # not a generator: Flower iterates twice
        for client, part in zip(cohort, parts, strict=True):
            if part is not None:
                node = node_of_partition[client.id]
                message, self._max_bytes[node] = training_message(
                    node, round, client, part, self.model, self._sent, self._ledger, config, ttl=DAY
                )
                messages.append(message)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average every parameter over the nodes that trained it; reject invalid replies."""
        round = self._rounds_done + server_round
        rejections: list[str] = []
        updates = read_updates(replies, self._ledger, rejections.append)
        for why in rejections:
            log.warning("round %d: rejected: %s", round, why)
        counts = cov.count(self._sent, [update.trained for update in updates])
        self.coverage = cov.record(self.coverage, counts, self.window)
        params = self._aggregate(updates, counts)
        if self.folder is not None:
            state = State(round, params, coverage=self.coverage, server=self._server_state)
            checkpoints.save_checkpoint(self.folder, state, self._identity)
        metrics: dict[str, Any] = {
            "answered": len(updates),
            "rejected": len(rejections),
            "gamma_round": cov.minimum(counts),
            "gamma_window": cov.minimum(cov.over_window(self.coverage)),
        }
        if not updates:
            return None, MetricRecord(metrics)
        metrics["loss"] = fmean(update.loss for update in updates)
        return params_to_record(params), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for each node that evaluates, with its part of the model."""
        round = self._rounds_done + server_round - 1
        node_of_partition = self._node_registry.node_of_partition(Transport(grid).connected_nodes())
        partition_ids = self.sampling.to_evaluate(sorted(node_of_partition), self.seed, round)
        if not partition_ids:
            return []
        cohort, params = self._build_cohort(partition_ids, node_of_partition), self._params(arrays)
        parts = self.policy(self._build_view(round, cohort, node_of_partition, params))
        # evaluation returns metrics, no tensors
        self._max_bytes.update(dict.fromkeys(node_of_partition.values(), 0))
        calibration = self.calibration if running_statistics(self.model.module) else None
        messages = []
        for client, part in zip(cohort, parts, strict=True):
            if part is not None:
                node = node_of_partition[client.id]
                messages.append(
                    evaluation_message(
                        node, round, client, part, self.model, params, calibration, config, ttl=DAY
                    )
                )
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average every metric over the nodes that evaluated, weighted by their examples."""
        round = self._rounds_done + server_round
        return aggregate_metrics(
            replies, lambda why: log.warning("round %d: evaluation rejected: %s", round, why)
        )

    def summary(self) -> None:
        """Log the policy and the size of the model."""
        num_parameters = sum(tensor.numel() for tensor in self._initial_params().values())
        log.info("coverage strategy: %s, %d parameters", self._policy_name, num_parameters)

    def _load_checkpoint(self, arrays: ArrayRecord) -> tuple[ArrayRecord, int]:
        """Return the parameters to start from, and how many rounds the folder holds."""
        if self.folder is None:
            return arrays, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if not checkpoints.list_checkpoints(self.folder):
            return arrays, 0
        state, complaints = checkpoints.load_newest(self.folder, self._identity, "cpu")
        for complaint in complaints.values():
            log.warning("%s", complaint)
        self.coverage, self._server_state = state.coverage, dict(state.server)
        log.info("resuming after round %d, from %s", state.round, self.folder)
        return params_to_record(state.params), state.round

    def _build_cohort(
        self, partition_ids: Sequence[int], node_of_partition: dict[int, int]
    ) -> tuple[Client, ...]:
        clients = []
        for slot, partition_id in enumerate(partition_ids):
            capacity = self._node_registry.capacity_of(node_of_partition[partition_id])
            clients.append(Client(partition_id, capacity, slot, 1, ()))
        return tuple(clients)

    def _build_view(
        self,
        round: int,
        cohort: tuple[Client, ...],
        node_of_partition: dict[int, int],
        params: Params,
    ) -> View:
        """Return what a policy may know when it chooses the parts of a round."""
        capacities = {self._node_registry.capacity_of(node) for node in node_of_partition.values()}
        return View(
            round=round,
            params=params,
            groups=self.model.groups,
            prunable=self.model.prunable,
            cohort=cohort,
            levels=tuple(sorted(capacities, reverse=True)),
            measure=self.capacity,
            coverage=self.coverage,
            seed=self.seed,
        )

    def _aggregate(self, updates: Sequence[Update], counts: Params) -> Params:
        """Return the new parameters; without updates those that were sent."""
        if not updates:
            return self._sent
        weighted_updates = [(u.trained, u.params, self.weight(u.client)) for u in updates]
        mean = self.rule(self._sent, weighted_updates)
        params, self._server_state = apply_server_step(
            self.server, self._sent, mean, counts, self._server_state, "keep"
        )
        return params

    def _lacks_calibration(self) -> bool:
        return bool(running_statistics(self.model.module)) and self.calibration is None

    def _initial_params(self) -> Params:
        return module_params(self.model.module)

    def _params(self, arrays: ArrayRecord) -> Params:
        return params_from_record(arrays, self._initial_params())
