"""Replies off the wire: what is sent is what arrives; whatever else arrives is refused, by name, and does no harm."""

import ast
import contextlib
import io
import os
import pickle
import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.npy_codec import (
    NUMPY,
    ArraySpec,
    InvalidReply,
    RawArray,
    as_array,
    decode_array,
    safe_repr,
)
from fedcover.server.reply_format import RawReply, pack_update, pending_task
from fedcover.server.reply_validation import (
    NORM_LIMIT,
    REJECTION_REASONS,
    Rejection,
    validate_reply,
)
from fedcover.server.round import aggregate
from fedcover.server.task_ledger import LATE_ROUNDS_KEPT, TaskLedger
from fedcover.submodels.coverage import count
from fedcover.submodels.reductions import TrainedSubset
from fedcover.training.local_sgd import train_client
from fedcover.types import Update
from tests.helpers.repository import ROOT
from tests.helpers.worlds import same, world

CASES = int(os.environ.get("FEDCOVER_FUZZ", "12000"))
WORLDS = {
    "slices": {"policy": "rolling"},
    "drawn units": {"policy": "random"},
    "masks": {"policy": "magnitude"},
    "tracked norms": {"model": "preact_resnet18", "policy": "prefix", "norm": "tracked"},
    "own bits": {"policy": "full", "recipe": "hermes"},
    "own bits in masks": {"policy": "magnitude", "recipe": "hermes"},
    "label rows": {"policy": "magnitude", "label_rows": True},
    "measured": {"policy": "prunefl", "recipe": "prunefl"},
    "measured in whole": {"policy": "full", "recipe": "prunefl"},
    "stages": {"model": "depth_resnet", "policy": "prefix"},
}


def asked_and_trained(name, slot=-1):
    """A world of one kind, the task of one client, and its honest update."""
    fields = dict(WORLDS[name])
    setup, state = world(fields.pop("model", "mlp"), epochs=1, **fields)
    cohort = cohort_of(setup, state.round)
    client, reduction = cohort[slot], setup.policy(view_of(setup, state, cohort))[slot]
    update = train_client(setup.task, state, client, reduction, 0.1)
    return setup, state, pending_task("00" * 16, setup.task, state, client, reduction), update


