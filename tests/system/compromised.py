"""A compromised node: in every round it answers in another wrong way. Loaded by its Python before anything else."""

import json
import pickle
import struct
import sys

ATTACKS = [
    "honest", "not a number", "infinity", "wrong shape", "missing array", "extra array", "absurd norm", "replayed",
    "absurd loss", "larger mask", "pickled", "garbage", "oversized", "repeated", "other clients", "no content",
]  # fmt: skip
HUGE = 400_000_000


def attack(kind, answers, before):
    """What the node sends in the place of honest answers."""
    from dataclasses import replace

    import numpy as np

    from fedcover.flower.parcels import bundle, unbundle

    def changed(answer, change):
        arrays = {name: np.load(_file(raw.data)) for name, raw in unbundle(answer.parcel).items()}
        return replace(answer, parcel=bundle(change(arrays)))

    def all_to(value):
        return lambda arrays: {name: np.full_like(array, value) for name, array in arrays.items()}

    changes = {
        "not a number": all_to(np.nan),
        "infinity": all_to(np.inf),
        "absurd norm": all_to(1e12),
        "wrong shape": lambda arrays: {name: array.reshape(-1)[:-1] for name, array in arrays.items()},
        "missing array": lambda arrays: dict(list(arrays.items())[1:]),
        "extra array": lambda arrays: {**arrays, "params/more": np.zeros(3, np.float32)},
        "larger mask": lambda arrays: {**arrays, next(iter(arrays)).replace("params", "bits"): np.ones(5000, np.uint8)},
    }
    if kind in changes:
        return [changed(answer, changes[kind]) for answer in answers]
    if kind == "replayed":
        return before
    if kind == "absurd loss":
        return [replace(answer, loss=1.7e308) for answer in answers]
    if kind == "pickled":
        return [replace(answer, parcel=_framed(answer.parcel)) for answer in answers]
    if kind == "garbage":
        return [replace(answer, parcel=b"\xff" * 1000) for answer in answers]
    if kind == "oversized":
        return [replace(answer, parcel=np.arange(HUGE // 4, dtype=np.int32).tobytes()) for answer in answers]
    if kind == "repeated":  # one small piece, named ten thousand times
        import flwr.app.message.array

        flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = 40_000
        return [replace(answer, parcel=bytes(HUGE)) for answer in answers[:1]]
    if kind == "other clients":
        return [replace(answer, client=answer.client + 1000) for answer in answers]
    return answers


def _file(data):
    import io

    return io.BytesIO(bytes(data))


def _framed(parcel):
    """The same index, with pickles where arrays should be."""
    (length,) = struct.unpack("<Q", parcel[:8])
    index = json.loads(parcel[8 : 8 + length])
    stored = [pickle.dumps({"evil": True}) for _ in index]
    head = json.dumps([[n, d, s, len(p)] for (n, d, s, _), p in zip(index, stored, strict=True)]).encode()
    return struct.pack("<Q", len(head)) + head + b"".join(stored)


def install():
    """Put the attack where honest nodes answer."""
    import os
    from pathlib import Path

    import fedcover.flower.messages as messages

    honest = messages.to_server
    memory = Path(os.environ["COMPROMISED"])

    def evil(message, answers):
        round = messages.read_orders(message).round
        kind = ATTACKS[round % len(ATTACKS)]
        if kind == "honest":
            memory.write_bytes(pickle.dumps(answers))
        if kind == "no content":
            from flwr.app import Message, RecordDict

            return Message(RecordDict({}), reply_to=message)
        return honest(message, attack(kind, answers, pickle.loads(memory.read_bytes())))

    messages.to_server = evil


if any("flwr-clientapp" in part for part in sys.orig_argv):
    install()
