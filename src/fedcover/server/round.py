"""One communication round, from sampling clients to measuring the new global model.

A round has three parts, and `run_round` is all of them:

1. `start_round` samples a cohort and lets the policy assign each client its sub-model.
2. The engine trains each client on its sub-model and returns one `Update` per client.
3. `finish_round` aggregates the updates into the next `State`, then evaluates and measures it.

Callers that train in their own way (several runs side by side, say) call the two halves themselves.
A `Setup` stays the same, and a `State` is never changed. Only a `RoundCache` changes from round to
round, and it changes no result.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedcover.errors import InvalidValue
from fedcover.fleet import drops_out
from fedcover.models.norms import running_statistics, statistics_key
from fedcover.policies.base import check_reductions, deduplicate
from fedcover.server.aggregation import WEIGHTS
from fedcover.server.averaging import update_average
from fedcover.server.clipping import clip_update
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.optimizers import apply_server_step
from fedcover.server.privacy import private_mean
from fedcover.server.round_cache import RoundCache
from fedcover.server.round_metrics import measure_round, score_global_model, score_other_models
from fedcover.server.round_setup import Setup
from fedcover.submodels import coverage as cov
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.types import Client, Params, Reduction, State, Update, View


class Clock:
    """Measure the seconds spent in each phase of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of a `with` block to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class RoundReport:
    """The metrics of one round: a line of metrics.jsonl."""

    round: int
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingRound:
    """A round whose clients have been chosen but have not trained yet.

    `cohort` are all sampled clients. `work` leaves out those without a sub-model and those that
    drop out.
    """

    cohort: tuple[Client, ...]
    work: Sequence[tuple[Client, Reduction]]
    clock: Clock


def initial_state(setup: Setup) -> State:
    """Return the state before the first round: the model's initial weights, nothing covered."""
    named_parameters = setup.task.model.module.named_parameters()
    params = {name: parameter.detach().clone() for name, parameter in named_parameters}
    return State(0, params, _initial_statistics(setup, setup.fleet.levels))


def run_round(
    setup: Setup, state: State, cache: RoundCache | None = None
) -> tuple[State, RoundReport]:
    """Run one communication round.

    Args:
        setup: what is the same in every round.
        state: the run after the previous round.
        cache: the caches of the run, if it has other rounds.

    Returns:
        The state after this round, and the metrics of the round.
    """
    cache = cache or RoundCache.of(setup)
    pending = start_round(setup, state, cache)
    state = _with_statistics_for(setup, state, pending.cohort)
    with pending.clock("training"):
        updates = list(setup.engine(setup.task, state, pending.work, setup.lr(state.round)))
    return finish_round(setup, state, pending, updates, cache)


# ── before training ─────────────────────────────────────────────────────────────────────────────


def start_round(setup: Setup, state: State, cache: RoundCache | None = None) -> PendingRound:
    """Sample a cohort and assign each of its clients a sub-model."""
    cache = cache or RoundCache.of(setup)
    clock = Clock()
    connected = _connected_clients(setup, state.round)
    with clock("policy"):
        view, reductions = _assign_submodels(setup, state, connected)
        if setup.check_capacity:
            check_reductions(view, reductions)
        assigned = deduplicate(reductions, cache.slices)
    work = [
        (client, reduction)
        for client, reduction in zip(view.cohort, assigned, strict=True)
        if reduction is not None and not _drops_out(setup, client, state.round)
    ]
    return PendingRound(view.cohort, work, clock)


def _connected_clients(setup: Setup, round: int) -> Mapping[int, float] | None:
    """Return the connected clients with their capacities; None if all clients always take part.

    A device that declares no capacity has that of the fleet.
    """
    members = setup.engine.members(round)
    if members is None:
        return None
    return {
        client: setup.fleet.capacity(client) if capacity is None else capacity
        for client, capacity in members.items()
    }


def _assign_submodels(
    setup: Setup, state: State, connected: Mapping[int, float] | None
) -> tuple[View, Sequence[Reduction | None]]:
    """Sample a cohort and ask the policy for one sub-model per client."""
    try:
        view = view_of(setup, state, cohort_of(setup, state.round, connected))
        return view, setup.policy(view)
    except InvalidValue:
        if connected is None:
            raise
    # Too few clients are connected for this policy. Sample from the whole fleet instead: those that
    # are not connected will not answer.
    view = view_of(setup, state, cohort_of(setup, state.round))
    return view, setup.policy(view)


def _drops_out(setup: Setup, client: Client, round: int) -> bool:
    return drops_out(client.id, setup.experiment.drop_out, setup.task.seed, round)


def _initial_statistics(setup: Setup, capacities: Iterable[float]) -> dict[str, Params]:
    """Copy the model's own norm statistics for every width among these capacities that has some."""
    keys = dict.fromkeys(statistics_key(setup.task.norm, capacity) for capacity in capacities)
    module = setup.task.model.module
    return {
        key: {name: tensor.clone() for name, tensor in running_statistics(module).items()}
        for key in keys
        if key
    }


def _with_statistics_for(setup: Setup, state: State, cohort: tuple[Client, ...]) -> State:
    """Add norm statistics to the state for widths that occur in the cohort for the first time."""
    initial = _initial_statistics(setup, (client.capacity for client in cohort))
    missing = {key: values for key, values in initial.items() if key not in state.statistics}
    return replace(state, statistics=state.statistics | missing) if missing else state


# ── after training ──────────────────────────────────────────────────────────────────────────────