def stored(array, **declared):
    """An array as Flower would carry it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype == object)
    honest = {
        "dtype": str(array.dtype),
        "shape": array.shape,
        "stype": NUMPY,
        "data": memoryview(file.getvalue()),
    }
    return RawArray(**{**honest, **declared})


def honest(asked, update):
    arrays = {name: stored(array) for name, array in pack_update(update).items()}
    return RawReply(asked.nonce, asked.client.id, arrays, {"loss": update.loss})


def with_array(raw, name, array):
    return replace(raw, arrays={**raw.arrays, name: array})


def first(raw, prefix="params/"):
    return next(name for name in raw.arrays if name.startswith(prefix))


def numbers(raw, name):
    return np.load(io.BytesIO(bytes(raw.arrays[name].data)), allow_pickle=False)


def changed(raw, name, value, place=0):
    array = numbers(raw, name).copy()
    array.flat[place] = value
    return with_array(raw, name, stored(array))


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("slot", [0, -1])
def test_what_a_client_sends_is_what_arrives(name, slot):
    setup, state, asked, update = asked_and_trained(name, slot)
    got = validate_reply(honest(asked, update), asked)
    assert isinstance(got, Update), got
    same(got.params, update.params)
    same(got.buffers, update.buffers)
    assert got.measured.keys() == update.measured.keys()
    for kind in got.measured:
        same(got.measured[kind], update.measured[kind])
    assert (got.client, got.sent, got.private, got.loss) == (
        update.client,
        update.sent,
        {},
        update.loss,
    )
    held = count(state.params, [update.sent])
    mine, theirs = count(state.params, [got.trained]), count(state.params, [update.trained])
    same(mine, {n: torch.minimum(theirs[n], held[n]) for n in theirs})
    same(aggregate(setup, state, [got]).params, aggregate(setup, state, [update]).params)


def _hostile(raw, asked):
    """One reply, or more, for every reason."""
    name, masks = first(raw), dict(asked.reduction.gradient_mask())
    array = numbers(raw, name)
    prefix = raw.arrays[name]
    objects = stored(np.array([{}], dtype=object), dtype=prefix.dtype, shape=prefix.shape)
    bits = np.full(asked.expected_arrays[name.replace("params", "bits")].shape, 255, np.uint8)
    bit_name = f"bits/{next(iter(masks), name.removeprefix('params/'))}"
    found = {
        "too large": [with_array(raw, name, replace(prefix, data=bytes(asked.byte_limit + 1)))],
        "malformed metrics": [
            replace(raw, metrics=wrong)
            for wrong in ({}, {"loss": float("nan")}, {"loss": "0"}, {"loss": True}, {"loss": 1.0, "x": 1}, None,
                          {"loss": 10**400}, {"loss": -1.7e308}, {"loss": [1.0]})
        ],
        "missing array": [replace(raw, arrays={n: a for n, a in raw.arrays.items() if n != name})],
        "extra array": [with_array(raw, n, stored(np.zeros(1))) for n in ("params/nosuch", "x", "", 7, None)],
        "pickled": [
            with_array(raw, name, replace(prefix, stype="torch.tensor")),
            with_array(raw, name, replace(prefix, data=pickle.dumps(array))),
            with_array(raw, name, objects),
        ],
        "wrong dtype": [
            with_array(raw, name, stored(array.astype(np.float16))),
            with_array(raw, name, stored(array.astype(np.float16), dtype=prefix.dtype)),
            with_array(raw, name, stored(array.astype(array.dtype.newbyteorder(">")), dtype=prefix.dtype)),
            *(with_array(raw, name, replace(prefix, dtype=d)) for d in (None, "float16", "int64", "O", "")),
        ],
        "wrong shape": [
            with_array(raw, name, stored(np.zeros((1, *array.shape), array.dtype))),
            with_array(raw, name, stored(array.ravel()[:-1])),
            with_array(raw, name, stored(array.ravel()[:-1], shape=prefix.shape)),
            *(with_array(raw, name, replace(prefix, shape=s)) for s in (None, (), (-1,), (10**30,), ("3",), [None])),
        ],
        "damaged array": [
            with_array(raw, name, replace(prefix, data=data))
            for data in (b"", bytes(prefix.data)[:-1], bytes(prefix.data) + b"\0", b"\x93NUMPY\x02\0" + bytes(300),
                         b"\x93NUMPY\x01\0\xff\xff", None, "text", 7)
        ] + [with_array(raw, name, None), replace(raw, arrays=None), replace(raw, arrays=[1])],
        "not finite": [changed(raw, name, value, place=-1) for value in (np.nan, np.inf, -np.inf)],
        "absurd norm": [changed(raw, name, 1e7), changed(raw, name, np.finfo(array.dtype).max)],
        "mask malformed": [with_array(raw, bit_name, stored(bits[:0]))],
        "mask over capacity": [with_array(raw, bit_name, stored(np.zeros(10**4, np.uint8)))],
    }  # fmt: skip
    if any(not bool(mask.all()) for mask in masks.values()):
        whole = np.packbits(np.ones(next(iter(masks.values())).numel(), bool))
        found["mask over capacity"].append(with_array(raw, bit_name, stored(whole)))
    if asked.statistics:
        variance = next(n for n in raw.arrays if n.endswith("running_var"))
        found["negative variance"] = [changed(raw, variance, -0.5)]
        found["not finite"].append(changed(raw, variance, np.nan))
        found["absurd norm"].append(changed(raw, variance, 1e20))
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_every_reason_has_its_reply(name):
    _, _, asked, update = asked_and_trained(name)
    for reason, replies in _hostile(honest(asked, update), asked).items():
        for raw in replies:
            found = validate_reply(raw, asked)
            assert isinstance(found, Rejection), (reason, raw)
            assert (found.reason, found.client) == (reason, asked.client.id), found
            assert found.detail.isprintable()
            assert len(found.detail) < 250


def test_bits_beyond_the_end_are_refused():
    _, _, asked, update = asked_and_trained("slices")
    name = next(n for n, t in asked.start.items() if t.numel() % 8)
    bits = np.zeros(asked.expected_arrays[f"bits/{name}"].shape, np.uint8)
    bits[-1] = 1
    found = validate_reply(with_array(honest(asked, update), f"bits/{name}", stored(bits)), asked)
    assert (found.reason, found.client) == ("mask malformed", asked.client.id)


def test_a_length_is_that_of_the_way_from_what_the_client_was_given():
    """What stands still is not long, wherever it stands; the limit itself is allowed."""
    _, _, asked, update = asked_and_trained("slices")
    far = {name: torch.full_like(tensor, 9e5) for name, tensor in asked.params.items()}
    asked = replace(asked, params=far)
    still = honest(asked, replace(update, params=asked.start))
    assert isinstance(validate_reply(still, asked), Update)
    name = first(still)
    assert isinstance(validate_reply(changed(still, name, 9e5 + NORM_LIMIT), asked), Update)
    assert validate_reply(changed(still, name, 9e5 + NORM_LIMIT + 1), asked).reason == "absurd norm"


@pytest.mark.parametrize("name", ["own bits", "own bits in masks"])
def test_what_a_client_says_it_trained_is_what_counts(name):
    """Its own choice: every third entry of what it holds."""
    _, state, asked, update = asked_and_trained(name)
    held, masks = asked.reduction.mask(state.params), asked.reduction.gradient_mask()
    chosen = {n: (torch.arange(t.numel()) % 3 == 0).view(t.shape) for n, t in asked.start.items()}
    raw = honest(asked, replace(update, trained=TrainedSubset(asked.reduction, chosen)))
    same(
        validate_reply(raw, asked).trained.mask(state.params),
        {n: bits & held[n] for n, bits in chosen.items()},
    )
    assert bool(masks) == (name == "own bits in masks")


@pytest.mark.parametrize("which", ["all", "prunable"])
def test_what_a_recipe_measures_is_asked_for(which):
    setup, state, given, _ = asked_and_trained("slices")
    task = replace(setup.task, recipe=replace(setup.task.recipe, measures={"heat": which}))
    asked = pending_task("a nonce", task, state, given.client, given.reduction, allow_bits=False)
    names = state.params if which == "all" else task.model.prunable
    kinds = {name: name.split("/")[0] for name in asked.expected_arrays}
    assert {n for n, kind in kinds.items() if kind == "measured"} == {
        f"measured/heat/{n}" for n in names
    }
    assert set(kinds.values()) == {"params", "measured"}
    assert asked.nonce == "a nonce"


def test_the_largest_number_is_allowed():
    _, _, asked, update = asked_and_trained("slices")
    largest = float(np.finfo(np.float32).max)
    for loss in (largest, -largest, 0, 7):
        assert (
            validate_reply(replace(honest(asked, update), metrics={"loss": loss}), asked).loss
            == loss
        )


def test_a_rejection_says_what_is_wrong():
    _, _, asked, update = asked_and_trained("slices")
    asked = replace(asked, metrics=("loss", "effort"))
    raw = replace(honest(asked, update), metrics={"loss": 0.5, "effort": 2})
    name = first(raw)
    shape = raw.arrays[name].shape
    wrong = {
        "'params/nosuch'": with_array(raw, "params/nosuch", stored(np.zeros(1))),
        "expected loss, effort": replace(raw, metrics={}),
        "effort is 'much'": replace(raw, metrics={"loss": 0.5, "effort": "much"}),
        f"{name} is stored as 'torch.tensor'": with_array(
            raw, name, replace(raw.arrays[name], stype="torch.tensor")
        ),
        f"{name} declares 'int8', not float64": with_array(
            raw, name, replace(raw.arrays[name], dtype="int8")
        ),
        f"{name} declares (3, 'x'), not {shape}": with_array(
            raw, name, replace(raw.arrays[name], shape=(3, "x"))
        ),
        f"{name} is stored as b\"'shape': (2,), }}\", not {shape}": with_array(
            raw, name, stored(np.zeros(2), shape=shape)
        ),
        f"{name} is no .npy file of version 1.0": with_array(
            raw, name, replace(raw.arrays[name], data=b"x")
        ),
        f"params/{name.removeprefix('params/')}": changed(raw, name, np.inf),
        "params moved by 1e+09; at most 1e+06 is accepted": changed(raw, name, 1e9),
    }
    for detail, reply in wrong.items():
        assert validate_reply(reply, asked).detail == detail


def test_bytes_that_are_scattered_in_memory_are_refused():
    whole = stored(np.ones(3)).data
    twice = bytearray(2 * whole.nbytes)
    twice[::2] = whole
    with pytest.raises(InvalidReply, match=r"^damaged array: w is scattered in memory$"):
        decode_array(
            "w", stored(np.ones(3), data=memoryview(twice)[::2]), ArraySpec((3,), "float64")
        )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b" \n", b"X\n", "wrong shape"),
        (b" \n", b"\t\n", "wrong shape"),
        (b" \n", b"\n\n", None),
        (b"'<f8'", b"'O'  ", "pickled"),
        (b"'<f8'", b"'|O' ", "pickled"),
        (b"'<f8'", b"'>f8'", "wrong dtype"),
        (b"False", b"True ", "wrong dtype"),
    ],
)
def test_a_header_must_be_what_numpy_writes(old, new, reason):
    data = bytes(stored(np.ones(3)).data)
    assert old in data
    raw = stored(np.ones(3), data=data.replace(old, new, 1))
    with (
        pytest.raises(InvalidReply, match=f"^{reason}: w ") if reason else contextlib.nullcontext()
    ):
        decode_array("w", raw, ArraySpec((3,), "float64"))


def test_what_is_sent_is_in_the_order_of_c():
    """Whatever the order in memory: NumPy would say in the header that it is another one."""
    turned = torch.arange(6.0).view(2, 3).T
    assert as_array(turned).flags.c_contiguous
    same(
        {"w": decode_array("w", stored(as_array(turned)), ArraySpec((3, 2), "float32"))},
        {"w": turned},
    )


def test_an_array_without_numbers_is_one():
    assert decode_array("w", stored(np.ones((0, 4))), ArraySpec((0, 4), "float64")).shape == (0, 4)


def test_a_variance_of_zero_is_one():
    _, _, asked, update = asked_and_trained("tracked norms")
    raw = honest(asked, update)
    variance = next(name for name in raw.arrays if name.endswith("running_var"))
    assert isinstance(validate_reply(changed(raw, variance, 0.0), asked), Update)


def test_a_client_that_may_not_choose_sends_no_bits():
    _, _, asked, update = asked_and_trained("slices")
    plain = replace(asked, allow_bits=False)
    assert isinstance(validate_reply(honest(plain, update), plain), Update)
    name = first(honest(asked, update)).replace("params", "bits")
    raw = with_array(
        honest(asked, update), name, stored(np.zeros(asked.expected_arrays[name].shape, np.uint8))
    )
    assert isinstance(validate_reply(raw, asked), Update)
    assert validate_reply(raw, plain).reason == "extra array"


def test_an_endless_shape_is_not_multiplied_out():
    """The product of a million numbers takes minutes; a mask is one row of bytes, so anything else is malformed."""
    _, _, asked, update = asked_and_trained("slices")
    name = first(honest(asked, update)).replace("params", "bits")
    for shape in ((100, 100), (9,) * 10**6):
        raw = with_array(honest(asked, update), name, stored(np.zeros(10, np.uint8), shape=shape))
        assert validate_reply(raw, asked).reason == "mask malformed"


def test_the_table_is_complete():
    """Every reason of the table is given by some test here, or by the ledger."""
    _, _, asked, update = asked_and_trained("tracked norms")
    by_hand = set(_hostile(honest(asked, update), asked))
    assert by_hand | {"unknown nonce", "replayed nonce", "late"} == set(REJECTION_REASONS)


def test_the_document_lists_every_reason():
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("| reason | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        f"| {reason} | {meaning} |" for reason, meaning in REJECTION_REASONS.items()
    ]


def test_a_nonce_is_good_for_one_reply():
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    tasks = [ledger.issue(lambda nonce: replace(asked, nonce=nonce)) for _ in range(4)]
    assert len({task.nonce for task in tasks}) == 4
    assert len({task.nonce[16:] for task in tasks}) == 4
    assert all(len(bytes.fromhex(task.nonce[16:])) == 16 for task in tasks)
    raws = [honest(task, update) for task in tasks]
    assert isinstance(ledger.receive(raws[0]), Update)
    assert ledger.receive(raws[0]).reason == "replayed nonce"
    assert ledger.receive(replace(raws[1], metrics={})).reason == "malformed metrics"
    assert ledger.receive(raws[1]).reason == "replayed nonce"  # a second try is none
    for wrong in (None, 7, "", "00" * 16, b"x", ["x"], {}, "x" * 10**6, "\n"):
        found = ledger.receive(replace(raws[2], nonce=wrong))
        assert found.reason == "unknown nonce"
        assert found.detail.isprintable()
        assert len(found.detail) < 250
    for wrong in (
        asked.client.id + 1,
        None,
        str(asked.client.id),
        1.5,
        True,
    ):  # another client's nonce
        assert ledger.receive(replace(raws[2], client=wrong)).reason == "unknown nonce"
    assert isinstance(ledger.receive(raws[2]), Update)  # and that has not used it up
    assert [task.nonce for task in ledger.close()] == [tasks[3].nonce]
    assert ledger.receive(raws[3]).reason == "late"
    assert ledger.close() == ()


def test_a_rejection_names_the_client_that_is_claimed_and_shows_what_came():
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    raw = honest(ledger.issue(lambda nonce: replace(asked, nonce=nonce)), update)
    found = ledger.receive(replace(raw, nonce="gone", client=41))
    assert (found.client, found.detail) == (41, "nonce 'gone' of client 41")
    found = ledger.receive(replace(raw, client="41"))
    assert found.client is None
    assert found.detail.endswith("of client '41'")


SHOWN = [
    ("x" * 60, f"'{'x' * 50}'"),
    (b"\x80\n", r"b'\x80\n'"),
    ("\x1b[2Jé", r"'\x1b[2J\xe9'"),
    ("é" * 20, "'" + r"\xe9" * 19 + "..."),
    ((), "()"),
    ((3, "a", None), "(3, 'a', None)"),
    (tuple(range(8)), "(0, 1, 2, 3, 4, 5, 6, 7)"),
    (tuple(range(9)), "(0, 1, 2, 3, 4, 5, 6, 7, ...)"),
    (True, "True"),
    (0.5, "0.5"),
    (2**199 - 1, str(2**199 - 1)),
    (2**199, "a int"),
    ([1], "a list"),
    ((["x"], (1, "y" * 70)), f"(a list, (1, '{'y' * 50}'))"),
    (("x" * 30, "y" * 42), f"('{'x' * 30}', '{'y' * 42}')"),
    (("x" * 30, "y" * 43), f"('{'x' * 30}', '{'y' * 41}..."),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_what_a_stranger_sent_is_shown_in_eighty_characters(value, text):
    assert safe_repr(value) == text
    assert len(text) <= 80
    assert text.isascii()
    assert text.isprintable()


def test_the_hundredth_nonce_is_known_again():
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    tasks = [ledger.issue(lambda nonce: replace(asked, nonce=nonce)) for _ in range(100)]
    assert isinstance(ledger.receive(honest(tasks[99], update)), Update)
    assert ledger.receive(honest(tasks[99], update)).reason == "replayed nonce"


def test_the_names_of_a_task_are_told_while_it_is_out():
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    task = ledger.issue(lambda nonce: replace(asked, nonce=nonce))
    names = ledger.expected_names(task.nonce)
    assert "params/head.weight" in names
    assert "params/nosuch" not in names
    assert all(ledger.expected_names(nonce) is None for nonce in ("gone", None, 7, ["x"]))
    ledger.receive(honest(task, update))
    assert ledger.expected_names(task.nonce) is None


def test_the_ledger_does_not_grow():
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    earliest = ledger.issue(lambda nonce: replace(asked, nonce=nonce))
    assert isinstance(ledger.receive(honest(earliest, update)), Update)
    for _ in range(LATE_ROUNDS_KEPT):
        assert ledger.receive(honest(earliest, update)).reason == "replayed nonce"
        missed = ledger.issue(lambda nonce: replace(asked, nonce=nonce))
        ledger.close()
        assert ledger.receive(honest(missed, update)).reason == "late"
    held = sys.getsizeof(ledger._pending) + sum(map(sys.getsizeof, ledger._late_nonces_by_round))
    for _ in range(3 * LATE_ROUNDS_KEPT):
        ledger.issue(lambda nonce: replace(asked, nonce=nonce))
        ledger.close()
    assert (
        sys.getsizeof(ledger._pending) + sum(map(sys.getsizeof, ledger._late_nonces_by_round))
        == held
    )
    for known in (earliest, missed):  # its seal is ours, and it is not open
        assert ledger.receive(honest(known, update)).reason == "replayed nonce"


@pytest.mark.parametrize("change", [str.upper, lambda n: n[:-1], lambda n: "0" + n, lambda n: f"{9:016x}{n[16:]}",
                                    lambda n: n[::-1], lambda n: "é" * 48, lambda n: "٣" * 48])  # fmt: skip
def test_a_nonce_that_was_never_given_is_unknown(change):
    _, _, asked, update = asked_and_trained("slices")
    ledger = TaskLedger()
    given = [ledger.issue(lambda nonce: replace(asked, nonce=nonce)) for _ in range(10)]
    ledger.close()
    assert (
        ledger.receive(honest(replace(given[4], nonce=change(given[4].nonce)), update)).reason
        == "unknown nonce"
    )
    other = TaskLedger()
    assert other.receive(honest(given[0], update)).reason == "unknown nonce"


def test_nothing_is_unpickled_but_from_our_own_child_processes():
    """The pipe between a run and the processes that it starts itself is neither the wire nor the disk."""
    root = ROOT / "src" / "fedcover"
    for path in root.rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        for call in calls:
            name = ast.unparse(call.func)
            if name in ("np.load", "np.save", "numpy.load"):
                assert any(
                    k.arg == "allow_pickle" and ast.unparse(k.value) == "False"
                    for k in call.keywords
                ), path
            opens = name.split(".")[0] in (
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
                "marshal",
            )
            assert path.name in ("launch.py", "worker.py") or not (
                opens or name in ("torch.load", "torch.save")
            ), (path, name)


# ── the fuzz ────────────────────────────────────────────────────────────────────────────────────────────

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
