"""A compromised node, wrong answer by answer, then message by message.

Loaded by its Python before anything else.
"""

import pickle
import struct
import sys

EACH = [
    "not a number",
    "infinity",
    "wrong shape",
    "missing array",
    "extra array",
    "absurd norm",
    "replayed",
    "absurd loss",
    "larger mask",
    "pickled",
    "garbage",
    "other client",
    "honest",
]
"""What the node's clients send in the second round, one each; the last one is honest."""
ROUNDS = ["honest", "one each", "oversized", "repeated", "no content"]
"""What the node's message holds, round by round."""
HUGE = 400_000_000

WHY = {
    "not a number": "not finite",
    "infinity": "not finite",
    "wrong shape": "wrong shape",
    "missing array": "missing array",
    "extra array": "extra array",
    "absurd norm": "absurd norm",
    "replayed": "replayed nonce",
    "absurd loss": "malformed metrics",
    "larger mask": "mask over capacity",
    "pickled": "must follow one another",
    "garbage": "no header",
    "oversized": "too large",
    "repeated": "when put together",
    "other client": "did not answer for it",
    "no content": "lacks",
}
"""The reason that the server gives for each."""


def attack(kind, answer, before):
    """What is sent in the place of an honest answer; `before` is the one of the first round."""
    from dataclasses import replace

    import numpy as np

    from fedcover.server.safetensors_codec import pack_arrays

    def changed(change):
        return replace(answer, payload=pack_arrays(change(arrays_of(answer.payload))))

    def all_to(value):
        return changed(
            lambda arrays: {name: np.full_like(array, value) for name, array in arrays.items()}
        )

    return {
        "honest": lambda: answer,
        "not a number": lambda: all_to(np.nan),
        "infinity": lambda: all_to(np.inf),
        "absurd norm": lambda: all_to(1e12),
        "wrong shape": lambda: changed(
            lambda all: {name: array.reshape(-1)[:-1] for name, array in all.items()}
        ),
        "missing array": lambda: changed(lambda all: dict(list(all.items())[1:])),
        "extra array": lambda: changed(lambda all: {**all, "params/more": np.zeros(3, np.float32)}),
        "larger mask": lambda: changed(
            lambda all: {**all, next(iter(all)).replace("params", "bits"): np.ones(5000, np.uint8)}
        ),
        "replayed": lambda: before,
        "absurd loss": lambda: replace(answer, loss=1.7e308),
        "pickled": lambda: replace(answer, payload=_framed(answer.payload)),
        "garbage": lambda: replace(answer, payload=b"\xff" * 1000),
        "other client": lambda: replace(answer, client=answer.client + 1000),
        "oversized": lambda: replace(
            answer, payload=np.arange(HUGE // 4, dtype=np.int32).tobytes()
        ),
        "repeated": lambda: replace(answer, payload=bytes(HUGE)),
    }[kind]()


def arrays_of(payload):
    """The arrays of a payload by name."""
    import numpy as np

    from fedcover.server.safetensors_codec import unpack_arrays

    return {
        name: np.frombuffer(raw.data, raw.dtype).reshape(raw.shape)
        for name, raw in unpack_arrays(payload).items()
    }


def _framed(payload):
    """The same header, with pickles where numbers should be."""
    (length,) = struct.unpack("<Q", payload[:8])
    return payload[: 8 + length] + pickle.dumps({"evil": True})


def install():
    """Put the attack where honest nodes answer."""
    import os
    from pathlib import Path

    import fedcover.flower.messages as messages

    honest = messages.result_message
    memory = Path(os.environ["COMPROMISED"])

    def evil(message, answers):
        round = messages.read_request(message).round
        answers = sorted(answers, key=lambda answer: answer.client)
        if round == 0:
            memory.write_bytes(pickle.dumps(answers))
            return honest(message, answers)
        if ROUNDS[round] == "no content":
            from flwr.app import Message, RecordDict

            return Message(RecordDict({}), reply_to=message)
        if ROUNDS[round] == "one each":
            before = pickle.loads(memory.read_bytes())
            return honest(
                message, [attack(*three) for three in zip(EACH, answers, before, strict=True)]
            )
        if ROUNDS[round] == "repeated":  # one small piece, named ten thousand times
            import flwr.app.message.array

            flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = 40_000
        return honest(message, [attack(ROUNDS[round], answers[0], None)])

    messages.result_message = evil


if any("flwr-clientapp" in part for part in sys.orig_argv):
    install()
