"""Arrays as one safetensors file: what the package reads and writes; anything else is refused in
few bytes.
"""

import json
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.server.raw_arrays import InvalidReply
from fedcover.server.safetensors_codec import MAX_HEADER_BYTES, pack_arrays, unpack_arrays

ARRAYS = {
    "params/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/é\"\\": np.float64(3.5) * np.ones(()),
    "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "big-endian": np.arange(3, dtype=">f8"),
    "empty": np.zeros((0, 2)),
    "half": np.full(3, -0.0, np.float16),
    "bits/w": np.packbits([True, False, True]),
    "flags": np.array([True, False]),
}  # fmt: skip


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        assert (found[name].dtype, tuple(found[name].shape)) == (array.dtype.name, array.shape)
        assert bytes(found[name].data) == little_endian.tobytes(), name


def test_packed_arrays_are_read_by_the_package():
    result = safetensors.numpy.load(pack_arrays(ARRAYS))
    assert result.keys() == ARRAYS.keys()
    for name, array in result.items():
        assert np.array_equal(array, ARRAYS[name]), name
        assert array.dtype.name == ARRAYS[name].dtype.name


def test_files_of_the_package_are_unpacked():
    contiguous = {
        name: np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
        for name, array in ARRAYS.items()
    }
    same(unpack_arrays(safetensors.numpy.save(contiguous)), ARRAYS)


def test_packed_arrays_are_unpacked_without_a_copy():
    payload = pack_arrays(ARRAYS)
    result = unpack_arrays(payload, set(ARRAYS))
    same(result, ARRAYS)
    assert all(array.data.obj is payload for array in result.values())
    assert unpack_arrays(pack_arrays({}), set()) == {}


def test_payload_is_little_more_than_its_numbers():
    arrays = {f"params/layer.{n}": np.zeros((12, 34), np.float32) for n in range(100)}
    numbers = sum(array.nbytes for array in arrays.values())
    assert len(pack_arrays(arrays)) < numbers + 100 * 80


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("w" * 4000, np.zeros(1), "must be shorter than 4,000 characters; got www"),
        ("w", np.array(["a"]), "must be of the types bool, .*; got <U1 for w"),
        ("w", np.array([{}], dtype=object), "must be of the types bool, .*; got object for w"),
    ],
)
def test_arrays_that_cannot_travel_are_refused(name, array, why):
    with pytest.raises(InvalidValue, match=why):
        pack_arrays({name: array})


def framed(header, content=bytes(8)):
    """A payload with a given header."""
    encoded = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(encoded)) + encoded + content


def entry(name="w", dtype="F32", shape="[2]", offsets="[0,8]"):
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def listing(*entries):
    return "{" + ",".join(entries) + "}"


def test_handmade_header_is_valid():
    result = unpack_arrays(framed(listing(entry())), {"w"})
    assert (result["w"].dtype, result["w"].shape) == ("float32", [2])


