"""The story in one function: sample a cohort, reduce the model, train, aggregate, evaluate."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedcover.errors import InvalidValue
from fedcover.fleet import drops_out
from fedcover.models.norms import running, statistics_key
from fedcover.policies.base import check_reductions, deduplicate
from fedcover.server.aggregation import WEIGHTS, clip_update
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.optimizers import apply_server_step
from fedcover.server.privacy import private_mean
from fedcover.server.round_metrics import _other_scores, _round_metrics, _scores
from fedcover.server.round_setup import Setup
from fedcover.submodels import coverage as cov
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.types import Client, Params, Reduction, State, Update


@dataclass(frozen=True)
class RoundReport:
    """What is known after a round: one line of metrics.jsonl."""

    round: int
    metrics: dict[str, Any] = field(default_factory=dict)


def initial_state(setup: Setup) -> State:
    """Before the first round: the model's own initial weights, nothing covered."""
    params = {name: p.detach().clone() for name, p in setup.task.model.module.named_parameters()}
    return State(0, params, _initial_statistics(setup, setup.fleet.levels))


def _initial_statistics(setup: Setup, capacities: Iterable[float]) -> dict[str, Params]:
    """The model's own statistics for every width that has some, in the order of the capacities."""
    keys = dict.fromkeys(statistics_key(setup.task.norm, capacity) for capacity in capacities)
    return {
        key: {n: t.clone() for n, t in running(setup.task.model.module).items()}
        for key in keys
        if key
    }


def _with_widths(setup: Setup, state: State, cohort: tuple[Client, ...]) -> State:
    """The state with statistics for every width of the cohort: a width that is new starts with the model's own."""
    fresh = _initial_statistics(setup, (client.capacity for client in cohort))
    missing = {key: values for key, values in fresh.items() if key not in state.statistics}
    return replace(state, statistics=state.statistics | missing) if missing else state


def run_round(setup: Setup, state: State) -> tuple[State, RoundReport]:
    """One communication round; the report tells of the state after it."""
    asked = start_round(setup, state)
    state = _with_widths(setup, state, asked.cohort)
    with asked.clock("training"):
        updates = list(setup.engine(setup.task, state, asked.work, setup.lr(state.round)))
    return finish_round(setup, state, asked, updates)


@dataclass(frozen=True)
class PendingRound:
    """The first half of a round: who takes part, what each is given, and the time it took."""

    cohort: tuple[Client, ...]
    work: Sequence[tuple[Client, Reduction]]
    clock: "Clock"


def start_round(setup: Setup, state: State) -> PendingRound:
    """Choose a cohort, and give each of its clients its part of the model."""
    clock = Clock()
    # an engine that reaches other machines knows which clients are there; None where all always are
    members = getattr(setup.engine, "members", lambda setup, round: None)(setup, state.round)
    with clock("policy"):
        try:
            view = view_of(setup, state, cohort_of(setup, state.round, members))
            given = setup.policy(view)
        except InvalidValue:
            if members is None:
                raise
            view = view_of(
                setup, state, cohort_of(setup, state.round)
            )  # too few are there for what is wanted
            given = setup.policy(view)
        if setup.check_capacity:
            check_reductions(view, given)
        planned = deduplicate(given, setup.reduction_cache)
    work = [
        (client, reduction)
        for client, reduction in zip(view.cohort, planned, strict=True)
        if reduction is not None
        and not drops_out(client.id, setup.drop_out, setup.task.seed, state.round)
    ]
    return PendingRound(view.cohort, work, clock)


