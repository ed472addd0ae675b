"""What trimming promises, and what it does not: as docs/security.md says it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.server.aggregation import median, trimmed_mean
from fedcover.submodels.reductions import Masks

SETTINGS = settings(max_examples=200)


def entries(data, clients, size):
    bits = data.draw(
        st.lists(
            st.lists(st.booleans(), min_size=size, max_size=size),
            min_size=clients,
            max_size=clients,
        )
    )
    held_CS = torch.tensor(bits, dtype=torch.bool)
    honest_CS = torch.randn(
        clients, size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    )
    return held_CS, honest_CS.double()


def between(found_S, honest_CS, held_CS, safe_S):
    """The entries that are safe lie between honest values."""
    low_S = torch.where(held_CS, honest_CS, torch.inf).min(0).values
    high_S = torch.where(held_CS, honest_CS, -torch.inf).max(0).values
    return bool((((found_S >= low_S - 1e-9) & (found_S <= high_S + 1e-9)) | ~safe_S).all())


@SETTINGS
@given(
    st.data(),
    st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from([0.1, 0.2, 0.34, 0.49]),
    st.floats(-1e6, 1e6),
)
def test_robust_rules_stay_between_honest_values(data, clients, liars, share, lie):
    held_CS, honest_CS = entries(data, clients + liars, 5)
    values_CS = honest_CS.clone()
    values_CS[clients:] = lie
    parts = [
        (Masks({"w": bits}), {"w": v}, 1.0) for bits, v in zip(held_CS, values_CS, strict=True)
    ]
    count_S, lying_S = held_CS.sum(0), held_CS[clients:].sum(0)
    old = {"w": torch.zeros(5, dtype=torch.float64)}
    allowed_S = torch.minimum((count_S * share + 1e-9).floor(), (count_S - 1) // 2)
    safe_S = (lying_S <= allowed_S) & (count_S > 0)
    assert between(
        trimmed_mean(old, parts, share=share)["w"], honest_CS[:clients], held_CS[:clients], safe_S
    )
    few_S = (2 * lying_S < count_S) & (count_S > 0)
    assert between(median(old, parts)["w"], honest_CS[:clients], held_CS[:clients], few_S)


def test_trimmed_mean_of_few_clients_follows_one_liar():
    """At a share of 0.2 nothing is left out below five clients."""
    for clients, lied in ((4, True), (5, False)):
        values = [0.0] * (clients - 1) + [1e6]
        parts = [(Masks({}), {"w": torch.tensor([value])}, 1.0) for value in values]
        moved = float(trimmed_mean({"w": torch.zeros(1)}, parts, share=0.2)["w"])
        assert (moved > 1e5) == lied
