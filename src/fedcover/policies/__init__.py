"""Policies: which part of the model each client of a cohort trains. One small file per published family."""

from collections.abc import Callable, Sequence
from functools import partial

from fedcover.policies.base import per_client as per_client
from fedcover.policies.magnitude import magnitude
from fedcover.policies.paper_regions import regions
from fedcover.policies.planned import growth, planned
from fedcover.policies.prunefl import prunefl
from fedcover.policies.width import exclude, full, homogeneous, prefix, random, rolling
from fedcover.types import GrowthStep, Policy, Reduction

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


def growth_of(policy: Policy) -> GrowthStep | None:
    """How a policy changes the model between rounds, with the options that are bound to it; None if it does not."""
    bare, options = (policy.func, policy.keywords) if isinstance(policy, partial) else (policy, {})
    return partial(growth, **options) if bare is planned else None
