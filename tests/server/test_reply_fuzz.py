"""Random damage to replies: each is rejected or harmless.

FEDCOVER_FUZZ sets the number of replies.
"""

import json
import os
import random
import struct
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcover.errors import InvalidValue
from fedcover.server.raw_arrays import InvalidReply, RawArray
from fedcover.server.reply_format import RawReply, pack_update
from fedcover.server.reply_validation import REJECTION_REASONS, Rejection, validate_reply
from fedcover.server.round import aggregate
from fedcover.server.safetensors_codec import pack_arrays, unpack_arrays
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


def mutated(raw, pending, chance):
    """A reply with one to three things changed at random: bytes, declarations, arrays, names,
    numbers.
    """
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        raw = chance.choice(MUTATIONS)(raw, pending, chance)
    return raw


def some(raw, chance):
    """The name of some array, if there is one."""
    names = [name for name, array in raw.arrays.items() if isinstance(array, RawArray)]
    return chance.choice(names) if names else None


def damaged_bytes(raw, pending, chance):
    name = some(raw, chance)
    if name is None or not isinstance(raw.arrays[name].data, bytes | memoryview):
        return raw
    data = bytearray(bytes(raw.arrays[name].data))
    where = chance.choice([len(data), 12])  # anywhere, or at its very beginning
    for _ in range(chance.choice([1, 1, 2, 8])):
        if data:
            data[chance.randrange(min(where, len(data)))] = chance.randrange(256)
    cut = chance.random()
    data = data[: chance.randrange(len(data) + 1)] if cut < 0.2 else data
    data = data + bytes(chance.randrange(2000)) if cut > 0.9 else data
    return with_array(raw, name, replace(raw.arrays[name], data=bytes(data)))


def odd_field(raw, pending, chance):
    name, field = some(raw, chance), chance.choice(["dtype", "shape", "data"])
    return (
        raw
        if name is None
        else with_array(raw, name, replace(raw.arrays[name], **{field: chance.choice(ODD)}))
    )


def special_numbers(raw, pending, chance):
    name = some(raw, chance)
    spec = pending.expected_arrays.get(name)
    if spec is None or not spec.shape or 0 in spec.shape:
        return raw
    array = (
        np.random.default_rng(chance.randrange(2**32)).normal(size=spec.shape).astype(spec.dtype)
    )
    array.flat[chance.randrange(array.size)] = 255 if spec.bits else chance.choice(SPECIAL)
    return with_array(raw, name, stored(array))


def other_bits(raw, pending, chance):
    name = chance.choice([name for name, spec in pending.expected_arrays.items() if spec.bits])
    size = max(0, pending.expected_arrays[name].shape[0] + chance.choice([0, 0, 0, 0, 1, -1, 40]))
    return with_array(raw, name, stored(np.frombuffer(chance.randbytes(size), np.uint8)))


def no_bits_at_all(raw, pending, chance):
    name = chance.choice([name for name, spec in pending.expected_arrays.items() if spec.bits])
    return with_array(raw, name, stored(np.zeros(pending.expected_arrays[name].shape, np.uint8)))


def swapped(raw, pending, chance):
    left, right = some(raw, chance), some(raw, chance)
    if left is None:
        return raw
    return replace(raw, arrays={**raw.arrays, left: raw.arrays[right], right: raw.arrays[left]})


def renamed(raw, pending, chance):
    name = some(raw, chance)
    other = chance.choice([*pending.expected_arrays, *(odd for odd in ODD if odd.__hash__)])
    return replace(
        raw, arrays={other if n == name else n: array for n, array in raw.arrays.items()}
    )


def gone(raw, pending, chance):
    name = some(raw, chance)
    return replace(raw, arrays={n: array for n, array in raw.arrays.items() if n != name})


def odd_metrics(raw, pending, chance):
    odd = chance.choice(ODD)
    return replace(
        raw, metrics=chance.choice([{"loss": odd}, {"loss": 1.0, "more": odd}, odd, {7: odd}])
    )


def reversed_order(raw, pending, chance):
    return replace(raw, arrays=dict(reversed(raw.arrays.items())))


MUTATIONS = [
    damaged_bytes,
    damaged_bytes,
    odd_field,
    special_numbers,
    special_numbers,
    other_bits,
    other_bits,
    no_bits_at_all,
    swapped,
    renamed,
    gone,
    odd_metrics,
    reversed_order,
]


