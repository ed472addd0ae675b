"""The metrics of a round: coverage, noise, cost, coverage maps and test scores."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedcover.server.averaging import with_averaged_params
from fedcover.server.clipping import change
from fedcover.server.cohort import reduction_for_capacity
from fedcover.server.evaluation import ReusedGlobalModule, Score, client_accuracies, evaluate
from fedcover.server.privacy import PrivacyAccountant
from fedcover.server.round_setup import Setup
from fedcover.submodels import coverage as cov
from fedcover.submodels.cost import Cost, cost
from fedcover.submodels.coverage_maps import round_coverage_maps
from fedcover.tensors import norm
from fedcover.types import Client, Coverage, Params, State, Update


def measure_round(
    setup: Setup,
    before: State,
    after: State,
    cohort: tuple[Client, ...],
    updates: Sequence[Update],
    accountant: PrivacyAccountant | None,
) -> dict[str, Any]:
    """Return all metrics of a round that need no test set."""
    answered = {update.client.id for update in updates}
    metrics = {
        "lr": setup.lr(before.round),
        "train_loss": _mean([update.loss for update in updates]),
        "dropped": [client.id for client in cohort if client.id not in answered],
        **submodel_metrics(before.params, after.coverage, updates, setup.uses),
    }
    limit = setup.experiment.clip_updates
    if limit is not None:
        metrics["clipped"] = sum(
            norm(change(before.params, update.trained, update.params).values()) > limit
            for update in updates
        )
    if accountant is not None:
        metrics["epsilon"] = accountant.epsilon(before.round)
    return metrics


def submodel_metrics(
    params: Params, coverage: Coverage, updates: Sequence[Update], uses: Mapping[str, int]
) -> dict[str, Any]:
    """Return what the clients' sub-models say about a round: coverage, noise, cost and maps.

    Args:
        params: the global model before the round.
        coverage: the coverage after the round.
        updates: the answers of the round, by client id.
        uses: how often each weight is multiplied for one sample.
    """
    counts = coverage.window[-1]
    costs = _costs(params, updates, uses)
    # A GPU may still be evaluating: begin with what needs it least.
    maps = round_coverage_maps(counts, updates)
    delta2_by_client = cov.delta2(params, [update.sent for update in updates])
    clients = {
        str(update.client.id): {
            "capacity": update.client.capacity,
            "delta2": delta2,
            "loss": update.loss,
        }
        for update, delta2 in zip(updates, delta2_by_client, strict=True)
    }
    histogram = cov.histogram(counts)
    return {
        "gamma_round": cov.minimum(counts),
        "gamma_window": cov.minimum(cov.over_window(coverage)),
        "histogram": {str(count): entries for count, entries in histogram.items()},
        "clients": clients,
        "delta2_mean": _mean(delta2_by_client),
        "parameters": _mean([cost.parameters for cost in costs]),
        "multiply_adds": _mean([cost.multiply_adds for cost in costs]),
        "bytes_down": sum(cost.bytes_down for cost in costs),
        "bytes_up": sum(cost.bytes_up for cost in costs),
        "pictures": maps,
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _costs(params: Params, updates: Sequence[Update], uses: Mapping[str, int]) -> list[Cost]:
    """Return the cost of each update; clients that share a sub-model share the calculation."""
    costs: dict[tuple[int, int], Cost] = {}
    for update in updates:
        key = id(update.sent), id(update.trained)
        if key not in costs:
            costs[key] = cost(update.sent, params, uses, update.trained)
    return [costs[id(update.sent), id(update.trained)] for update in updates]


def score_global_model(
    setup: Setup, state: State, global_module: ReusedGlobalModule
) -> dict[str, Score]:
    """Score the global model on the test and validation samples if an evaluation is due.

    Returns:
        The scores by the pattern of their metrics' names, such as `validation_{}` for the
        validation samples and `{}_averaged` for the averaged model on the test samples.
    """
    is_last_round = state.round == setup.experiment.rounds
    if not is_last_round and state.round % setup.experiment.evaluate_every:
        return {}
    source = setup.task.source
    samples_by_pattern = {"{}": source.test}
    if source.validation is not None:
        samples_by_pattern["validation_{}"] = source.validation
    state_by_suffix = {"": state}
    if state.average:
        state_by_suffix["_averaged"] = with_averaged_params(state)
    options: dict[str, Any] = {
        "mode": setup.experiment.evaluation,
        "process_group": setup.process_group,
        "global_module": global_module,
    }
    scores = {}
    for suffix, model_state in state_by_suffix.items():
        for pattern, samples in samples_by_pattern.items():
            scores[pattern + suffix] = evaluate(setup.task, model_state, samples, **options)
    return scores


def score_other_models(
    setup: Setup, state: State, updates: Sequence[Update], global_module: ReusedGlobalModule
) -> dict[str, float]:
    """Score the common, single-device and local models in the rounds in which these are due.

    They are due every `local_every` rounds and after the last round.
    """
    is_last_round = state.round == setup.experiment.rounds
    is_due = (
        setup.experiment.local_every is not None and state.round % setup.experiment.local_every == 0
    )
    if not is_last_round and not is_due:
        return {}
    scores = evaluate_common_and_single(setup, state, global_module)
    local_scores = client_accuracies(setup.task, state, updates, setup.process_group)
    if local_scores is not None:
        scores["accuracy_local"], scores["accuracy_trained"] = local_scores
    return scores


def evaluate_common_and_single(
    setup: Setup, state: State, global_module: ReusedGlobalModule
) -> dict[str, float]:
    """Score the common model and the largest sub-model that a single device can hold.

    The common model is the global model with weights that no client ever trained set to zero.
    """
    test = setup.task.source.test
    options: dict[str, Any] = {
        "mode": setup.experiment.evaluation,
        "process_group": setup.process_group,
        "global_module": global_module,
    }
    capacity = max(setup.fleet.levels)
    common = replace(state, params=cov.covered_only(state.params, state.coverage))
    part = reduction_for_capacity(setup, state, capacity)
    scores = {"accuracy_common": evaluate(setup.task, common, test, **options).accuracy}
    if part is not None:
        single = evaluate(setup.task, state, test, reduction=part, capacity=capacity, **options)
        scores["accuracy_single"] = single.accuracy
    return scores
