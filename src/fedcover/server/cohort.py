"""Sampling of a round's clients, and the view of the round that a policy gets."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from fedcover.fleet import sample_cohort
from fedcover.server.privacy import PrivacyAccountant
from fedcover.server.round_setup import Setup
from fedcover.types import Client, Reduction, State, View


def cohort_of(
    setup: Setup, round: int, members: Mapping[int, float] | None = None
) -> tuple[Client, ...]:
    """Sample the clients of a round.

    Args:
        setup: what is the same in every round.
        round: the round's number, from 0.
        members: the connected clients with their capacities, where devices come and go. Only these
            are sampled; by default, all clients are.
    """
    candidates = sorted(members) if members else range(setup.experiment.clients)
    size = min(setup.experiment.active, len(candidates))
    sampled = sample_cohort(len(candidates), size, setup.task.seed, round)
    cohort = tuple(client_of(setup, candidates[index], slot) for slot, index in enumerate(sampled))
    if not members:
        return cohort
    return tuple(replace(client, capacity=members[client.id]) for client in cohort)


def privacy_accountant(setup: Setup) -> PrivacyAccountant | None:
    """Return the accountant of a run, which counts its cohorts; None without privacy."""
    if setup.privacy is None:
        return None
    clients, active = setup.experiment.clients, setup.experiment.active
    cohorts = (
        sample_cohort(clients, active, setup.task.seed, round) for round in itertools.count()
    )
    return PrivacyAccountant(setup.privacy, cohorts)


def client_of(setup: Setup, id: int, slot: int) -> Client:
    """Describe a client in a slot of the cohort; its capacity is that of the device or the slot."""
    source = setup.task.source
    capacity = setup.fleet.capacity(id if setup.experiment.assignment == "device" else slot)
    return Client(id, capacity, slot, source.count(id), source.labels(id))


def view_of(setup: Setup, state: State, cohort: tuple[Client, ...]) -> View:
    """Return all that a policy may see of a round."""
    return View(
        round=state.round,
        params=dict(state.params),
        groups=setup.task.model.groups,
        prunable=setup.task.model.prunable,
        cohort=cohort,
        levels=_levels(setup, cohort),
        measure=setup.experiment.capacity,
        coverage=state.coverage,
        seed=setup.task.seed,
        measured=state.measured,
        uses=setup.uses,
        classifier=setup.task.model.classifier,
        rounds=setup.experiment.rounds if setup.policy.grow else None,
    )


def _levels(setup: Setup, cohort: tuple[Client, ...]) -> tuple[float, ...]:
    """Return the fleet's capacities, and those of devices that joined with other ones."""
    fleet_levels = setup.fleet.levels
    new_levels = {client.capacity for client in cohort}.difference(fleet_levels)
    if not new_levels:
        return fleet_levels
    return tuple(sorted({*fleet_levels, *new_levels}, reverse=True))


def reduction_for_capacity(setup: Setup, state: State, capacity: float) -> Reduction | None:
    """Return the sub-model that the policy would give a device of some capacity in the next round.

    Returns:
        The sub-model; None if the policy would let the device sit out.
    """
    cohort = cohort_of(setup, state.round)
    slot = next((client.slot for client in cohort if client.capacity == capacity), 0)
    device = replace(cohort[slot], capacity=capacity)
    # Replace the client only in the view, so that the fleet's levels stay the same.
    view = view_of(setup, state, cohort)
    view = replace(view, cohort=(*cohort[:slot], device, *cohort[slot + 1 :]))
    return setup.policy(view)[slot]
