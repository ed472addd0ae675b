"""How reductions travel: what is sent is what arrives, in as many bytes as promised, and damage is
noticed.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.reductions import Masks, Slices, drawn, windows
from fedcover.types import UnitGroup
from tests.helpers.cutting import kept_units

SETTINGS = settings(max_examples=150)
groups_of_any_size = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(
    lambda sizes: tuple(UnitGroup(f"g{i}", size, ()) for i, size in enumerate(sizes))
)


def units(reduction):
    assert isinstance(reduction, Slices)
    return {name: indices.tolist() for name, indices in reduction.kept.items()}


@SETTINGS
@given(groups_of_any_size, st.data())
def test_encoded_units_are_decoded(groups, data):
    indices_by_group = data.draw(kept_units(groups))
    payload = encode(
        Slices(groups, {name: torch.tensor(u) for name, u in indices_by_group.items()})
    )
    assert units(decode(payload, groups, {})) == indices_by_group
    bits = 1 + sum((group.size + 7) // 8 for group in groups)
    assert len(payload) in (bits, 1 + 8 * len(groups))


@SETTINGS
@given(groups_of_any_size, st.floats(0, 1), st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_encoded_windows_take_eight_bytes_a_group(groups, share, starts):
    reduction = windows(groups, share, {f"g{i}": start for i, start in enumerate(starts)})
    payload = encode(reduction)
    assert payload[:1] == b"W"
    assert len(payload) == 1 + 8 * len(groups)
    assert units(decode(payload, groups, {})) == units(reduction)


@SETTINGS
@given(groups_of_any_size, st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_encoded_draws_take_seventeen_bytes(groups, share, key):
    reduction = drawn(groups, share, key)
    payload = encode(reduction)
    assert len(payload) == 17
    reduction_read = decode(payload, groups, {})
    assert units(reduction_read) == units(reduction)
    assert reduction_read.draw == (share, key)


def test_encoded_scattered_units_take_one_bit_each():
    group = (UnitGroup("g", 1000, ()),)
    payload = encode(Slices(group, {"g": torch.arange(0, 1000, 2)}))
    assert payload[:1] == b"U"
    assert len(payload) == 1 + 125


shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3)


@SETTINGS
@given(shapes, st.data())
def test_encoded_masks_take_one_bit_a_weight(shapes, data):
    prunable = {f"w{i}": torch.empty(shape) for i, shape in enumerate(shapes)}
    bits = {
        name: torch.tensor(
            data.draw(st.lists(st.booleans(), min_size=t.numel(), max_size=t.numel()))
        ).view(t.shape)
        for name, t in reversed(prunable.items())
    }
    payload = encode(Masks(bits))
    reduction_read = decode(payload, (), prunable)
    whole = all(bool(mask.all()) for mask in bits.values())
    assert len(payload) == 1 + (
        0 if whole else sum((t.numel() + 7) // 8 for t in prunable.values())
    )
    masks = reduction_read.mask(prunable)
    assert all(torch.equal(masks[name], bits[name]) for name in bits)


def test_encoded_whole_model_is_one_byte():
    assert encode(Masks({})) == b"M"
    assert dict(decode(b"M", (), {"w": torch.empty(3)}).gradient_mask()) == {}


GROUPS = (UnitGroup("a", 5, ()), UnitGroup("b", 20, ()))
PRUNABLE = {"w": torch.empty(3, 4), "v": torch.empty(9)}
SENT = [
    encode(windows(GROUPS, 0.5, {"a": 4})),
    encode(drawn(GROUPS, 0.5, 99)),
    encode(Slices(GROUPS, {"a": torch.tensor([0, 2]), "b": torch.tensor([3])})),
    encode(Masks({"w": torch.eye(3, 4, dtype=torch.bool), "v": torch.ones(9, dtype=torch.bool)})),
]


def well_formed(found):
    """Whatever is accepted can be used: at least one unit of every group, in order, inside it."""
    if isinstance(found, Masks):
        found.mask(PRUNABLE)
        return
    for group in GROUPS:
        indices = found.kept[group.name].tolist()
        assert indices == sorted(set(indices))
        assert indices
        assert indices[0] >= 0
        assert indices[-1] < group.size
    encode(found)


def refused(sent):
    """Whether bytes are refused; if so, in one line that begins with what they were meant to be."""
    try:
        well_formed(decode(sent, GROUPS, PRUNABLE))
    except InvalidValue:
        with pytest.raises(InvalidValue, match=r"\Areduction [^\n]+\Z"):
            decode(sent, GROUPS, PRUNABLE)
        return True
    return False


def test_random_bytes_are_decoded_or_refused():
    chance = random.Random(0)
    times = 0
    for _ in range(3000):
        body = chance.randbytes(chance.choice([0, 1, 3, 4, 5, 8, 16, 17, chance.randrange(40)]))
        tag = chance.choice([b"D", b"W", b"U", b"M", chance.randbytes(1), b""])
        times += refused(tag + body)
    assert 1000 < times < 3000


@pytest.mark.parametrize("sent", SENT, ids=["windows", "draw", "units", "masks"])
def test_truncated_and_lengthened_bytes_are_refused(sent):
    for length in [*range(len(sent)), len(sent) + 1, len(sent) + 8]:
        if sent[:length] == b"M":
            continue  # the whole model
        with pytest.raises(InvalidValue, match=r"^reduction "):
            decode((sent + bytes(8))[:length], GROUPS, PRUNABLE)


@pytest.mark.parametrize("sent", SENT, ids=["windows", "draw", "units", "masks"])
def test_flipped_bit_is_decoded_or_refused(sent):
    times = 0
    for place in range(8 * len(sent)):
        damaged = bytearray(sent)
        damaged[place // 8] ^= 1 << place % 8
        times += refused(bytes(damaged))
    assert times > 4  # a broken tag at least


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", r"must begin with one of D, W, U, M; got b''$"),
        (b"X123", r"must begin with one of D, W, U, M; got b'X'$"),
        (b"W" + bytes(16), "a window of 0 units from 0 does not fit a group of 5"),
        (
            b"W" + b"\x05\0\0\0\x01\0\0\0" * 2,
            "a window of 1 units from 5 does not fit a group of 5",
        ),
        (b"U" + bytes(4), "a group keeps none of its units"),
        (b"D" + b"\0\0\0\0\0\0\xf0\x7f" + bytes(8), "share must be in 0..1; got inf"),
        (b"D" + b"\0\0\0\0\0\0\xf8\x7f" + bytes(8), "share must be in 0..1; got nan"),
        (b"M" + bytes(3), "4 bytes of bits expected, 3 given"),
    ],
)
def test_damaged_encoding_is_named(sent, message):
    with pytest.raises(InvalidValue, match=message):
        decode(sent, GROUPS, PRUNABLE)