def finish_round(
    setup: Setup,
    state: State,
    pending: PendingRound,
    updates: Sequence[Update],
    cache: RoundCache | None = None,
) -> tuple[State, RoundReport]:
    """Aggregate the updates of a round, and evaluate and measure the new global model."""
    cache = cache or RoundCache.of(setup)
    clock = pending.clock
    # Floating-point sums depend on their order, so never sum in the order of arrival.
    ordered = sorted(updates, key=lambda update: update.client.id)
    with clock("aggregation"):
        aggregated = _with_average(setup, aggregate(setup, state, ordered))
        new_state = apply_growth(setup, aggregated, pending.cohort)
    with clock("evaluation"):
        scores = score_global_model(setup, new_state, cache.global_module)
    # Scores are read below, so that a GPU can evaluate while the CPU measures.
    with clock("measuring"):
        metrics = measure_round(setup, state, new_state, pending.cohort, ordered, cache.accountant)
    with clock("evaluation"):
        for name, score in scores.items():
            metrics[name.format("accuracy")] = score.accuracy
            metrics[name.format("loss")] = score.loss
        metrics |= score_other_models(setup, new_state, ordered, cache.global_module)
    metrics |= setup.engine.round_metrics()
    metrics["seconds"] = clock.seconds
    return new_state, RoundReport(state.round, metrics)


def aggregate(setup: Setup, state: State, updates: Sequence[Update]) -> State:
    """Return the state after a round in which these clients answered."""
    if not updates:
        return _advance_without_updates(setup, state)
    counts = cov.count(state.params, [update.trained for update in updates])
    averaged = _combine_updates(setup, state.params, updates)
    params, server = apply_server_step(
        setup.server, state.params, averaged, counts, state.server, setup.experiment.uncovered
    )
    new_private = {update.client.id: update.private for update in updates if update.private}
    return State(
        round=state.round + 1,
        params=params,
        statistics=_average_statistics(setup, state, updates),
        coverage=cov.record(state.coverage, counts, setup.experiment.window),
        measured=_average_measurements(setup, state, updates),
        server=server,
        private=state.private | new_private,
        average=state.average,
    )


def _advance_without_updates(setup: Setup, state: State) -> State:
    """Return the state after a round without answers: all weights stay, even if uncovered."""
    no_coverage = cov.count(state.params, [])
    coverage = cov.record(state.coverage, no_coverage, setup.experiment.window)
    return replace(state, round=state.round + 1, coverage=coverage)


def _with_average(setup: Setup, state: State) -> State:
    """Let the new parameters count in the averaged ones."""
    rate = setup.average(state.round, setup.experiment.rounds)
    return replace(state, average=update_average(state.average, state.params, rate))


def _combine_updates(setup: Setup, old: Params, updates: Sequence[Update]) -> Params:
    """Apply the aggregation rule; clip the updates and add noise where the setup asks for it."""
    limit = setup.experiment.clip_updates
    if setup.privacy is not None and limit is not None:
        return _combine_privately(setup, old, updates, limit, setup.privacy.noise)
    weight = WEIGHTS[setup.experiment.weights]
    weighted_updates = []
    for update in updates:
        values = update.params
        if limit is not None:
            values = clip_update(old, update.trained, values, limit)
        weighted_updates.append((update.trained, values, weight(update.client)))
    return setup.rule(old, weighted_updates)


def _combine_privately(
    setup: Setup, old: Params, updates: Sequence[Update], limit: float, noise: float
) -> Params:
    if any(isinstance(update.trained, TrainedSubset) for update in updates):
        raise InvalidValue(
            "privacy: this recipe reports which entries were trained; "
            "that report is not covered by the noise"
        )
    parts = [(update.trained, update.params) for update in updates]
    return private_mean(old, parts, clip=limit, noise=noise, stream=setup.noise())


def _average_statistics(setup: Setup, state: State, updates: Sequence[Update]) -> dict[str, Params]:
    """Average the running norm statistics of the clients, for each width by itself."""
    weight = WEIGHTS[setup.experiment.weights]
    averaged = {}
    for key, old in state.statistics.items():
        parts = [
            (update.sent, update.buffers, weight(update.client))
            for update in updates
            if statistics_key(setup.task.norm, update.client.capacity) == key
        ]
        averaged[key] = setup.mean(old, parts)
    return averaged


def _average_measurements(
    setup: Setup, state: State, updates: Sequence[Update]
) -> dict[str, Params]:
    """Average each kind of measurement over the clients that report it; keep the other kinds."""
    averaged = dict(state.measured)
    kinds = dict.fromkeys(kind for update in updates for kind in update.measured)
    for kind in kinds:
        parts = [
            (without_masks(update.sent), update.measured[kind], 1.0)
            for update in updates
            if kind in update.measured
        ]
        names = parts[0][1]
        old = averaged.get(kind) or {name: torch.zeros_like(state.params[name]) for name in names}
        averaged[kind] = setup.mean(old, parts)
    return averaged


def apply_growth(setup: Setup, state: State, cohort: tuple[Client, ...]) -> State:
    """Change the model, and all tensors that belong to it, where the policy's growth step asks."""
    grow = setup.policy.grow
    if grow is None:
        return state
    transform = grow(view_of(setup, state, cohort))
    if transform is None:
        return state
    statistics = {key: transform(tensors) for key, tensors in state.statistics.items()}
    server = {name: transform(tensors) for name, tensors in state.server.items()}
    average = {key: transform(params) for key, params in state.average.items()}
    return replace(
        state,
        params=transform(state.params),
        statistics=statistics,
        server=server,
        average=average,
    )
