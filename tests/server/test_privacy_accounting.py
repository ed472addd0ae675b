"""Epsilon of a private run: as the accounting library, the formula and a table have it."""

import math
from itertools import product

import pytest

from fedcover.errors import InvalidValue
from fedcover.server.cohort import cohort_of
from fedcover.server.privacy import Gaussian, PrivacyAccountant, gaussian, max_participations
from tests.helpers.worlds import world

STORED = [
    (0.5, 1, 1e-05, 24.381610883113737),
    (1.0, 10, 1e-05, 46.21121019121809),
    (2.0, 18, 1e-06, 28.498469321168777),
    (4.0, 18, 1e-06, 11.811159940267336),
    (16.0, 5, 1e-06, 1.1965273336464937),
    (100.0, 1000, 1e-10, 3.9841919906294443),
]


def test_epsilon_equals_the_accounting_library():
    """By its own analytic formula, everywhere; an older accountant (RDP) was above it by
    2 to 13 %.
    """
    pytest.importorskip("dp_accounting")
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    for noise, participations, delta in product(
        (0.01, 0.5, 2.0, 8.0, 40.0), (1, 18, 1000, 10**6), (1e-15, 1e-10, 1e-5)
    ):
        expected = get_epsilon_gaussian(noise / 2 / math.sqrt(participations), delta)
        assert Gaussian(noise, delta).epsilon(participations) == pytest.approx(expected, rel=1e-7)
    assert Gaussian(1.0, 1e-5).epsilon(0) == 0
    assert Gaussian(1e6, 1e-5).epsilon(1) == 0  # its delta is below that even at epsilon 0


def test_epsilon_equals_privacy_loss_distributions():
    """Another way: the distribution of the privacy loss on a grid, composed round by round; it may
    only be above.
    """
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    for noise, participations, delta in [(2.0, 4, 1e-5), (8.0, 20, 1e-6), (40.0, 50, 1e-5)]:
        composed = from_gaussian_mechanism(
            noise / 2, value_discretization_interval=1e-3
        ).self_compose(participations)
        epsilon = Gaussian(noise, delta).epsilon(participations)
        assert epsilon <= composed.get_epsilon_for_delta(delta) <= epsilon * 1.01 + 1e-3


@pytest.mark.parametrize(("noise", "participations", "delta", "epsilon"), STORED)
def test_epsilon_equals_stored_values(noise, participations, delta, epsilon):
    """get_epsilon_gaussian(noise / 2 / sqrt(participations), delta) of dp-accounting 0.6.0, for
    where that is not installed.
    """
    assert Gaussian(noise, delta).epsilon(participations) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("noise", "participations", "delta"),
    [(0.3, 1, 1e-6), (2.0, 18, 1e-6), (50.0, 7, 1e-6), (8.0, 1, 0.097), (8.0, 1, 0.09)],
)
def test_delta_at_epsilon_equals_the_formula(noise, participations, delta):
    """With noise 8 and one participation, delta is 0.0995 at epsilon 0, so the last two epsilons
    are small, but not 0.
    """
    mu = 2 * math.sqrt(participations) / noise
    assert delta_of_gaussian(Gaussian(noise, delta).epsilon(participations), mu) == pytest.approx(
        delta, rel=1e-6
    )


def delta_of_gaussian(epsilon, mu):
    """Balle, Wang 2018, theorem 8, as it is printed."""

    def normal(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def test_participations_are_those_of_the_busiest_client():
    setup, _ = world()
    cohorts = [
        [client.id for client in cohort_of(setup, round)]
        for round in range(setup.experiment.rounds)
    ]
    accountant = PrivacyAccountant(gaussian(noise=2.0), cohorts)
    assert [accountant.max_participations(round) for round in (2, 0, 1)] == [
        list(max_participations(cohorts))[round] for round in (2, 0, 1)
    ]
    for round in range(setup.experiment.rounds):
        client_ids = [client for cohort in cohorts[: round + 1] for client in cohort]
        assert accountant.max_participations(round) == max(
            client_ids.count(client) for client in client_ids
        )


def test_turns_of_empty_cohorts_are_zero():
    """Everybody may drop out of a round."""
    assert list(max_participations([[], [], [4], []])) == [0, 0, 1, 1]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e300, 1e-300])
def test_gaussian_refuses_wrong_noise(value):
    with pytest.raises(
        InvalidValue, match=r"^privacy gaussian: noise must be in \[0.01, 1e\+06\]; got "
    ):
        gaussian(noise=value)
    with pytest.raises(
        InvalidValue, match=r"^privacy gaussian: delta must be in \[1e-15, 1\); got "
    ):
        gaussian(noise=1.0, delta=value)


@pytest.mark.parametrize("delta", [1.0, 1.5, 9e-16])
def test_gaussian_refuses_wrong_delta(delta):
    with pytest.raises(InvalidValue, match=r"delta must be in \[1e-15, 1\)"):
        gaussian(noise=1.0, delta=delta)
    assert gaussian(noise=1.0, delta=1e-15).delta == 1e-15


@pytest.mark.parametrize("noise", [0.01, 1e6])
def test_epsilon_is_finite_at_the_limits_of_noise(noise):
    spent = [Gaussian(noise, 1e-5).epsilon(participations) for participations in (1, 100, 10**6)]
    assert all(math.isfinite(epsilon) for epsilon in spent)
    assert spent == sorted(spent)
