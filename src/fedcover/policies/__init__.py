"""Policies: which part of the model each client of a cohort trains.

Every published family of policies has a small module.
"""

from fedcover import registry
from fedcover.policies.base import per_client as per_client
from fedcover.policies.magnitude import magnitude
from fedcover.policies.paper_regions import regions
from fedcover.policies.planned import planned
from fedcover.policies.prunefl import prunefl
from fedcover.policies.width import exclude, full, homogeneous, prefix, random, rolling
from fedcover.types import Policy, PolicyFunction

POLICIES: dict[str, Policy] = {
    "full": Policy(full, name="full"),
    "homogeneous": Policy(homogeneous, name="homogeneous"),
    "exclude": Policy(exclude, name="exclude"),
    "prefix": Policy(prefix, name="prefix"),
    "rolling": Policy(rolling, name="rolling"),
    "random": Policy(random, name="random"),
    "magnitude": Policy(magnitude, name="magnitude"),
    "prunefl": Policy(prunefl, name="prunefl"),
    "regions": Policy(regions, name="regions"),
    "planned": planned,
}


def as_policy(policy: PolicyFunction) -> Policy:
    """Return a policy for any function of a view; a policy stays as it is."""
    return policy if isinstance(policy, Policy) else Policy(policy)


def policy_from_spec(text: str) -> Policy:
    """Return the policy that a specification names, with its options bound.

    >>> policy_from_spec("rolling(spread=true)")
    policy rolling
    """
    function, options = registry.resolve("policy", registry.parse("policy", text), POLICIES)
    return as_policy(function).with_options(**options)
