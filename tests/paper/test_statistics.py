"""Means over seeds, Student's t, and comparisons with the paper's claims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcover.paper.statistics import (
    SeedStatistics,
    against_claim,
    paired_difference,
    seed_statistics,
    two_sided_p_value,
)

QUANTILES = {
    1: 12.706205,
    2: 4.302653,
    3: 3.182446,
    4: 2.776445,
    5: 2.570582,
    10: 2.228139,
    29: 2.045230,
}


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_p_value_at_tabulated_quantiles(freedom, quantile):
    assert two_sided_p_value(quantile, freedom) == pytest.approx(0.05, abs=1e-6)


@given(st.floats(-50, 50), st.integers(1, 40))
def test_p_value_is_symmetric_and_falls_with_distance(t, freedom):
    assert two_sided_p_value(t, freedom) == two_sided_p_value(-t, freedom)
    assert (
        0
        <= two_sided_p_value(abs(t) + 1, freedom)
        <= two_sided_p_value(t, freedom) + 1e-12
        <= 1 + 1e-12
    )
    assert (
        two_sided_p_value(abs(t) + 1, freedom) < two_sided_p_value(t, freedom)
        or two_sided_p_value(t, freedom) < 1e-12
    )


def test_claim_is_compared_within_and_beyond_noise():
    result = seed_statistics([97.8, 98.0, 98.2])
    assert (result.mean, result.seeds) == (pytest.approx(98.0), 3)
    edge = 4.302653 * result.spread * (2 / 3) ** 0.5
    assert against_claim(98.0 + 0.999 * edge, result) == "="
    assert against_claim(98.0 + 1.001 * edge, result) == "lower"
    assert against_claim(98.0 - 1.001 * edge, result) == "higher"
    assert against_claim(10.0, SeedStatistics(90.0, None, 1)) == "one seed"
    assert against_claim(90.0, SeedStatistics(90.0, 0.0, 3)) == "="
    assert seed_statistics([]) is None


def test_paired_difference_uses_shared_seeds():
    result = paired_difference({0: 1.0, 1: 2.0, 5: 9.0}, {0: 0.5, 1: 1.0, 7: 3.0})
    assert (result.mean, result.seeds) == (0.75, 2)
    assert result.verdict == "undecided"
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_difference({0: 1.0}, {0: 2.0}).verdict == "one seed"
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}).verdict == "lower"
