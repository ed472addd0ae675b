"""Randomness with an address: the same draw for the same address, another for every other, and no
trace.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.rng import generator, key, numpy_generator, seeded, wide_generator

addresses = st.lists(st.integers(0, 50) | st.sampled_from(["shuffle", "cohort", "a"]), max_size=4)


def draws(seed, *address):
    return torch.rand(4, generator=generator(seed, *address)).tolist()


@settings(max_examples=100)
@given(st.integers(0, 5), addresses, st.integers(0, 5), addresses)
def test_rng_depends_on_the_whole_address(seed, address, other_seed, other):
    same = (seed, *map(str, address)) == (other_seed, *map(str, other))
    assert (draws(seed, *address) == draws(other_seed, *other)) == same


def test_rng_keys_separate_neighbouring_numbers():
    assert key(0, "a", 1, 12) != key(0, "a", 11, 2)
    assert key(1, "a") != key(0, 1, "a")
    assert key(11, 2) != key(1, 12)


def test_rng_keys_are_distinct_and_fit_63_bits():
    keys = [key(seed, "k", round) for seed in range(20) for round in range(100)]
    assert len(set(keys)) == 2000
    assert all(0 <= k < 2**63 for k in keys)
    assert 0.4 < np.mean([k > 2**62 for k in keys]) < 0.6


def test_rng_wide_generators_differ_where_32_bits_collide():
    """A pair of addresses for which torch's generator is the same, as there are among very many."""
    seeds = {}
    for place in range(1_000_000):
        first = seeds.setdefault(key(0, "a", place) % 2**32, place)
        if first != place:
            break
    assert draws(0, "a", first) == draws(0, "a", place)
    wide = [wide_generator(0, "a", each) for each in (first, place)]
    assert wide[0].random() != wide[1].random()


def test_rng_wide_generators_use_256_bits():
    """Of two streams that differ at all, both state and increment do: 255 bits."""
    states = [wide_generator(0, "a", place).bit_generator.state["state"] for place in range(2000)]
    for part, bits in (("state", 128), ("inc", 128)):
        assert len({state[part] for state in states}) == 2000
        assert len({state[part] % 2**64 for state in states}) == 2000
        assert max(state[part] for state in states).bit_length() == bits


def test_rng_generator_is_deterministic():
    first = generator(3, "x")
    torch.rand(10, generator=first)
    assert draws(3, "x") == draws(3, "x")
    assert numpy_generator(3, "x").random() == numpy_generator(3, "x").random()
    assert numpy_generator(3, "x").random() != numpy_generator(3, "y").random()


def test_rng_seeded_restores_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(0, "init"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    with seeded(0, "init"):
        assert torch.equal(torch.rand(3), inside)
    with seeded(1, "init"):
        assert not torch.equal(torch.rand(3), inside)


def test_rng_seeded_restores_it_after_an_error():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded(0, "init"):
        torch.rand(3).view(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_rng_generators_leave_global_ones_unchanged():
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    draws(0, "x")
    numpy_generator(0, "x").random()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
