"""Policies: which part of the model each client of a cohort trains. One small file per published family."""

from collections.abc import Callable, Sequence

from fedcover.policies.common import per_client as per_client
from fedcover.policies.magnitude import magnitude
from fedcover.policies.planned import planned
from fedcover.policies.prunefl import prunefl
from fedcover.policies.regions import regions
from fedcover.policies.windows import exclude, full, homogeneous, prefix, random, rolling
from fedcover.types import Reduction

POLICIES: dict[str, Callable[..., Sequence[Reduction | None]]] = {
    "full": full,
    "homogeneous": homogeneous,
    "exclude": exclude,
    "prefix": prefix,
    "rolling": rolling,
    "random": random,
    "magnitude": magnitude,
    "prunefl": prunefl,
    "regions": regions,
    "planned": planned,
}
