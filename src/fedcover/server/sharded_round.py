"""A round shared by several processes: each trains some clients, all end with the same state.

`shard_setup` replaces the engine and the rules of a setup; the steps of a round stay the same.
Values of updates stay in the process that trained them: other processes get an `UpdateHeader`, from
which they make an `Update` of the right shapes without values ("meta" tensors, see `is_remote`).

A `SummableRule` adds up the sums of all processes. For any other rule, all values are exchanged.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedcover.errors import RunError
from fedcover.server.aggregation import SummableRule, WeightedUpdate
from fedcover.server.collectives import ProcessGroup, is_remote, shard_by_cost
from fedcover.server.round_setup import Setup
from fedcover.submodels.build import without_parameters
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.tensors import device_of, to_device
from fedcover.types import (
    Assignment,
    Client,
    EngineFunction,
    Params,
    Reduction,
    Rule,
    State,
    Task,
    Update,
)

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ── the setup ───────────────────────────────────────────────────────────────────────────────────


def shard_setup(setup: Setup, process_group: ProcessGroup) -> Setup:
    """Share the clients and test samples of a setup between processes.

    Raises:
        RunError: updates are clipped, for which one process would need all of their values.
    """
    if process_group.size == 1:
        return setup
    if setup.experiment.clip_updates is not None:  # always set with privacy
        raise RunError(
            "clip_updates looks at each update as a whole, "
            "which needs all of them in one process: use 1"
        )
    train = shard_engine(setup.engine.train, process_group, setup.uses)
    return replace(
        setup,
        engine=replace(setup.engine, train=train),
        rule=shard_rule(setup.rule, process_group),
        mean=shard_rule(setup.mean, process_group),
        process_group=process_group,
    )


def without_values(setup: Setup) -> Setup:
    """Drop the initial values of the parameters from a setup: each round's are in its state."""
    task = setup.task
    module = without_parameters(task.model.module)
    # Some models can count their multiplications only with values, so count them before.
    uses = dict(setup.uses)
    lean_task = replace(task, model=replace(task.model, module=module))
    return replace(setup, task=lean_task, uses=uses)


# ── training ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """An update as other processes see it: without the values of `params`, `buffers`, `measured`.

    These tensors are on the "meta" device: they have shapes and types only.
    """

    client: int
    bits: Mapping[str, torch.Tensor]
    params: Params
    buffers: Params
    measured: dict[str, Params]
    private: Params
    loss: float


def shard_engine(
    engine: EngineFunction, process_group: ProcessGroup, uses: Mapping[str, int]
) -> EngineFunction:
    """Make an engine train only this process's clients, and return headers of all other updates."""

    def train(
        task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float
    ) -> Iterator[Update]:
        costs = [
            training_cost(Assignment(task, state, client, reduction), uses)
            for client, reduction in work
        ]
        local_work = [
            work[index] for index in shard_by_cost(costs, process_group.size)[process_group.rank]
        ]
        local_updates: list[Update] = []

        def train_local() -> tuple[object, list[UpdateHeader]]:
            local_updates.extend(engine(task, state, local_work, lr))
            return _fingerprint(state, costs), [_header_of(update) for update in local_updates]

        answers = process_group.all_gather(train_local)
        first_fingerprint, _ = answers[0]
        if any(fingerprint != first_fingerprint for fingerprint, _ in answers):
            raise RunError(
                f"the processes disagree about round {state.round}: "
                "do all run the same fedcover and data?"
            )
        yield from local_updates
        work_by_client = {client.id: (client, reduction) for client, reduction in work}
        device = device_of(state.params)
        for rank, (_, headers) in enumerate(answers):
            if rank != process_group.rank:
                for header in headers:
                    client, reduction = work_by_client[header.client]
                    yield _remote_update(client, reduction, header, device)

    return train


def training_cost(assignment: Assignment, uses: Mapping[str, int]) -> int:
    """Estimate the cost of training a client: multiply-adds of one sample, times local steps.

    Masks save nothing.
    """
    sizes = without_masks(assignment.reduction).sizes(assignment.state.params)
    multiply_adds = sum(sizes.get(name, 0) * times for name, times in uses.items())
    return assignment.steps * max(1, multiply_adds)


def _fingerprint(state: State, costs: Sequence[int]) -> object:
    """Return values that differ if two processes began a round with other weights or clients."""
    bit_sums = []
    for tensor in state.params.values():
        integers = tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])
        bit_sums.append(integers.sum(dtype=torch.int64))
    return state.round, tuple(costs), int(torch.stack(bit_sums).sum())


def _header_of(update: Update) -> UpdateHeader:
    bits = update.trained.bits if isinstance(update.trained, TrainedSubset) else {}
    return UpdateHeader(
        client=update.client.id,
        bits=to_device(bits, "cpu"),
        params=to_device(update.params, "meta"),
        buffers=to_device(update.buffers, "meta"),
        measured={kind: to_device(values, "meta") for kind, values in update.measured.items()},
        private=to_device(update.private, "cpu"),
        loss=update.loss,
    )


def _remote_update(
    client: Client, sent: Reduction, header: UpdateHeader, device: torch.device
) -> Update:
    trained = sent
    if header.bits:
        trained = TrainedSubset(sent, to_device(header.bits, device))
    return Update(
        client=client,
        sent=sent,
        trained=trained,
        params=header.params,
        buffers=header.buffers,
        measured=header.measured,
        private=to_device(header.private, device),
        loss=header.loss,
    )


# ── aggregation ─────────────────────────────────────────────────────────────────────────────────


def shard_rule(rule: Rule, process_group: ProcessGroup) -> Rule:
    """Apply a rule to the updates of all processes."""
    if isinstance(rule, SummableRule):
        return _sum_over_processes(rule, process_group)
    return _gather_values(rule, process_group)


def _sum_over_processes(rule: SummableRule, process_group: ProcessGroup) -> Rule:
    """Sum the updates of each process by itself, then add up the sums."""

    def summed(old: Params, updates: Iterable[WeightedUpdate]) -> Params:
        local_updates = [update for update in updates if not is_remote(update[1])]
        sums = rule.sum_updates(old, local_updates)
        process_group.total(sums.tensors())
        return rule.finish(old, sums)

    return summed


def _gather_values(rule: Rule, process_group: ProcessGroup) -> Rule:
    """Collect the values of all updates in every process."""

    def gathered(old: Params, updates: Iterable[WeightedUpdate]) -> Params:
        all_updates = list(updates)
        local_values = {
            index: values
            for index, (_, values, _) in enumerate(all_updates)
            if not is_remote(values)
        }
        answers = process_group.all_gather(
            lambda: {index: to_device(values, "cpu") for index, values in local_values.items()}
        )
        values_by_index = ChainMap(local_values, *answers)
        device = device_of(old)
        complete = [
            (reduction, to_device(values_by_index[index], device), weight)
            for index, (reduction, _, weight) in enumerate(all_updates)
        ]
        return rule(old, complete)

    return gathered
