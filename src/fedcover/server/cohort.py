"""Who takes part in a round, and what a policy is shown."""

from collections.abc import Mapping
from dataclasses import replace

from fedcover.fleet import sample_cohort
from fedcover.server.round_setup import Setup
from fedcover.types import Client, Reduction, State, View


def cohort_of(
    setup: Setup, round: int, members: Mapping[int, float] | None = None
) -> tuple[Client, ...]:
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


def reduction_for_capacity(setup: Setup, state: State, capacity: float) -> Reduction | None:
    """The part of the model, if any, that the policy would give a device of some capacity in the coming round."""
    cohort = cohort_of(setup, state.round)
    slot = next((c.slot for c in cohort if c.capacity == capacity), 0)
    device = replace(cohort[slot], capacity=capacity)
    view = view_of(setup, state, cohort)
    asking = replace(
        view, cohort=(*cohort[:slot], device, *cohort[slot + 1 :])
    )  # it does not change the fleet
    return setup.policy(asking)[slot]
