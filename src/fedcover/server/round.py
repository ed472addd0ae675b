"""The story in one function: sample a cohort, reduce the model, train, aggregate, evaluate."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

from fedcover.errors import InvalidValue
from fedcover.fleet import Fleet, drops_out, sample_cohort
from fedcover.models.norms import running, statistics_key
from fedcover.policies.base import check_reductions, deduplicate
from fedcover.server.aggregation import (
    WEIGHTS,
    ServerStep,
    apply_server_step,
    change,
    clip_update,
    coverage_mean,
    global_norm,
)
from fedcover.server.collectives import SINGLE_PROCESS, ProcessGroup
from fedcover.server.evaluation import Score, evaluate, local_accuracy
from fedcover.server.grid_noise import ByteStream, fresh_stream
from fedcover.server.privacy import Gaussian, most_turns, private_mean
from fedcover.server.round_metrics import round_metrics
from fedcover.submodels import coverage as cov
from fedcover.submodels.cost import uses_of_weights
from fedcover.submodels.reductions import Slices, TrainedSubset, without_masks
from fedcover.types import Client, Engine, GrowthStep, Params, Policy, Reduction, Rule, State, Task, Update, View


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same from round to round, resolved from an experiment."""

    task: Task
    fleet: Fleet
    clients: int
    active: int
    assignment: str
    capacity: str
    drop_out: float
    policy: Policy
    check_capacity: bool
    engine: Engine
    rule: Rule
    weights: str
    uncovered: str
    server: ServerStep
    lr: Callable[[int], float]
    rounds: int
    window: int
    evaluate_every: int
    local_every: int | None
    evaluation: str
    mean: Rule = coverage_mean
    ranks: ProcessGroup = SINGLE_PROCESS
    clip_updates: float | None = None
    growth: GrowthStep | None = None
    privacy: Gaussian | None = None
    noise: Callable[[], ByteStream] = fresh_stream

    @cached_property
    def _turns(self) -> tuple[list[int], Iterator[int]]:
        known = self.clients, self.active, self.task.seed
        return [], most_turns(sample_cohort(*known, round) for round in itertools.count())

    def turns(self, round: int) -> int:
        """How often the client that is asked most often has been asked by the end of a round."""
        counted, coming = self._turns
        counted.extend(itertools.islice(coming, max(0, round + 1 - len(counted))))
        return counted[round]

    @cached_property
    def reduction_cache(self) -> dict[bytes, Slices]:
        """The parts of the last round by their codes: what was made of them serves again."""
        return {}

    @cached_property
    def uses(self) -> dict[str, int]:
        """How often each weight is multiplied for one sample."""
        x = self.task.source.test.x
        return uses_of_weights(self.task.model.module, x.shape[1:], x.dtype)


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
    return {key: {n: t.clone() for n, t in running(setup.task.model.module).items()} for key in keys if key}


def cohort_of(setup: Setup, round: int, members: Mapping[int, float] | None = None) -> tuple[Client, ...]:
    """The clients of a round with the capacity they have in it.

    Where devices come and go it is drawn among `members`, the clients that are there, with their capacities.
    """
    everyone = sorted(members) if members else range(setup.clients)
    drawn = sample_cohort(len(everyone), min(setup.active, len(everyone)), setup.task.seed, round)
    cohort = tuple(client_of(setup, everyone[index], slot) for slot, index in enumerate(drawn))
    return tuple(replace(c, capacity=members[c.id]) for c in cohort) if members else cohort


def client_of(setup: Setup, id: int, slot: int) -> Client:
    """One client in one slot of the cohort; its capacity belongs to the device or to the slot."""
    source = setup.task.source
    capacity = setup.fleet.capacity(id if setup.assignment == "device" else slot)
    return Client(id, capacity, slot, source.count(id), source.labels(id))


def view_of(setup: Setup, state: State, cohort: tuple[Client, ...]) -> View:
    """What the policy may see in a round."""
    return View(
        round=state.round,
        params=dict(state.params),
        groups=setup.task.model.groups,
        prunable=setup.task.model.prunable,
        cohort=cohort,
        levels=_levels(setup, cohort),
        measure=setup.capacity,
        coverage=state.coverage,
        seed=setup.task.seed,
        measured=state.measured,
        uses=setup.uses,
        classifier=setup.task.model.classifier,
        rounds=setup.rounds if setup.growth else None,
    )


