"""The other process of `test_sharing`: builds the worlds that it is told to, and shares their
rounds.

Started as `python -m tests.second_process FOLDER`; the two meet in that folder.
"""

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import FileStore

from fedcover.errors import FedcoverError
from fedcover.runs.launch import join_process_group
from fedcover.server.round import run_round
from fedcover.server.sharded_round import shard_setup
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import eager_backend
from fedcover.training.engines.sequential import sequential
from fedcover.types import Engine
from tests.helpers.worlds import world

ENGINES = {"sequential": sequential, "batched": partial(batched, backend=eager_backend)}


def tensors_of(state):
    """Every tensor of a state, under a name."""
    kinds = {kind: getattr(state, kind) for kind in ("statistics", "measured", "server", "private")}
    kinds |= {"params": {"": state.params}, "ever": {"": state.coverage.ever}}
    kinds |= {"window": dict(enumerate(state.coverage.window))}
    return {
        f"{kind}/{key}/{name}": tensor
        for kind, parts in kinds.items()
        for key, values in parts.items()
        for name, tensor in values.items()
    }


def digest(state):
    """A number for every bit of a state."""
    content = {
        name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors_of(state).items()
    }
    return hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()


def setup_of(model, engine, fields):
    """The world of a test with one of the engines."""
    setup, state = world(model, **fields)
    return replace(setup, engine=Engine(ENGINES[engine])), state


def two_rounds(setup, state):
    """Two rounds, so that what is remembered is used; every state and report on the way."""
    rounds = []
    for _ in range(2):
        state, report = run_round(setup, state)
        rounds.append((state, report))
    return rounds


def share_rounds(process_group, told):
    """The rounds of a world in two processes, and whether both end with the same bits."""
    model, engine, fields = process_group.broadcast(told)
    setup, state = setup_of(model, engine, fields)
    rounds = two_rounds(shard_setup(setup, process_group), state)
    return rounds, process_group.all_gather(lambda: digest(rounds[-1][0]))


def main():
    """Take part until there is nothing more to do."""
    torch.set_num_threads(1)
    with join_process_group(1, 2, FileStore(f"{sys.argv[1]}/store", 2)) as process_group:
        while process_group.broadcast(None) == "go on":
            with suppress(FedcoverError):  # the first process fails in the same way
                share_rounds(process_group, None)


if __name__ == "__main__":
    main()
    os._exit(
        0
    )  # as the product's own processes end: threads of the network may not survive an orderly exit
