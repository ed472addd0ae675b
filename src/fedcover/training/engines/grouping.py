"""Decide which clients train together in one stack.

A stack holds clients with equal signatures and learning rates. Every signature and every stack
size must be compiled, which takes seconds, so this module limits how many of them there are.
The limits are the constants below; they change speed and memory, never results.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from fedcover.log import warn_once
from fedcover.models.norms import statistics_key
from fedcover.tensors import device_of
from fedcover.training.engines.client_inputs import (
    ClientInputs,
    ClientJob,
    StepSignature,
    client_inputs,
)
from fedcover.training.engines.runners import RunnerCache
from fedcover.training.engines.unsupported import UnsupportedByEngine

MAX_STACK_SIZES = 4
"""Stack sizes to compile for one signature; later stacks use only these sizes."""

MAX_SIGNATURES = 12
"""Signatures to compile on a CPU for one run; clients of further ones train sequentially."""

MAX_STACK_PARAMS = {"cpu": 1 << 18, "cuda": 1 << 30}
"""Parameters in one stack, roughly: on a CPU, what its caches hold from step to step."""

MIN_CLIENTS_PER_ROW_COUNT = 3
"""Clients for each number of samples, on average, that justify a uniform stack of their own."""

ClientStack = Sequence[ClientInputs]
"""Clients with equally many samples."""

RaggedStack = tuple[StepSignature, ClientStack]
"""Clients with different numbers of samples; the signature has space for the largest."""

_ClientGroups = Mapping[tuple[StepSignature, float], list[ClientInputs]]
"""Clients by signature and learning rate."""


class Grouping(NamedTuple):
    """How the clients of a round train: in stacks, in ragged stacks, or alone."""

    stacks: list[ClientStack]
    ragged_stacks: list[RaggedStack]
    alone: list[ClientJob]


def group_into_stacks(jobs: Sequence[ClientJob], cache: RunnerCache) -> Grouping:
    """Group clients with equal signatures and learning rates.

    Raises:
        UnsupportedByEngine: If the model cannot be stacked at all.
    """
    _check_stackable(jobs)
    groups = _group_by_signature(jobs, cache)
    if is_on_gpu(jobs):
        compiled_groups = groups
    else:
        num_runs = len({id(job.assignment.task) for job in jobs})
        compiled_groups = _limit_signatures(groups, cache, num_runs * MAX_SIGNATURES)
    stacks: list[ClientStack] = []
    for key, clients in groups.items():
        if key not in compiled_groups:
            stacks += [[client] for client in clients]
    ragged_stacks: list[RaggedStack] = []
    for (signature, _), clients in compiled_groups.items():
        if len({client.rows for client in clients}) > 1:
            ragged_stacks.append((signature, clients))
        else:
            stacks += split_into_stacks(clients, cache.stack_sizes(signature))
    return Grouping(
        stacks=[stack for stack in stacks if len(stack) > 1],
        ragged_stacks=ragged_stacks,
        alone=[stack[0].job for stack in stacks if len(stack) == 1],
    )


def _check_stackable(jobs: Sequence[ClientJob]) -> None:
    if any(statistics_key(job.assignment.task.norm, 1.0) for job in jobs):
        raise UnsupportedByEngine("norm statistics are tracked for each client")
    for job in jobs[:1]:
        layers = job.assignment.task.model.module.modules()
        if any(isinstance(layer, nn.RNNBase) for layer in layers):
            raise UnsupportedByEngine(
                "the model has recurrent layers, which torch computes for one client at a time"
            )


def _group_by_signature(jobs: Sequence[ClientJob], cache: RunnerCache) -> _ClientGroups:
    """Group clients by number of samples, or with space for all if that would be too few."""
    on_gpu = is_on_gpu(jobs)
    by_part: dict[tuple[StepSignature, float], list[ClientInputs]] = defaultdict(list)
    for client in client_inputs(jobs):
        by_part[client.signature(rows=0), client.job.lr].append(client)
    groups: dict[tuple[StepSignature, float], list[ClientInputs]] = defaultdict(list)
    for (part, lr), clients in by_part.items():
        uniform = on_gpu or _fits_uniform_stacks(clients)
        row_space = None if uniform else _row_space(part, clients, cache)
        for client in clients:
            groups[client.signature(row_space or client.rows), lr].append(client)
    return groups


def _fits_uniform_stacks(clients: Sequence[ClientInputs]) -> bool:
    """Return whether to stack only clients with equally many samples.

    True if there are enough of them, or if no client has a full batch.
    """
    row_counts = {client.rows for client in clients}
    if len(row_counts) == 1 or len(row_counts) * MIN_CLIENTS_PER_ROW_COUNT <= len(clients):
        return True
    return max(row_counts) < clients[0].job.assignment.task.local.batch_size


def _row_space(part: StepSignature, clients: Sequence[ClientInputs], cache: RunnerCache) -> int:
    """Return how many samples a slot of a ragged stack has space for.

    Use the smallest existing stack that fits, otherwise two to four times the current maximum.
    """
    rows = max(client.rows for client in clients)
    stack_size = ragged_stack_size(clients)
    row_spaces = []
    for runner in cache.runners.values():
        signature = runner.workspace.signature
        same_size = runner.workspace.stack_size == stack_size
        if same_size and signature.rows >= rows and replace(signature, rows=0) == part:
            row_spaces.append(signature.rows)
    return min(row_spaces, default=2 << (rows - 1).bit_length())


def _limit_signatures(
    groups: _ClientGroups, cache: RunnerCache, max_signatures: int
) -> _ClientGroups:
    """Return the groups with a compiled signature, and new ones up to the limit."""
    signatures = cache.signatures()
    compiled_groups: dict[tuple[StepSignature, float], list[ClientInputs]] = {}
    for (signature, lr), clients in groups.items():
        stackable = len(clients) > 1
        if signature in signatures or len(signatures) < max_signatures:
            compiled_groups[signature, lr] = clients
            if stackable:
                signatures.add(signature)
        elif stackable:
            warn_once(
                f"there are more than {max_signatures} shapes of clients (parts of the model and "
                "numbers of samples), so those of further ones are trained one after another"
            )
    return compiled_groups


def split_into_stacks(
    clients: Sequence[ClientInputs], compiled_sizes: Sequence[int]
) -> Iterator[ClientStack]:
    """Split clients of one signature into stacks that fit the cache or the GPU.

    Once `MAX_STACK_SIZES` sizes are compiled, use only these.
    """
    max_size = _max_stack_size(clients)
    remaining = list(clients)
    while remaining:
        num_stacks = max(1, len(remaining) // max_size)
        size = -(-len(remaining) // num_stacks)
        if size not in compiled_sizes and len(set(compiled_sizes)) >= MAX_STACK_SIZES:
            size = max((compiled for compiled in compiled_sizes if compiled <= size), default=1)
        yield remaining[:size]
        remaining = remaining[size:]


def ragged_stack_size(clients: Sequence[ClientInputs]) -> int:
    """Return how many clients of a ragged stack train at once.

    With more slots, some would be idle while the longest client trains. A size below the maximum
    is rounded down to a power of two: then few sizes are compiled, whatever the earlier rounds.
    """
    batch_size = clients[0].job.assignment.task.local.batch_size
    steps = [client.rows // batch_size for client in clients]
    useful = -(-sum(steps) // max(steps))
    max_size = _max_stack_size(clients)
    return max_size if useful >= max_size else 1 << (useful.bit_length() - 1)


def _max_stack_size(clients: Sequence[ClientInputs]) -> int:
    num_params = sum(p.numel() for p in clients[0].params.values())
    return max(2, MAX_STACK_PARAMS[clients[0].device.type] // max(1, num_params))


def is_on_gpu(jobs: Sequence[ClientJob]) -> bool:
    """Return whether the jobs' model is on a GPU."""
    return any(device_of(job.assignment.state.params).type == "cuda" for job in jobs[:1])
