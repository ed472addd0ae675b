"""Small private experiments, rounds of small worlds, and random updates for Hypothesis."""

from hypothesis import strategies as st

from fedcover.server.cohort import cohort_of, view_of
from fedcover.training.local_sgd import train_client
from tests.helpers.worlds import world

SMALL = {"clients": 20, "active": 4, "rounds": 3, "epochs": 1}
PRIVATE = {**SMALL, "clip_updates": 0.5, "privacy": "gaussian(noise=2.0, delta=1e-4)"}

vectors = st.lists(
    st.tuples(st.floats(-50, 50), st.floats(-50, 50), st.booleans()), min_size=1, max_size=6
)
"""Entries of one tensor: the old value, the new one, and whether the client holds the entry."""


def round_of(**fields):
    """A small world, its first state, and the updates of its first cohort."""
    setup, state = world(**fields)
    cohort = cohort_of(setup, 0)
    parts = setup.policy(view_of(setup, state, cohort))
    updates = [
        train_client(setup.task, state, c, r, 0.1) for c, r in zip(cohort, parts, strict=True)
    ]
    return setup, state, updates
