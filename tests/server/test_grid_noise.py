"""Noise that cannot be searched, that is drawn once, and that has the distribution which the
accountant assumes.
"""

import math
import os
import random
import re
from collections import Counter
from decimal import Decimal, localcontext
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcover
from fedcover.errors import InvalidValue
from fedcover.server import grid_noise
from fedcover.server.grid_noise import (
    accepted_trials,
    fresh_stream,
    keyed_stream,
    rounded_normal,
    whole_parts,
)

SOURCE = Path(fedcover.__file__).parent


def stream_of(words):
    """A stream of given words."""
    coming = iter(words)

    def stream(size):
        assert size % 8 == 0, "half a word was asked for"
        return b"".join(next(coming).to_bytes(8, "little") for _ in range(size // 8))

    return stream


def below(value):
    """The chance that a normal number is below a value."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


# ── nobody can draw it again ──────────────────────────────────────────────────────────────────────


def test_fresh_stream_has_256_bits_of_the_operating_system(monkeypatch):
    sizes = []
    drawn = (bytes([place]) * 32 for place in count(1))

    def urandom(size):
        sizes.append(size)
        return next(drawn)

    monkeypatch.setattr(os, "urandom", urandom)
    left, right = fresh_stream(), fresh_stream()
    assert sizes == [32, 32]
    assert left(64) == keyed_stream(bytes([1]) * 32)(64)
    assert right(64) == keyed_stream(bytes([2]) * 32)(64)


@pytest.mark.parametrize("size", [0, 8, 16, 31, 33])
def test_noise_key_of_another_length_is_refused(size):
    with pytest.raises(InvalidValue, match=f"^a key of noise must have 32 bytes; got {size}$"):
        keyed_stream(bytes(size))


def test_noise_depends_on_every_bit_of_the_key():
    """So no part of the key, 64 bits or fewer, could be searched by itself."""
    plain = rounded_normal(50, 30, keyed_stream(bytes(32)))
    for bit in range(256):
        key = (1 << bit).to_bytes(32, "little")
        assert (rounded_normal(50, 30, keyed_stream(key)) != plain).all()


def seeded():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return rounded_normal(2000, 30, fresh_stream())


def test_noise_does_not_depend_on_seeds():
    state = torch.random.get_rng_state()
    left, right = seeded(), seeded()
    assert (left != right).all()
    torch.random.set_rng_state(state)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    fixed = rounded_normal(2000, 30, keyed_stream(bytes(32)))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tobytes())
    seeded()
    assert (rounded_normal(2000, 30, keyed_stream(bytes(32))) == fixed).all()


def test_privacy_uses_no_other_randomness():
    for name in ("server/privacy.py", "server/grid_noise.py"):
        text = (SOURCE / name).read_text()
        assert not re.search(
            r"Generator|manual_seed|randn|default_rng|np\.random|secrets|import random", text
        )
    assert "fresh_generator" not in "".join(path.read_text() for path in SOURCE.rglob("*.py"))


def test_noise_of_different_rounds_is_independent():
    rows = [rounded_normal(100_000, 30, fresh_stream()) / 2**31 for _ in range(4)]
    for i in range(4):
        assert abs(np.mean(rows[i][1:] * rows[i][:-1])) < 6 / math.sqrt(1e5)
        for j in range(i):
            assert abs(np.mean(rows[i] * rows[j])) < 6 / math.sqrt(1e5)
            assert abs(np.mean(rows[i] ** 2 * rows[j] ** 2) - 1) < 6 * math.sqrt(8 / 1e5)


# ── it has the right distribution ─────────────────────────────────────────────────────────────────


def test_noise_is_a_rounded_normal_number():
    """Every whole step of a coarse grid comes as often as the normal distribution says."""
    drawn, bits = rounded_normal(1_000_000, 2, fresh_stream()), 2
    counts = Counter(((drawn - 1) // 2).tolist())
    for step in range(-12, 12):
        share = below((step + 1) / 2**bits) - below(step / 2**bits)
        assert counts[step] / len(drawn) == pytest.approx(
            share, abs=6 * math.sqrt(share / len(drawn))
        )
    beyond = sum(times for step, times in counts.items() if not -12 <= step < 12)
    assert beyond / len(drawn) == pytest.approx(2 * below(-3), rel=0.15)
    assert max(counts) < 2**bits * 7


@pytest.mark.parametrize("bits", [0, 10, 30, 52])
def test_noise_has_normal_moments(bits):
    drawn = rounded_normal(400_000, bits, fresh_stream())
    assert drawn.dtype == np.int64
    assert (drawn % 2 == 1).all()  # half steps: symmetric, and never zero
    z = drawn / 2.0 ** (bits + 1)
    error = 6 / math.sqrt(len(z))
    assert abs(z.mean()) < error * 1.1
    assert z.var() == pytest.approx(1 + 4.0**-bits / 12, abs=error * 1.6)
    assert np.mean(z**3) == pytest.approx(0, abs=error * 5)
    if bits:
        assert np.mean(z**4) == pytest.approx(3, abs=error * 10)


def test_noise_has_fair_last_bits():
    """An attack on floating-point noise looks at the last bits: here all of them are fair coins."""
    drawn = (np.abs(rounded_normal(200_000, 30, fresh_stream())) - 1) // 2
    for bit in range(20):
        assert np.mean(drawn >> bit & 1) == pytest.approx(0.5, abs=6 * 0.5 / math.sqrt(len(drawn)))


@pytest.mark.parametrize("count", [0, 1, 7, 65_536, 100_001])
def test_noise_has_the_wanted_length(count):
    assert rounded_normal(count, 30, keyed_stream(bytes(32))).shape == (count,)


@pytest.mark.parametrize("bits", [-1, 53])
def test_noise_grid_that_does_not_fit_is_refused(bits):
    with pytest.raises(InvalidValue, match=rf"^bits of noise must be in 0\.\.52; got {bits}$"):
        rounded_normal(1, bits, keyed_stream(bytes(32)))


# ── the slow twin ─────────────────────────────────────────────────────────────────────────────────


def slow_trial(k_word, x_word, u_word, bits, spare):
    """One trial in decimals, with none of the fast path: None if it is rejected."""
    with localcontext(prec=80):
        weights = [(Decimal(-k * k) / 2).exp() for k in range(40)]
        where = (Decimal(k_word << 64 | spare) + Decimal("0.5")) / 2**128 * sum(weights)
        k = next(k for k in range(40) if sum(weights[: k + 1]) > where)
        x = (Decimal(x_word >> 1) + Decimal("0.5")) / 2**63
        if (Decimal(u_word << 64 | spare) + Decimal("0.5")) / 2**128 >= (
            -x * (2 * k + x) / 2
        ).exp():
            return None
        magnitude = 2 * int((k + x) * 2**bits) + 1
        return -magnitude if x_word & 1 else magnitude


@pytest.mark.parametrize("bits", [0, 30, 52])
@pytest.mark.parametrize("close", [grid_noise.CLOSE, 2.0])
def test_noise_trials_agree_with_decimals(bits, close):
    """With `close` at 2 decimals decide every trial; else floating point decides nearly all."""
    words = np.frombuffer(keyed_stream(bytes(range(32)))(8 * 3 * 700), np.uint64).reshape(3, 700)
    fast = accepted_trials(words, bits, lambda size: bytes(size), close).tolist()
    slow = [slow_trial(*map(int, column), bits, 0) for column in words.T]
    assert fast == [value for value in slow if value is not None]


@pytest.mark.parametrize("spare", [0, 2**63, 2**64 - 1])
def test_noise_boundaries_are_exact(spare):
    """Words at, below and above the first halves of the boundaries between k and k + 1."""
    with localcontext(prec=80):
        weights = [(Decimal(-k * k) / 2).exp() for k in range(40)]
        edges = [int(sum(weights[: k + 1]) / sum(weights) * 2**64) for k in range(6)]
    words = [word for edge in edges for word in (edge - 1, edge, edge + 1)] + [0, 2**64 - 1]
    parts = whole_parts(
        np.array(words, np.uint64), lambda size: spare.to_bytes(8, "little")
    ).tolist()
    slow = []
    for word in words:
        with localcontext(prec=80):
            where = Decimal(word << 64 | spare) / 2**128 * sum(weights)
            slow.append(next((k for k in range(40) if sum(weights[: k + 1]) > where), 14))
    assert parts[:-1] == slow[:-1]
    assert parts[-1] in (slow[-1], 12, 13, 14)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_noise_trial_on_a_boundary_is_decided_by_128_bits(off):
    """k = 0, x = 1/2: kept with chance exp(-1/8); floating point cannot tell these words from each
    other.
    """
    with localcontext(prec=80):
        x = (Decimal(2**62) + Decimal("0.5")) / 2**63
        edge = int((-x * x / 2).exp() * 2**128) + off
    words = np.array([[0], [2**63], [edge >> 64]], np.uint64)
    accepted_bits = accepted_trials(words, 1, stream_of([edge & 2**64 - 1]))
    assert accepted_bits.tolist() == ([3] if off < 0 else [])


@pytest.mark.parametrize(("spare", "drawn"), [(0, [3, 3]), (2**64 - 1, [7, 7])])
def test_noise_comparisons_use_one_stream(spare, drawn):
    """Words that meet the boundary between k = 0 and k = 1, for x = 1/2, are compared with more of
    the same stream.
    """
    with localcontext(prec=80):
        weights = [(Decimal(-k * k) / 2).exp() for k in range(40)]
        edge = int(weights[0] / sum(weights) * 2**64)
    trials_drawn = 2 * 3 // 2 + 8
    words = [edge] * trials_drawn + [2**63] * trials_drawn + [0] * trials_drawn
    assert rounded_normal(2, 1, stream_of(words + [spare] * trials_drawn)).tolist() == drawn
    with localcontext(prec=80):
        x = (Decimal(2**62) + Decimal("0.5")) / 2**63
        level = int((-x * x / 2).exp() * 2**128) >> 64
    words = [0] * trials_drawn + [2**63] * trials_drawn + [level] * trials_drawn
    assert rounded_normal(2, 1, stream_of(words + [0] * trials_drawn)).tolist() == [3, 3]