def _levels(setup: Setup, cohort: tuple[Client, ...]) -> tuple[float, ...]:
    """The capacities of the fleet, and of devices that have come with others since."""
    known = setup.fleet.levels
    others = {client.capacity for client in cohort}.difference(known)
    return tuple(sorted({*known, *others}, reverse=True)) if others else known


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
            view = view_of(setup, state, cohort_of(setup, state.round))  # too few are there for what is wanted
            given = setup.policy(view)
        if setup.check_capacity:
            check_reductions(view, given)
        planned = deduplicate(given, setup.reduction_cache)
    work = [
        (client, reduction)
        for client, reduction in zip(view.cohort, planned, strict=True)
        if reduction is not None and not drops_out(client.id, setup.drop_out, setup.task.seed, state.round)
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
    metrics |= getattr(setup.engine, "round_metrics", dict)()  # an engine that reaches other machines tells who failed
    return after, RoundReport(state.round, {**metrics, "seconds": clock.seconds})


def aggregate(setup: Setup, state: State, updates: Sequence[Update]) -> State:
    """The state after a round in which these updates came back."""
    if not updates:  # nobody answered, so not even `uncovered` has a say
        nothing = cov.count(state.params, [])
        return replace(state, round=state.round + 1, coverage=cov.record(state.coverage, nothing, setup.window))
    weight = WEIGHTS[setup.weights]
    counts = cov.count(state.params, [update.trained for update in updates])
    averaged = _combine_updates(setup, state.params, updates)
    params, server = apply_server_step(setup.server, state.params, averaged, counts, state.server, setup.uncovered)
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
        state.round + 1, params, statistics, coverage, _average_measurements(setup, state, updates), server, private
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
            raise InvalidValue("privacy: with this recipe a client says what of its part it trained, past the noise")
        parts = [(u.trained, u.params) for u in updates]
        return private_mean(old, parts, clip=limit, noise=setup.privacy.noise, stream=setup.noise())
    values = [u.params if limit is None else clip_update(old, u.trained, u.params, limit) for u in updates]
    return setup.rule(old, [(u.trained, v, weight(u.client)) for u, v in zip(updates, values, strict=True)])


def _average_measurements(setup: Setup, state: State, updates: Sequence[Update]) -> dict[str, Params]:
    """What clients measured, averaged over those who measured it; what nobody measured anew stays."""
    found = dict(state.measured)
    for kind in {kind: None for update in updates for kind in update.measured}:
        parts = [(without_masks(u.sent), u.measured[kind], 1.0) for u in updates if kind in u.measured]
        names = parts[0][1]
        known = found.get(kind) or {name: torch.zeros_like(state.params[name]) for name in names}
        found[kind] = setup.mean(known, parts)
    return found


def _round_metrics(
    setup: Setup, before: State, after: State, cohort: tuple[Client, ...], updates: Sequence[Update]
) -> dict[str, Any]:
    """What is known of a round without a test set."""
    limited: dict[str, float] = {}
    if (limit := setup.clip_updates) is not None:
        limited["clipped"] = sum(global_norm(change(before.params, u.trained, u.params)) > limit for u in updates)
    if setup.privacy is not None:
        limited["epsilon"] = setup.privacy.epsilon(setup.turns(before.round))
    answered = {u.client.id for u in updates}
    return {
        "lr": setup.lr(before.round),
        "train_loss": fmean(u.loss for u in updates) if updates else None,
        "dropped": [c.id for c in cohort if c.id not in answered],
        **round_metrics(before.params, after.coverage, updates, setup.uses),
        **limited,
    }


def _scores(setup: Setup, state: State) -> dict[str, Score]:
    """The scores of the global model that are due after this round, by the prefix of their names."""
    if state.round != setup.rounds and state.round % setup.evaluate_every:
        return {}
    source = setup.task.source
    sets = {"": source.test} | ({"validation_": source.validation} if source.validation is not None else {})
    return {
        prefix: evaluate(setup.task, state, samples, mode=setup.evaluation, ranks=setup.ranks)
        for prefix, samples in sets.items()
    }


def _other_scores(setup: Setup, state: State, updates: Sequence[Update]) -> dict[str, float]:
    """The scores of other models that are due after this round; the last round always has all of them."""
    if state.round != setup.rounds and not (setup.local_every and state.round % setup.local_every == 0):
        return {}
    scores = evaluate_common_and_single(setup, state)
    local = local_accuracy(setup.task, state, updates, setup.ranks)
    return scores | ({"accuracy_local": local[0], "accuracy_trained": local[1]} if local else {})


def evaluate_common_and_single(setup: Setup, state: State) -> dict[str, float]:
    """The largest common model (never-covered weights at zero) and the largest that a single device holds."""
    test = setup.task.source.test
    common = replace(state, params=cov.covered_only(state.params, state.coverage))
    capacity = max(setup.fleet.levels)
    part = reduction_for_capacity(setup, state, capacity)
    how: dict[str, Any] = {"mode": setup.evaluation, "ranks": setup.ranks}
    scores = {"accuracy_common": evaluate(setup.task, common, test, **how).accuracy}
    if part is not None:
        single = evaluate(setup.task, state, test, reduction=part, capacity=capacity, **how)
        scores["accuracy_single"] = single.accuracy
    return scores


def reduction_for_capacity(setup: Setup, state: State, capacity: float) -> Reduction | None:
    """The part of the model, if any, that the policy would give a device of some capacity in the coming round."""
    cohort = cohort_of(setup, state.round)
    slot = next((c.slot for c in cohort if c.capacity == capacity), 0)
    device = replace(cohort[slot], capacity=capacity)
    view = view_of(setup, state, cohort)
    asking = replace(view, cohort=(*cohort[:slot], device, *cohort[slot + 1 :]))  # it does not change the fleet
    return setup.policy(asking)[slot]


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
