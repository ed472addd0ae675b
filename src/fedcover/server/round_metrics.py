"""What a round's reductions say, whatever was learnt with them: coverage, noise, cost, pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedcover.server.aggregation import change, global_norm
from fedcover.server.cohort import reduction_for_capacity
from fedcover.server.evaluation import Score, evaluate, local_accuracy
from fedcover.server.round_setup import Setup
from fedcover.submodels import coverage as cov
from fedcover.submodels.cost import Cost, cost
from fedcover.submodels.coverage_maps import round_coverage_maps
from fedcover.types import Client, Coverage, Params, State, Update


def round_metrics(
    params: Params, coverage: Coverage, updates: Sequence[Update], uses: Mapping[str, int]
) -> dict[str, Any]:
    """The figures of a round: `params` before it, `coverage` after it."""
    counts = coverage.window[-1]
    prices: dict[tuple[int, int], Cost] = {}
    for u in updates:
        key = id(u.sent), id(u.trained)
        prices[key] = prices.get(key) or cost(u.sent, params, uses, u.trained)
    paid = [prices[id(u.sent), id(u.trained)] for u in updates]
    drawn = round_coverage_maps(
        counts, updates
    )  # what needs a GPU least comes first: it may still be evaluating
    delta2 = cov.delta2(params, [u.sent for u in updates])
    return {
        "gamma_round": cov.minimum(counts),
        "gamma_window": cov.minimum(cov.over_window(coverage)),
        "histogram": {str(k): v for k, v in cov.histogram(counts).items()},
        "clients": {
            str(u.client.id): {"capacity": u.client.capacity, "delta2": noise, "loss": u.loss}
            for u, noise in zip(updates, delta2, strict=True)
        },
        "delta2_mean": fmean(delta2) if updates else None,
        "parameters": fmean(c.parameters for c in paid) if paid else None,
        "multiply_adds": fmean(c.multiply_adds for c in paid) if paid else None,
        "bytes_down": sum(c.bytes_down for c in paid),
        "bytes_up": sum(c.bytes_up for c in paid),
        "pictures": drawn,
    }


def _round_metrics(
    setup: Setup, before: State, after: State, cohort: tuple[Client, ...], updates: Sequence[Update]
) -> dict[str, Any]:
    """What is known of a round without a test set."""
    limited: dict[str, float] = {}
    if (limit := setup.clip_updates) is not None:
        limited["clipped"] = sum(
            global_norm(change(before.params, u.trained, u.params)) > limit for u in updates
        )
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
    sets = {"": source.test} | (
        {"validation_": source.validation} if source.validation is not None else {}
    )
    return {
        prefix: evaluate(setup.task, state, samples, mode=setup.evaluation, ranks=setup.ranks)
        for prefix, samples in sets.items()
    }


def _other_scores(setup: Setup, state: State, updates: Sequence[Update]) -> dict[str, float]:
    """The scores of other models that are due after this round; the last round always has all of them."""
    if state.round != setup.rounds and not (
        setup.local_every and state.round % setup.local_every == 0
    ):
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
