"""Replies from clients: a valid one arrives unchanged, any other is rejected with its reason."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcover.server.reply_format import pending_task
from fedcover.server.reply_validation import (
    NORM_LIMIT,
    REJECTION_REASONS,
    Rejection,
    validate_reply,
)
from fedcover.server.round import aggregate
from fedcover.submodels.coverage import count
from fedcover.submodels.reductions import TrainedSubset
from fedcover.types import Update
from tests.helpers.replies import (
    WORLDS,
    asked_and_trained,
    changed,
    first,
    honest,
    numbers,
    stored,
    with_array,
)
from tests.helpers.repository import ROOT
from tests.helpers.worlds import same


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("slot", [0, -1])
def test_reply_arrives_unchanged(name, slot):
    setup, state, pending, update = asked_and_trained(name, slot)
    accepted_update = validate_reply(honest(pending, update), pending)
    assert isinstance(accepted_update, Update), accepted_update
    same(accepted_update.params, update.params)
    same(accepted_update.buffers, update.buffers)
    assert accepted_update.measured.keys() == update.measured.keys()
    for kind in accepted_update.measured:
        same(accepted_update.measured[kind], update.measured[kind])
    assert (
        accepted_update.client,
        accepted_update.sent,
        accepted_update.private,
        accepted_update.loss,
    ) == (
        update.client,
        update.sent,
        {},
        update.loss,
    )
    sent_counts = count(state.params, [update.sent])
    trained_counts, theirs = (
        count(state.params, [accepted_update.trained]),
        count(state.params, [update.trained]),
    )
    same(trained_counts, {n: torch.minimum(theirs[n], sent_counts[n]) for n in theirs})
    same(
        aggregate(setup, state, [accepted_update]).params, aggregate(setup, state, [update]).params
    )


def _hostile(raw, pending):
    """One reply, or more, for every reason."""
    name, masks = first(raw), dict(pending.reduction.gradient_mask())
    array = numbers(raw, name)
    prefix = raw.arrays[name]
    bits = np.full(pending.expected_arrays[name.replace("params", "bits")].shape, 255, np.uint8)
    bit_name = f"bits/{next(iter(masks), name.removeprefix('params/'))}"
    replies = {
        "too large": [with_array(raw, name, replace(prefix, data=bytes(pending.byte_limit + 1)))],
        "malformed metrics": [
            replace(raw, metrics=wrong)
            for wrong in (
                {},
                {"loss": float("nan")},
                {"loss": "0"},
                {"loss": True},
                {"loss": 1.0, "x": 1},
                None,
                {"loss": 10**400},
                {"loss": -1.7e308},
                {"loss": [1.0]},
            )
        ],
        "missing array": [replace(raw, arrays={n: a for n, a in raw.arrays.items() if n != name})],
        "extra array": [
            with_array(raw, n, stored(np.zeros(1))) for n in ("params/nosuch", "x", "", 7, None)
        ],
        "wrong dtype": [
            with_array(raw, name, stored(array.astype(np.float16))),
            with_array(raw, name, stored(array.astype(array.dtype.newbyteorder(">")))),
            *(
                with_array(raw, name, replace(prefix, dtype=d))
                for d in (None, "float16", "int64", "O", "")
            ),
        ],
        "wrong shape": [
            with_array(raw, name, stored(np.zeros((1, *array.shape), array.dtype))),
            with_array(raw, name, stored(array.ravel()[:-1])),
            *(
                with_array(raw, name, replace(prefix, shape=s))
                for s in (None, (), (-1,), (10**30,), ("3",), [None])
            ),
        ],
        "damaged array": [
            with_array(raw, name, replace(prefix, data=data))
            for data in (
                b"",
                bytes(prefix.data)[:-1],
                bytes(prefix.data) + b"\0",
                pickle.dumps(array),
                None,
                "text",
                7,
            )
        ]
        + [with_array(raw, name, None), replace(raw, arrays=None), replace(raw, arrays=[1])],
        "not finite": [changed(raw, name, value, place=-1) for value in (np.nan, np.inf, -np.inf)],
        "absurd norm": [changed(raw, name, 1e7), changed(raw, name, np.finfo(array.dtype).max)],
        "mask malformed": [with_array(raw, bit_name, stored(bits[:0]))],
        "mask over capacity": [with_array(raw, bit_name, stored(np.zeros(10**4, np.uint8)))],
    }
    if any(not bool(mask.all()) for mask in masks.values()):
        whole = np.packbits(np.ones(next(iter(masks.values())).numel(), bool))
        replies["mask over capacity"].append(with_array(raw, bit_name, stored(whole)))
    if pending.statistics:
        variance = next(n for n in raw.arrays if n.endswith("running_var"))
        replies["negative variance"] = [changed(raw, variance, -0.5)]
        replies["not finite"].append(changed(raw, variance, np.nan))
        replies["absurd norm"].append(changed(raw, variance, 1e20))
    return replies


@pytest.mark.parametrize("name", WORLDS)
def test_rejection_reasons_are_given_for_their_replies(name):
    _, _, pending, update = asked_and_trained(name)
    for reason, replies in _hostile(honest(pending, update), pending).items():
        for raw in replies:
            accepted_update = validate_reply(raw, pending)
            assert isinstance(accepted_update, Rejection), (reason, raw)
            assert (accepted_update.reason, accepted_update.client) == (
                reason,
                pending.client.id,
            ), accepted_update
            assert accepted_update.detail.isprintable()
            assert len(accepted_update.detail) < 250


def test_reply_bits_beyond_the_end_are_refused():
    _, _, pending, update = asked_and_trained("slices")
    name = next(n for n, t in pending.start.items() if t.numel() % 8)
    bits = np.zeros(pending.expected_arrays[f"bits/{name}"].shape, np.uint8)
    bits[-1] = 1
    accepted_update = validate_reply(
        with_array(honest(pending, update), f"bits/{name}", stored(bits)), pending
    )
    assert (accepted_update.reason, accepted_update.client) == ("mask malformed", pending.client.id)


def test_reply_norm_is_of_the_change_from_the_task():
    """An unchanged tensor has length 0, whatever its values; the limit itself is allowed."""
    _, _, pending, update = asked_and_trained("slices")
    far = {name: torch.full_like(tensor, 9e5) for name, tensor in pending.params.items()}
    pending = replace(pending, params=far)
    still = honest(pending, replace(update, params=pending.start))
    assert isinstance(validate_reply(still, pending), Update)
    name = first(still)
    assert isinstance(validate_reply(changed(still, name, 9e5 + NORM_LIMIT), pending), Update)
    assert (
        validate_reply(changed(still, name, 9e5 + NORM_LIMIT + 1), pending).reason == "absurd norm"
    )


@pytest.mark.parametrize("name", ["own bits", "own bits in masks"])
def test_reply_bits_decide_what_was_trained(name):
    """Its own choice: every third entry of what it holds."""
    _, state, pending, update = asked_and_trained(name)
    held_masks, masks = pending.reduction.mask(state.params), pending.reduction.gradient_mask()
    chosen = {n: (torch.arange(t.numel()) % 3 == 0).view(t.shape) for n, t in pending.start.items()}
    raw = honest(pending, replace(update, trained=TrainedSubset(pending.reduction, chosen)))
    same(
        validate_reply(raw, pending).trained.mask(state.params),
        {n: bits & held_masks[n] for n, bits in chosen.items()},
    )
    assert bool(masks) == (name == "own bits in masks")


@pytest.mark.parametrize("which", ["all", "prunable"])
def test_pending_task_expects_measured_arrays(which):
    setup, state, original, _ = asked_and_trained("slices")
    task = replace(setup.task, recipe=replace(setup.task.recipe, measures={"heat": which}))
    pending = pending_task(
        "a nonce", task, state, original.client, original.reduction, allow_bits=False
    )
    names = state.params if which == "all" else task.model.prunable
    kinds = {name: name.split("/")[0] for name in pending.expected_arrays}
    assert {n for n, kind in kinds.items() if kind == "measured"} == {
        f"measured/heat/{n}" for n in names
    }
    assert set(kinds.values()) == {"params", "measured"}
    assert pending.nonce == "a nonce"


def test_reply_loss_may_be_the_largest_float():
    _, _, pending, update = asked_and_trained("slices")
    largest = float(np.finfo(np.float32).max)
    for loss in (largest, -largest, 0, 7):
        assert (
            validate_reply(replace(honest(pending, update), metrics={"loss": loss}), pending).loss
            == loss
        )


def test_rejection_says_what_is_wrong():
    _, _, pending, update = asked_and_trained("slices")
    pending = replace(pending, metrics=("loss", "effort"))
    raw = replace(honest(pending, update), metrics={"loss": 0.5, "effort": 2})
    name = first(raw)
    shape = raw.arrays[name].shape
    wrong = {
        "'params/nosuch'": with_array(raw, "params/nosuch", stored(np.zeros(1))),
        "expected loss, effort": replace(raw, metrics={}),
        "effort is 'much'": replace(raw, metrics={"loss": 0.5, "effort": "much"}),
        f"{name} declares 'int8', not float64": with_array(
            raw, name, replace(raw.arrays[name], dtype="int8")
        ),
        f"{name} declares (3, 'x'), not {shape}": with_array(
            raw, name, replace(raw.arrays[name], shape=(3, "x"))
        ),
        f"{name} has 1 bytes of numbers, not {8 * np.prod(shape)}": with_array(
            raw, name, replace(raw.arrays[name], data=b"x")
        ),
        f"params/{name.removeprefix('params/')}": changed(raw, name, np.inf),
        "params moved by 1e+09; at most 1e+06 is accepted": changed(raw, name, 1e9),
    }
    for detail, reply in wrong.items():
        assert validate_reply(reply, pending).detail == detail


def test_variance_of_zero_is_accepted():
    _, _, pending, update = asked_and_trained("tracked norms")
    raw = honest(pending, update)
    variance = next(name for name in raw.arrays if name.endswith("running_var"))
    assert isinstance(validate_reply(changed(raw, variance, 0.0), pending), Update)


def test_client_without_choice_sends_no_bits():
    _, _, pending, update = asked_and_trained("slices")
    plain = replace(pending, allow_bits=False)
    assert isinstance(validate_reply(honest(plain, update), plain), Update)
    name = first(honest(pending, update)).replace("params", "bits")
    raw = with_array(
        honest(pending, update),
        name,
        stored(np.zeros(pending.expected_arrays[name].shape, np.uint8)),
    )
    assert isinstance(validate_reply(raw, pending), Update)
    assert validate_reply(raw, plain).reason == "extra array"


def test_endless_shape_is_refused_at_once():
    """The product of a million numbers takes minutes; a mask is one row of bytes, so anything else
    is malformed.
    """
    _, _, pending, update = asked_and_trained("slices")
    name = first(honest(pending, update)).replace("params", "bits")
    for shape in ((100, 100), (9,) * 10**6):
        raw = with_array(honest(pending, update), name, stored(np.zeros(10, np.uint8), shape=shape))
        assert validate_reply(raw, pending).reason == "mask malformed"


def test_rejection_reasons_are_all_tested():
    """Every reason of the table is given by some test here, or by the ledger."""
    _, _, pending, update = asked_and_trained("tracked norms")
    by_hand = set(_hostile(honest(pending, update), pending))
    assert by_hand | {"unknown nonce", "replayed nonce", "round closed"} == set(REJECTION_REASONS)


def test_security_page_lists_every_rejection_reason():
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("| reason | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        f"| {reason} | {meaning} |" for reason, meaning in REJECTION_REASONS.items()
    ]
