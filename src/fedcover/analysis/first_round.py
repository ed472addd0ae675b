"""The first round of a fleet in which every device takes part, without loading any data."""

from typing import NamedTuple

import torch

from fedcover.errors import InvalidValue
from fedcover.fleet import Fleet
from fedcover.runs.components import build_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.setup import build_source
from fedcover.submodels.cost import uses_of_weights
from fedcover.types import Client, Coverage, Model, View

DATASET_SHAPES: dict[str, tuple[tuple[int, ...], int, torch.dtype]] = {
    "digits": ((1, 8, 8), 10, torch.float32),
    "characters": ((64,), 128, torch.int64),
    "mnist": ((1, 28, 28), 10, torch.float32),
    "cifar10": ((3, 32, 32), 10, torch.float32),
    "cifar100": ((3, 32, 32), 100, torch.float32),
}
"""Input shape, number of classes and input type of the known data sets."""


class FirstRound(NamedTuple):
    """A model, the shape and type of its inputs, and what the policy sees in the first round."""

    model: Model
    shape: tuple[int, ...]
    dtype: torch.dtype
    view: View


def first_round(experiment: Experiment, max_devices: int, purpose: str) -> FirstRound:
    """Build the first round with every device of the fleet, in the numbers as written.

    Raises:
        InvalidValue: if the fleet has more than `max_devices` devices; `purpose` is named.
    """
    shape, classes, dtype = dataset_shape(experiment.dataset)
    model = build_model(experiment, shape, classes, dtype)
    fleet = Fleet.parse(experiment.fleet)
    num_devices = sum(fleet.counts)
    if num_devices > max_devices:
        raise InvalidValue(
            f"fleet: {purpose} takes at most {max_devices:,} devices; got {num_devices:,}"
        )
    cohort = tuple(
        Client(id=index, capacity=fleet.capacity(index), slot=index, samples=1, labels=())
        for index in range(num_devices)
    )
    view = View(
        round=0,
        params={name: param.detach() for name, param in model.module.named_parameters()},
        groups=model.groups,
        prunable=model.prunable,
        cohort=cohort,
        levels=fleet.levels,
        measure=experiment.capacity,
        coverage=Coverage((), {}),
        seed=experiment.seed,
        uses=uses_of_weights(model.module, shape, dtype),
        classifier=model.classifier,
    )
    return FirstRound(model, shape, dtype, view)


def dataset_shape(dataset: str) -> tuple[tuple[int, ...], int, torch.dtype]:
    """Return the shape of a sample, the number of classes and the input type of a data set.

    The data sets of `DATASET_SHAPES` need not be downloaded.

    >>> dataset_shape("cifar10")[:2], dataset_shape("synthetic(shape=[3, 16, 16], classes=5)")[:2]
    (((3, 32, 32), 10), ((3, 16, 16), 5))
    """
    if dataset in DATASET_SHAPES:
        return DATASET_SHAPES[dataset]
    source = build_source(Experiment(dataset=dataset, clients=1, active=1), "cpu", None)
    return tuple(source.test.x.shape[1:]), source.classes, source.test.x.dtype
