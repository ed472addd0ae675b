"""Policies: which part of the model each client of a cohort trains. One small file per published family."""

from collections.abc import Callable, Sequence

from fedcover.policies.common import per_client as per_client
from fedcover.policies.magnitude import magnitude
from fedcover.policies.regions import regions
from fedcover.policies.windows import full, homogeneous, prefix, random, rolling
from fedcover.types import Reduction

POLICIES: dict[str, Callable[..., Sequence[Reduction]]] = {
    "full": full,
    "homogeneous": homogeneous,
    "prefix": prefix,
    "rolling": rolling,
    "random": random,
    "magnitude": magnitude,
    "regions": regions,
}