def finish_round(
    setup: Setup, state: State, asked: PendingRound, answers: Sequence[Update]
) -> tuple[State, RoundReport]:
    """The second half of a round: make one model of what came back, and measure it."""
    clock = asked.clock
    # sums are made in the order of client ids, so that nothing depends on who answers first
    updates = sorted(answers, key=lambda update: update.client.id)
    with clock("aggregation"):
        after = apply_growth(setup, aggregate(setup, state, updates), asked.cohort)
    with clock("evaluation"):
        scores = _scores(setup, after)
    with clock("measuring"):  # while a GPU evaluates
        metrics = _round_metrics(setup, state, after, asked.cohort, updates)
    with clock("evaluation"):
        for prefix, score in scores.items():
            metrics |= {f"{prefix}accuracy": score.accuracy, f"{prefix}loss": score.loss}
        metrics |= _other_scores(setup, after, updates)
    metrics |= getattr(
        setup.engine, "round_metrics", dict
    )()  # an engine that reaches other machines tells who failed
    return after, RoundReport(state.round, {**metrics, "seconds": clock.seconds})


def aggregate(setup: Setup, state: State, updates: Sequence[Update]) -> State:
    """The state after a round in which these updates came back."""
    if not updates:  # nobody answered, so not even `uncovered` has a say
        nothing = cov.count(state.params, [])
        return replace(
            state, round=state.round + 1, coverage=cov.record(state.coverage, nothing, setup.window)
        )
    weight = WEIGHTS[setup.weights]
    counts = cov.count(state.params, [update.trained for update in updates])
    averaged = _combine_updates(setup, state.params, updates)
    params, server = apply_server_step(
        setup.server, state.params, averaged, counts, state.server, setup.uncovered
    )
    statistics = {
        key: setup.mean(
            known,
            [
                (u.sent, u.buffers, weight(u.client))
                for u in updates
                if statistics_key(setup.task.norm, u.client.capacity) == key
            ],
        )
        for key, known in state.statistics.items()
    }
    private = {**state.private, **{u.client.id: u.private for u in updates if u.private}}
    coverage = cov.record(state.coverage, counts, setup.window)
    return State(
        state.round + 1,
        params,
        statistics,
        coverage,
        _average_measurements(setup, state, updates),
        server,
        private,
    )


def apply_growth(setup: Setup, state: State, cohort: tuple[Client, ...]) -> State:
    """The state as the next round begins: with its model changed, and all that belongs to it, where that is due."""
    change = setup.growth(view_of(setup, state, cohort)) if setup.growth else None
    if change is None:
        return state
    statistics = {key: change(known) for key, known in state.statistics.items()}
    server = {slot: change(known) for slot, known in state.server.items()}
    return replace(state, params=change(state.params), statistics=statistics, server=server)


def _combine_updates(setup: Setup, old: Params, updates: Sequence[Update]) -> Params:
    """What the rule makes of the updates, shortened where there is a limit; noised where that is asked for."""
    limit, weight = setup.clip_updates, WEIGHTS[setup.weights]
    if setup.privacy is not None and limit is not None:
        if any(isinstance(u.trained, TrainedSubset) for u in updates):
            raise InvalidValue(
                "privacy: with this recipe a client says what of its part it trained, past the noise"
            )
        parts = [(u.trained, u.params) for u in updates]
        return private_mean(old, parts, clip=limit, noise=setup.privacy.noise, stream=setup.noise())
    values = [
        u.params if limit is None else clip_update(old, u.trained, u.params, limit) for u in updates
    ]
    return setup.rule(
        old, [(u.trained, v, weight(u.client)) for u, v in zip(updates, values, strict=True)]
    )


def _average_measurements(
    setup: Setup, state: State, updates: Sequence[Update]
) -> dict[str, Params]:
    """What clients measured, averaged over those who measured it; what nobody measured anew stays."""
    found = dict(state.measured)
    for kind in {kind: None for update in updates for kind in update.measured}:
        parts = [
            (without_masks(u.sent), u.measured[kind], 1.0) for u in updates if kind in u.measured
        ]
        names = parts[0][1]
        known = found.get(kind) or {name: torch.zeros_like(state.params[name]) for name in names}
        found[kind] = setup.mean(known, parts)
    return found


class Clock:
    """Seconds spent in each named phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
