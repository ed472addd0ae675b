"""Caches of a run: rounds with them have the bits of rounds without, and nothing is counted before
it is read.
"""

import torch
from torch import nn

from fedcover.server.round import run_round
from fedcover.server.round_cache import RoundCache
from fedcover.submodels.cost import WeightUses
from tests.helpers.worlds import same, world


def test_rounds_that_share_a_cache_have_the_bits_of_rounds_that_do_not():
    setup, state = world("wide_resnet", policy="rolling", norm="tracked")
    cache, shared, alone = RoundCache.of(setup), state, state
    for _ in range(3):
        shared, left = run_round(setup, shared, cache)
        alone, right = run_round(setup, alone)
        same(shared.params, alone.params)
        for name in ("accuracy", "loss", "pictures"):
            assert left.metrics[name] == right.metrics[name]


def test_equal_slices_of_consecutive_rounds_are_one_object():
    setup, state = world("mlp", policy="prefix")
    cache = RoundCache.of(setup)
    state, _ = run_round(setup, state, cache)
    first = dict(cache.slices)
    run_round(setup, state, cache)
    shared = first.keys() & cache.slices.keys()
    assert shared
    assert all(cache.slices[code] is first[code] for code in shared)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


def test_uses_are_counted_once_and_only_when_read():
    uses = WeightUses(Counting(4, 3), (4,), torch.float32)
    assert Counting.calls == 0
    assert dict(uses) == {"weight": 1}
    calls = Counting.calls
    assert (uses["weight"], len(uses)) == (1, 1)
    assert 0 < calls == Counting.calls