LEFT, RIGHT = {"shape": "[1]", "offsets": "[0,4]"}, {"shape": "[1]", "offsets": "[4,8]"}
UNREADABLE = {
    "no object": "[]",
    "an empty header": "",
    "metadata": listing('"__metadata__":{"a":"b"}', entry()),
    "metadata at the end": listing(entry(), '"__metadata__":{}'),
    "spaces": json.dumps(json.loads(listing(entry()))),
    "a space at the beginning": " " + listing(entry()),
    "much padding": listing(entry()) + 8 * " ",
    "padding of another kind": listing(entry()) + "\n",
    "an end too many": listing(entry()) + "}",
    "no end": listing(entry())[:-1],
    "no comma": listing(entry(**LEFT) + entry("v", **RIGHT)),
    "a comma too many": listing(entry(), ""),
    "no type": '{"w":{"shape":[2],"data_offsets":[0,8]}}',
    "a type twice": listing(entry(dtype='F32","dtype":"U8')),
    "NumPy's name of a type": listing(entry(dtype="float32")),
    "a type of 17 letters": listing(entry(dtype="F" * 17)),
    "a name that is no text": listing(entry()).encode().replace(b'"w"', b'"\xff"'),
    "a line in a name": listing(entry("\n")),
    "a name without an end": listing(entry("\\")),
    "a negative size": listing(entry(shape="[-2]")),
    "a size with a point": listing(entry(shape="[2.0]")),
    "a size of 20 digits": listing(entry(shape="[" + "9" * 20 + "]")),
    "65 sizes": listing(entry(shape="[" + ",".join(["1"] * 65) + "]")),
    "offsets as text": listing(entry(offsets='["0","8"]')),
    "three offsets": listing(entry(offsets="[0,8,8]")),
    "a negative offset": listing(entry(offsets="[-8,0]")),
}
HOSTILE = {
    "nothing": (b"", "no header"),
    "half a length": (b"\x08\0\0", "no header"),
    "a length beyond the end": (struct.pack("<Q", 3) + b"{}", "no header"),
    "a length of all ones": (b"\xff" * 1000, "no header"),
    "a length above the limit": (framed(b" " * (MAX_HEADER_BYTES + 1)), "no header"),
    "bytes without an array": (framed("{}"), "does not add up"),
    "an offset beyond the end": (framed(listing(entry(offsets="[0,9]"))), "its bytes; 'w' does"),
    "a huge offset": (
        framed(listing(entry(offsets="[0," + "9" * 15 + "]"))),
        "its bytes; 'w' does",
    ),
    "offsets turned round": (framed(listing(entry(offsets="[8,0]"))), "follow one another"),
    "a gap at the beginning": (framed(listing(entry(**RIGHT))), "follow one another"),
    "a gap in the middle": (
        framed(listing(entry(shape="[0]", offsets="[0,0]"), entry("v", **RIGHT))),
        "follow one another .*; 'v'",
    ),
    "a gap at the end": (framed(listing(entry(**LEFT))), "does not add up"),
    "one place for two": (framed(listing(entry(), entry("v"))), "follow one another .*; 'v'"),
    "an overlap": (framed(listing(entry(), entry("v", **RIGHT))), "follow one another .*; 'v'"),
    "another order": (
        framed(listing(entry("v", **RIGHT), entry(**LEFT))),
        "follow one another .*; 'v'",
    ),
    "one name twice": (
        framed(listing(entry(**LEFT), entry(**RIGHT))),
        "names an array twice",
    ),
    "one name twice, once escaped": (
        framed(listing(entry(**LEFT), entry("\\u0077", **RIGHT))),
        "names an array twice",
    ),
    "a type of no name": (framed(listing(entry(dtype="F33"))), "wrong dtype: 'w' declares 'F33'"),
    "a type that NumPy lacks": (framed(listing(entry(dtype="BF16"))), "wrong dtype: 'w' declares"),
    "another name": (framed(listing(entry("x"))), "extra array: 'x'"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_header_is_refused(kind):
    with pytest.raises(InvalidValue, match=r"the payload's header cannot be read at byte \d+$"):
        unpack_arrays(framed(UNREADABLE[kind]), {"w", "v"})


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_header_is_refused_with_a_reason(kind):
    payload, why = HOSTILE[kind]
    with pytest.raises((InvalidValue, InvalidReply), match=why):
        unpack_arrays(payload, {"w", "v"})


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_unpacked_or_refused(content):
    with suppress(InvalidValue):
        assert isinstance(unpack_arrays(content), dict)


@settings(max_examples=300)
@given(st.data())
def test_damaged_payload_is_unpacked_or_refused(data):
    payload = bytearray(
        pack_arrays({"params/w": np.arange(5, dtype=np.float32), "params/b": np.zeros(2)})
    )
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidValue, InvalidReply):
        result = unpack_arrays(bytes(payload))
        assert all(isinstance(name, str) for name in result)
        assert sum(array.data.nbytes for array in result.values()) == 20 + 16


@given(st.dictionaries(st.text(max_size=20), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_any_names_and_shapes_are_unpacked_again(shapes):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    result = unpack_arrays(pack_arrays(arrays), set(arrays))
    assert {name: (array.dtype, array.shape) for name, array in result.items()} == {
        name: ("float32", shape) for name, shape in shapes.items()
    }


MIB = 2**20


def listed(names):
    """A header with an entry of no bytes for each name."""
    return listing(*(entry(name, shape="[0]", offsets="[0,0]") for name in names))


HEADERS = {
    "lists in lists": lambda n: "[" * n,
    "objects in objects": lambda n: '{"w":' * (n // 5),
    "empty lists": lambda n: "{" + "[]," * (n // 3),
    "entries": lambda n: listed(map(str, range(n // 58))),
    "entries of a name that is wanted": lambda n: listed(["w"] * (n // 54)),
    "a shape": lambda n: "{" + entry(shape="[" + ",".join(["1"] * (n // 2)) + "]") + "}",
    "a name": lambda n: "{" + entry("w" * n) + "}",
    "quotes": lambda n: "{" + entry("\\u0041" * (n // 6)) + "}",
    "a number": lambda n: "{" + entry(offsets="[0," + "9" * n + "]") + "}",
    "metadata": lambda n: '{"__metadata__":{' + ",".join(['"a":""'] * (n // 7)) + "}}",
    "padding": lambda n: "{}" + " " * n,
}


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize(("size", "times", "more"), [(4 * MIB - 100, 1, 0), (3000, 3, 4096)])
def test_oversized_header_is_refused_in_little_memory(kind, size, times, more):
    header = HEADERS[kind](size)
    payload = framed(header, b"")
    assert 0.7 * size < len(payload) < size + 100
    with pytest.raises((InvalidValue, InvalidReply)):
        unpack_arrays(
            payload, {"w"}
        )  # once before: what is imported and remembered for good does not count
    tracemalloc.start()
    try:
        with pytest.raises((InvalidValue, InvalidReply)):
            unpack_arrays(payload, {"w"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < times * len(payload) + more