def harmless(setup, state, pending, update):
    """An accepted reply is of the expected shapes and types, finite, and moves nothing outside the
    client's part.
    """
    same_kind = {name: (tensor.shape, tensor.dtype) for name, tensor in update.params.items()}
    assert same_kind == {
        name: (tensor.shape, tensor.dtype) for name, tensor in pending.start.items()
    }
    expected_buffers = pending.reduction.extract(pending.statistics)
    assert {n: t.shape for n, t in update.buffers.items()} == {
        n: t.shape for n, t in expected_buffers.items()
    }
    everything = [update.params, update.buffers, *update.measured.values()]
    assert all(
        bool(tensor.isfinite().all()) for tensors in everything for tensor in tensors.values()
    )
    after = aggregate(setup, state, [update])
    masks = pending.reduction.mask(state.params)
    for name, tensor in after.params.items():
        assert bool(tensor.isfinite().all())
        assert torch.equal(tensor[~masks[name]], state.params[name][~masks[name]])


@pytest.mark.parametrize("name", WORLDS)
def test_any_reply_is_refused_or_harmless(name):
    setup, state, pending, update = asked_and_trained(name)
    raw = honest(pending, update)
    outcomes: Counter[str] = Counter()
    chance = random.Random(name)
    for _ in range(CASES // len(WORLDS)):
        accepted_update = validate_reply(mutated(raw, pending, chance), pending)
        if isinstance(accepted_update, Rejection):
            assert accepted_update.reason in REJECTION_REASONS
            assert accepted_update.detail.isprintable()
            assert len(accepted_update.detail) < 250
            outcomes[accepted_update.reason] += 1
        else:
            harmless(setup, state, pending, accepted_update)
            outcomes["accepted"] += 1
    print(f"{name}: {CASES // len(WORLDS)} replies, {dict(outcomes.most_common())}")
    assert outcomes["accepted"] > CASES // len(WORLDS) // 100
    assert len(outcomes) >= 9, outcomes


# ── the payload as a whole ────────────────────────────────────────────────────────────────────────


def split(payload):
    """The entries of a payload's header, in their order, and its numbers."""
    (length,) = struct.unpack("<Q", payload[:8])
    return json.loads(payload[8 : 8 + length]), payload[8 + length :]


def joined(entries, content):
    """The payload of such entries, which are pairs of a name and what is said of it."""
    header = ",".join(f"{json.dumps(name)}:{compact(entry)}" for name, entry in entries)
    encoded = f"{{{header}}}".encode()
    return struct.pack("<Q", len(encoded)) + encoded + content


def compact(entry):
    return json.dumps(entry, separators=(",", ":"))


def damaged_payload(payload, chance):
    data = bytearray(payload)
    (length,) = struct.unpack("<Q", payload[:8])
    where = chance.choice([8, 8 + length, 8 + length, len(data)])
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(where)] = chance.randrange(256)
    cut = chance.random()
    data = data[: chance.randrange(len(data) + 1)] if cut < 0.1 else data
    return bytes(data + bytes(chance.randrange(100)) if cut > 0.9 else data)


def other_header_length(payload, chance):
    (length,) = struct.unpack("<Q", payload[:8])
    odd = chance.choice([0, 1, 8, len(payload), 2**22, 2**32, 2**63, 2**64 - 1])
    near = max(0, length + chance.choice([-9, -8, -1, 1, 8, 9]))
    return struct.pack("<Q", chance.choice([odd, near])) + payload[8:]


def with_entry(payload, chance, change):
    """The payload with what it says of one array changed."""
    header, content = split(payload)
    name = chance.choice(list(header))
    change(header[name])
    return joined(header.items(), content)


def other_offsets(payload, chance):
    def change(entry):
        end = chance.randrange(2)
        odd = chance.choice([0, -1, 1, 8, 10**15, 2**64, entry["data_offsets"][1 - end]])
        entry["data_offsets"][end] = odd if chance.random() < 0.5 else 8 * chance.randrange(50)

    return with_entry(payload, chance, change)


def other_dtype(payload, chance):
    codes = ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "U8", "BOOL", "C64", "O", "", "float32"]
    return with_entry(payload, chance, lambda entry: entry.update(dtype=chance.choice(codes)))


