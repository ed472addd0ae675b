"""Fleets as text, their mixture at any size, who takes part in a round and who drops out of it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.fleet import Fleet, drops_out, sample_cohort

capacities = st.floats(1e-9, 1.0, allow_nan=False)
fleets = st.lists(st.tuples(st.integers(1, 10**6), capacities), min_size=1, max_size=6).map(
    lambda kinds: Fleet(tuple(n for n, _ in kinds), tuple(c for _, c in kinds))
)


@pytest.mark.parametrize(
    ("text", "counts", "shares"),
    [
        ("4x1.0 + 6x0.75", (4, 6), (1.0, 0.75)),
        ("4x1+6x.75", (4, 6), (1.0, 0.75)),
        ("  4 x 1.0+  6  x 3 / 4 ", (4, 6), (1.0, 0.75)),
        ("1x1/3", (1,), (1 / 3,)),
        ("2x0.5/2", (2,), (0.25,)),
        ("1x1 + 1x1", (1, 1), (1.0, 1.0)),
        ("007x1", (7,), (1.0,)),
    ],
)
def test_fleet_text_is_parsed(text, counts, shares):
    assert Fleet.parse(text) == Fleet(counts, shares)


WRONG = [
    "",
    " ",
    "+",
    "4x1+",
    "+4x1",
    "4x1 ++ 4x1",
    "0x1",
    "4x0",
    "4x0.0",
    "4x1.5",
    "4x2/1",
    "4x1/0",
    "4x1/00",
    "4x-1",
    "-4x1",
    "4x",
    "x1",
    "4",
    "1.0",
    "4x1,2x1",
    "4x1 2x1",
    "4x1e-3",
    "4xnan",
    "4xinf",
    "4.5x1",
    "4X1",
    "4*1",
    "4\u00d71",
    "\u0663x1",
    "3x\u0660.\u0665",
    "3x1/\u0664",
    "\u00b2x1",
    "9" * 5000 + "x1",
    "1x" + "9" * 400,
    "1x1/" + "9" * 400,
    "1x0." + "0" * 400 + "1",
    "\x00",
    "4x1\x00",
]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_wrong_fleet_text_is_refused(text):
    with pytest.raises(InvalidValue, match=r"^fleet must look like '4x1.0 \+ 6x0.75'") as exc_info:
        Fleet.parse(text)
    assert str(exc_info.value).endswith(f"got {text!r}")


@settings(max_examples=200)
@given(st.text(max_size=12) | st.text("0123456789x./+ ", max_size=12))
def test_any_text_is_parsed_as_fleet_or_refused(text):
    try:
        fleet = Fleet.parse(text)
    except InvalidValue:
        return
    assert all(n >= 1 for n in fleet.counts)
    assert all(0 < c <= 1 for c in fleet.capacities)


@settings(max_examples=200)
@given(fleets)
def test_fleet_survives_its_text(fleet):
    assert Fleet.parse(str(fleet)) == fleet


def test_fleet_text_keeps_all_digits_of_thirds():
    assert Fleet.parse(str(Fleet.parse("1x1/3"))).capacities == (1 / 3,)
    assert str(Fleet.parse("4x1.0 + 6x3/4")) == "4x1 + 6x0.75"


@settings(max_examples=200)
@given(fleets, st.integers(1, 10**7))
def test_scaled_fleet_has_the_size_and_the_mixture(fleet, clients):
    distinct = Fleet(fleet.counts, tuple(1 / (kind + 1) for kind in range(len(fleet.counts))))
    scaled = distinct.scaled(clients)
    assert sum(scaled.counts) == clients
    result = dict(zip(scaled.capacities, scaled.counts, strict=True))
    total = sum(distinct.counts)
    for count, capacity in zip(distinct.counts, distinct.capacities, strict=True):
        assert (
            abs(result.get(capacity, 0) * total - count * clients) < total
        )  # within one device, exactly
    assert all(scaled.counts)
    assert list(scaled.capacities) == [c for c in distinct.capacities if c in result]


def test_scaled_fleet_is_exact_beyond_floats():
    big = 10**30
    assert Fleet((big, big), (1.0, 0.5)).scaled(2 * big + 2).counts == (big + 1, big + 1)
    assert Fleet.parse("1x1 + 1x0.5 + 1x0.25").scaled(100).counts == (34, 33, 33)


@settings(max_examples=200)
@given(fleets, st.integers(1, 1000))
def test_scaled_fleet_merges_kinds_of_one_capacity(fleet, clients):
    """What a fleet is made of must not depend on how it is written."""
    merged = Counter()
    for count, capacity in zip(fleet.counts, fleet.capacities, strict=True):
        merged[capacity] += count
    expected = Fleet(tuple(merged.values()), tuple(merged)).scaled(clients)
    scaled = fleet.scaled(clients)
    result = Counter()
    for count, capacity in zip(scaled.counts, scaled.capacities, strict=True):
        result[capacity] += count
    assert result == Counter(dict(zip(expected.capacities, expected.counts, strict=True)))


def test_scaled_fleet_keeps_small_kinds():
    assert str(Fleet.parse("1x0.5 + 8x1.0 + 8x1.0").scaled(10)) == "1x0.5 + 5x1 + 4x1"


def test_fleet_scaled_to_its_own_size_is_itself():
    fleet = Fleet.parse("3x1 + 5x0.5 + 2x0.25")
    assert fleet.scaled(10) == fleet
    assert Fleet.parse("99x1 + 1x0.5").scaled(10) == Fleet((10,), (1.0,))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), capacities), min_size=1, max_size=5))
def test_fleet_capacity_by_place(kinds):
    fleet = Fleet(tuple(n for n, _ in kinds), tuple(c for _, c in kinds))
    listed = [c for n, c in kinds for _ in range(n)]
    assert [fleet.capacity(place) for place in range(len(listed))] == listed
    with pytest.raises(IndexError):
        fleet.capacity(len(listed))


def test_fleet_levels_are_distinct_and_largest_first():
    assert Fleet.parse("1x0.5 + 2x1 + 3x0.5 + 1x0.25").levels == (1.0, 0.5, 0.25)


@settings(max_examples=50)
@given(st.integers(1, 300), st.data())
def test_cohort_is_drawn_without_repetition(clients, data):
    active = data.draw(st.integers(1, clients))
    seed, round = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99))
    cohort = sample_cohort(clients, active, seed, round)
    assert len(cohort) == len(set(cohort)) == active
    assert all(type(client) is int and 0 <= client < clients for client in cohort)
    assert cohort == sample_cohort(clients, active, seed, round)


def test_cohorts_differ_between_rounds_and_seeds():
    cohorts = {
        tuple(sample_cohort(100, 10, seed, round)) for seed in range(5) for round in range(20)
    }
    assert len(cohorts) == 100


def test_cohorts_draw_clients_equally_often():
    times = Counter(client for round in range(2000) for client in sample_cohort(20, 5, 0, round))
    assert len(times) == 20
    assert all(400 < n < 600 for n in times.values())  # 500 expected, standard deviation below 20
    first = Counter(sample_cohort(20, 5, 0, round)[0] for round in range(2000))
    assert all(60 < first[client] < 140 for client in range(20))  # slots are fair too


def test_cohort_of_a_million_clients_is_drawn():
    cohort = sample_cohort(10**6, 10, 0, 0)
    assert len(set(cohort)) == 10
    assert max(cohort) > 10**5
    fleet = Fleet.parse("1x1 + 1x0.5").scaled(10**6)
    assert fleet.counts == (500_000, 500_000)
    assert (fleet.capacity(499_999), fleet.capacity(500_000), fleet.capacity(999_999)) == (
        1.0,
        0.5,
        0.5,
    )


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_drop_outs_are_as_frequent_as_asked(probability):
    times = sum(
        drops_out(client, probability, 0, round) for client in range(50) for round in range(60)
    )
    assert abs(times / 3000 - probability) < 0.04  # more than four standard deviations


def test_drop_out_depends_on_client_round_and_seed():
    one = [drops_out(3, 0.5, 0, round) for round in range(64)]
    assert one == [drops_out(3, 0.5, 0, round) for round in range(64)]
    other = [drops_out(4, 0.5, 0, round) for round in range(64)]
    assert 16 < sum(a == b for a, b in zip(one, other, strict=True)) < 48
    assert one != [drops_out(3, 0.5, 1, round) for round in range(64)]


def test_drop_out_rate_zero_drops_nobody():
    assert not any(drops_out(client, 0.0, 0, 0) for client in range(500))


def test_drop_outs_at_a_low_rate_are_among_those_at_a_higher_one():
    for client in range(200):
        assert drops_out(client, 0.7, 0, 0) or not drops_out(client, 0.3, 0, 0)
