"""Replies of clients as they come off the wire, and ways to change them."""

from dataclasses import replace

import numpy as np

from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.raw_arrays import RawArray
from fedcover.server.reply_format import RawReply, pack_update, pending_task
from fedcover.training.local_sgd import train_client
from tests.helpers.worlds import world

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
    honest = {
        "dtype": str(array.dtype),
        "shape": array.shape,
        "data": memoryview(array.tobytes()),
    }
    return RawArray(**{**honest, **declared})


def honest(pending, update):
    """The reply of a client that sends its update as it is."""
    arrays = {name: stored(array) for name, array in pack_update(update).items()}
    return RawReply(pending.nonce, pending.client.id, arrays, {"loss": update.loss})


def with_array(raw, name, array):
    """A reply with one array added or replaced."""
    return replace(raw, arrays={**raw.arrays, name: array})


def first(raw, prefix="params/"):
    """The name of the first array of a kind."""
    return next(name for name in raw.arrays if name.startswith(prefix))


def numbers(raw, name):
    """The values of one array of a reply."""
    array = raw.arrays[name]
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def changed(raw, name, value, place=0):
    """A reply with one entry of one array changed."""
    array = numbers(raw, name).copy()
    array.flat[place] = value
    return with_array(raw, name, stored(array))