def other_shape(payload, chance):
    def change(entry):
        flat = [int(np.prod(entry["shape"]))]
        odd = [flat, [1, *entry["shape"]], entry["shape"][::-1], [2**62] * 4, [-1], []]
        entry["shape"] = chance.choice(odd)

    return with_entry(payload, chance, change)


def with_metadata(payload, chance):
    header, content = split(payload)
    entries = list(header.items())
    metadata = ("__metadata__", chance.choice([{}, {"format": "pt"}, {"a": [1]}]))
    entries.insert(chance.choice([0, len(entries)]), metadata)
    return joined(entries, content)


def an_entry_twice(payload, chance):
    header, content = split(payload)
    entries = list(header.items())
    name, entry = chance.choice(entries)
    if chance.random() < 0.5:  # with numbers of its own, so that all offsets are in order
        begin, end = entry["data_offsets"]
        entry = {**entry, "data_offsets": [len(content), len(content) + end - begin]}
        content += content[begin:end]
    return joined([*entries, (name, entry)], content)


def names_exchanged(payload, chance):
    header, content = split(payload)
    names = list(header)
    chance.shuffle(names)
    return joined(zip(names, header.values(), strict=True), content)


def entries_shuffled(payload, chance):
    header, content = split(payload)
    entries = list(header.items())
    chance.shuffle(entries)
    return joined(entries, content)


def an_array_less(payload, chance):
    """Whole again: the offsets of all others are right."""
    header, content = split(payload)
    missing = chance.choice(list(header))
    entries, pieces, at = {}, [], 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if name != missing:
            entries[name] = {**entry, "data_offsets": [at, at + end - begin]}
            pieces.append(content[begin:end])
            at += end - begin
    return joined(entries.items(), b"".join(pieces))


def other_numbers(payload, chance):
    header, content = split(payload)
    spec = np.frombuffer(content[: len(content) // 8 * 8], np.float64).copy()
    spec[chance.randrange(len(spec))] = chance.choice(SPECIAL)
    return joined(header.items(), spec.tobytes() + content[spec.nbytes :])


PAYLOAD_MUTATIONS = [
    damaged_payload,
    damaged_payload,
    other_header_length,
    other_offsets,
    other_dtype,
    other_shape,
    with_metadata,
    an_entry_twice,
    names_exchanged,
    entries_shuffled,
    an_array_less,
    other_numbers,
]


def received(payload, pending, loss):
    """What the server makes of a payload: an update, a rejection, or the error of its header."""
    try:
        arrays = unpack_arrays(payload, pending.expected_arrays)
    except (InvalidValue, InvalidReply) as error:
        return error
    return validate_reply(
        RawReply(pending.nonce, pending.client.id, arrays, {"loss": loss}), pending
    )


@pytest.mark.parametrize("name", WORLDS)
def test_any_payload_is_refused_or_harmless(name):
    setup, state, pending, update = asked_and_trained(name)
    payload = pack_arrays(pack_update(update))
    outcomes: Counter[str] = Counter()
    chance = random.Random(name)
    for _ in range(CASES // len(WORLDS)):
        mutated_payload = chance.choice(PAYLOAD_MUTATIONS)(payload, chance)
        result = received(mutated_payload, pending, update.loss)
        if isinstance(result, Exception):
            why = str(result)
            assert why.isprintable()
            assert len(why) < 250
            outcomes[type(result).__name__] += 1
        elif isinstance(result, Rejection):
            assert result.reason in REJECTION_REASONS
            outcomes[result.reason] += 1
        else:
            harmless(setup, state, pending, result)
            outcomes["accepted"] += 1
    print(f"{name}: {CASES // len(WORLDS)} payloads, {dict(outcomes.most_common())}")
    assert outcomes["InvalidValue"] > outcomes.total() // 4
    assert outcomes["InvalidReply"] > 0
    assert outcomes["accepted"] > 0
    assert {"missing array", "wrong dtype", "wrong shape"} <= set(outcomes)


@pytest.mark.parametrize(
    "mutation", [other_header_length, with_metadata, an_entry_twice, an_array_less]
)
def test_changed_header_never_reaches_the_model(mutation):
    _, _, pending, update = asked_and_trained("slices")
    payload, chance = pack_arrays(pack_update(update)), random.Random(0)
    for _ in range(200):
        result = received(mutation(payload, chance), pending, update.loss)
        assert isinstance(result, Rejection | InvalidValue | InvalidReply)
