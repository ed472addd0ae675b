"""Random damage to replies: each is rejected or harmless. FEDCOVER_FUZZ sets the number of replies."""

import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcover.server.npy_codec import RawArray
from fedcover.server.reply_validation import REJECTION_REASONS, Rejection, validate_reply
from fedcover.server.round import aggregate
from tests.helpers.replies import WORLDS, asked_and_trained, honest, stored, with_array

CASES = int(os.environ.get("FEDCOVER_FUZZ", "12000"))


ODD = (
    None,
    True,
    -1,
    0,
    7,
    2**70,
    1.5,
    float("nan"),
    "",
    "x" * 300,
    "\x1b[2J\n",
    b"\x80\x05.",
    (),
    (3, -3),
    [2],
    {},
)


SPECIAL = (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, 5e-324)


def mutated(raw, asked, chance):
    """A reply with one to three things changed at random: bytes, declarations, arrays, names, numbers."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        raw = chance.choice(MUTATIONS)(raw, asked, chance)
    return raw


def some(raw, chance):
    """The name of some array, if there is one."""
    names = [name for name, array in raw.arrays.items() if isinstance(array, RawArray)]
    return chance.choice(names) if names else None


def damaged_bytes(raw, asked, chance):
    name = some(raw, chance)
    if name is None or not isinstance(raw.arrays[name].data, bytes | memoryview):
        return raw
    data = bytearray(bytes(raw.arrays[name].data))
    where = chance.choice([len(data), 128, 12])  # anywhere, in the header, at its very beginning
    for _ in range(chance.choice([1, 1, 2, 8])):
        if data:
            data[chance.randrange(min(where, len(data)))] = chance.randrange(256)
    cut = chance.random()
    data = data[: chance.randrange(len(data) + 1)] if cut < 0.2 else data
    data = data + bytes(chance.randrange(2000)) if cut > 0.9 else data
    return with_array(raw, name, replace(raw.arrays[name], data=bytes(data)))


def odd_field(raw, asked, chance):
    name, field = some(raw, chance), chance.choice(["dtype", "shape", "stype", "data"])
    return (
        raw
        if name is None
        else with_array(raw, name, replace(raw.arrays[name], **{field: chance.choice(ODD)}))
    )


def special_numbers(raw, asked, chance):
    name = some(raw, chance)
    wanted = asked.expected_arrays.get(name)
    if wanted is None or not wanted.shape or 0 in wanted.shape:
        return raw
    array = (
        np.random.default_rng(chance.randrange(2**32))
        .normal(size=wanted.shape)
        .astype(wanted.dtype)
    )
    array.flat[chance.randrange(array.size)] = 255 if wanted.bits else chance.choice(SPECIAL)
    return with_array(raw, name, stored(array))


def other_bits(raw, asked, chance):
    name = chance.choice([name for name, wanted in asked.expected_arrays.items() if wanted.bits])
    size = max(0, asked.expected_arrays[name].shape[0] + chance.choice([0, 0, 0, 0, 1, -1, 40]))
    return with_array(raw, name, stored(np.frombuffer(chance.randbytes(size), np.uint8)))


def no_bits_at_all(raw, asked, chance):
    name = chance.choice([name for name, wanted in asked.expected_arrays.items() if wanted.bits])
    return with_array(raw, name, stored(np.zeros(asked.expected_arrays[name].shape, np.uint8)))


def swapped(raw, asked, chance):
    left, right = some(raw, chance), some(raw, chance)
    if left is None:
        return raw
    return replace(raw, arrays={**raw.arrays, left: raw.arrays[right], right: raw.arrays[left]})


def renamed(raw, asked, chance):
    name = some(raw, chance)
    other = chance.choice([*asked.expected_arrays, *(odd for odd in ODD if odd.__hash__)])
    return replace(
        raw, arrays={other if n == name else n: array for n, array in raw.arrays.items()}
    )


def gone(raw, asked, chance):
    name = some(raw, chance)
    return replace(raw, arrays={n: array for n, array in raw.arrays.items() if n != name})


def odd_metrics(raw, asked, chance):
    odd = chance.choice(ODD)
    return replace(
        raw, metrics=chance.choice([{"loss": odd}, {"loss": 1.0, "more": odd}, odd, {7: odd}])
    )


def reversed_order(raw, asked, chance):
    return replace(raw, arrays=dict(reversed(raw.arrays.items())))


MUTATIONS = [damaged_bytes, damaged_bytes, odd_field, special_numbers, special_numbers, other_bits, other_bits,
             no_bits_at_all, swapped, renamed, gone, odd_metrics, reversed_order]  # fmt: skip


def harmless(setup, state, asked, update):
    """An accepted reply is of the expected shapes and types, finite, and moves nothing outside the client's part."""
    same_kind = {name: (tensor.shape, tensor.dtype) for name, tensor in update.params.items()}
    assert same_kind == {name: (tensor.shape, tensor.dtype) for name, tensor in asked.start.items()}
    known = asked.reduction.extract(asked.statistics)
    assert {n: t.shape for n, t in update.buffers.items()} == {n: t.shape for n, t in known.items()}
    everything = [update.params, update.buffers, *update.measured.values()]
    assert all(
        bool(tensor.isfinite().all()) for tensors in everything for tensor in tensors.values()
    )
    after = aggregate(setup, state, [update])
    held = asked.reduction.mask(state.params)
    for name, tensor in after.params.items():
        assert bool(tensor.isfinite().all())
        assert torch.equal(tensor[~held[name]], state.params[name][~held[name]])


@pytest.mark.parametrize("name", WORLDS)
def test_any_reply_is_refused_or_harmless(name):
    setup, state, asked, update = asked_and_trained(name)
    raw = honest(asked, update)
    seen: Counter[str] = Counter()
    chance = random.Random(name)
    for _ in range(CASES // len(WORLDS)):
        found = validate_reply(mutated(raw, asked, chance), asked)
        if isinstance(found, Rejection):
            assert found.reason in REJECTION_REASONS
            assert found.detail.isprintable()
            assert len(found.detail) < 250
            seen[found.reason] += 1
        else:
            harmless(setup, state, asked, found)
            seen["accepted"] += 1
    print(f"{name}: {CASES // len(WORLDS)} replies, {dict(seen.most_common())}")
    assert seen["accepted"] > CASES // len(WORLDS) // 100
    assert len(seen) >= 9, seen
