"""Does this fit my device? What every capacity of a fleet costs, and what a codename of the paper covers."""

from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from fedcover.errors import InvalidValue
from fedcover.fleet import Fleet
from fedcover.policies import growth_of
from fedcover.policies.paper_regions import region_coverage
from fedcover.runs.components import build_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.setup import build_policy, build_source
from fedcover.submodels import coverage
from fedcover.submodels.cost import cost, memory_to_train, uses_of_weights
from fedcover.types import Client, Coverage, View

DATASET_SHAPES: dict[str, tuple[tuple[int, ...], int, torch.dtype]] = {
    "digits": ((1, 8, 8), 10, torch.float32),
    "characters": ((64,), 128, torch.int64),
    "mnist": ((1, 28, 28), 10, torch.float32),
    "cifar10": ((3, 32, 32), 10, torch.float32),
    "cifar100": ((3, 32, 32), 100, torch.float32),
}
"""Input shape, number of classes and type of inputs of the known data sets, so that an audit needs no data."""

MAX_AUDIT_DEVICES = 10_000


def audit(experiment: Experiment) -> dict[str, Any]:
    """Cost per capacity and coverage when every device of the fleet, as written, takes part in the first round.

    >>> audit(codename("1111223344", "pruning"))["gamma_min"]
    8
    """
    shape, classes, dtype = dataset_shape(experiment.dataset)
    model = build_model(experiment, shape, classes, dtype)
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    fleet = Fleet.parse(experiment.fleet)
    if sum(fleet.counts) > MAX_AUDIT_DEVICES:
        raise InvalidValue(
            f"fleet: an audit takes at most {MAX_AUDIT_DEVICES:,} devices; got {sum(fleet.counts):,}"
        )
    cohort = tuple(Client(i, fleet.capacity(i), i, 1, ()) for i in range(sum(fleet.counts)))
    policy, uses = build_policy(experiment), uses_of_weights(model.module, shape, dtype)
    view = View(0, params, model.groups, model.prunable, cohort, fleet.levels, experiment.capacity,
                Coverage((), {}), experiment.seed, uses=uses, classifier=model.classifier,
                rounds=experiment.rounds if growth_of(policy) else None)  # fmt: skip
    held = [(client, part) for client, part in zip(cohort, policy(view), strict=True) if part]
    costs = [cost(part, params, uses) for _, part in held]
    counts = coverage.count(params, [part for _, part in held])
    by_level = {
        level: [part for client, part in held if client.capacity == level] for level in fleet.levels
    }
    return {
        "model": experiment.model,
        "policy": experiment.policy,
        "parameters": fmean(c.parameters for c in costs),
        "multiply_adds": fmean(c.multiply_adds for c in costs),
        "gamma_min": coverage.minimum(counts),
        "histogram": {str(k): v for k, v in coverage.histogram(counts).items()},
        "capacities": [
            {
                "capacity": level,
                "devices": len(alike),
                **asdict(cost(alike[0], params, uses)),
                "memory": memory_to_train(
                    model, alike[0], shape, batch_size=experiment.batch_size, dtype=dtype
                ),
                "delta2": fmean(coverage.delta2(params, alike)),
            }
            for level, alike in by_level.items()
            if alike
        ],
    }


def dataset_shape(dataset: str) -> tuple[tuple[int, ...], int, torch.dtype]:
    """A sample's shape, the number of classes and the type of a data set; the large ones need not be there.

    >>> dataset_shape("cifar10")[:2], dataset_shape("synthetic(shape=[3, 16, 16], classes=5)")[:2]
    (((3, 32, 32), 10), ((3, 16, 16), 5))
    """
    if dataset in DATASET_SHAPES:
        return DATASET_SHAPES[dataset]
    source = build_source(Experiment(dataset=dataset, clients=1, active=1), "cpu", None)
    return tuple(source.test.x.shape[1:]), source.classes, source.test.x.dtype


def codename(digits: str, kind: str, p5: str = "code", **fields: Any) -> Experiment:
    """The experiment that a codename of the paper stands for; other `fields` as for any experiment."""
    policy = f"regions(codename={digits!r}, kind={kind!r}, p5={p5!r})"
    return Experiment(
        **{"dataset": "mnist", "clients": max(100, len(digits)), **fields, "policy": policy}
    )


def audit_codename(digits: str, kind: str, p5: str = "code", **fields: Any) -> dict[str, Any]:
    """The audit of a codename, with the coverage of each region beside it."""
    found = audit(codename(digits, kind, p5, **fields))
    return {"codename": digits, "kind": kind, **found, "coverage": region_coverage(digits, p5)}
