"""A round shared by several processes: each trains some of the clients, all end with the same state.

Rules that are made of sums add those up; any other rule is given what every client trained.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fedcover.errors import RunError
from fedcover.server.aggregation import WeightedUpdate, coverage_mean, mean_from_sums, weighted_sums
from fedcover.server.collectives import ProcessGroup, is_remote, shard_by_cost
from fedcover.server.round_setup import Setup
from fedcover.submodels.build import without_parameters
from fedcover.submodels.reductions import TrainedSubset, without_masks
from fedcover.tensors import FlatParams
from fedcover.types import Assignment, Client, Engine, Params, Reduction, Rule, State, Task, Update

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """What other processes are told of an update: all but the values that are only needed in sums."""

    client: int
    bits: Mapping[str, torch.Tensor]
    params: Params
    buffers: Params
    measured: dict[str, Params]
    private: Params
    loss: float


def shard_setup(setup: Setup, ranks: ProcessGroup) -> Setup:
    """The same setup, its clients and test samples shared by these processes."""
    if ranks.size == 1:
        return setup
    if setup.clip_updates is not None:  # privacy clips too
        raise RunError(
            "clip_updates looks at each update as a whole, which needs all of them in one process: use 1"
        )
    return replace(
        setup,
        engine=shard_engine(setup.engine, ranks, setup.uses),
        rule=shard_rule(setup.rule, ranks),
        mean=shard_rule(setup.mean, ranks),
        ranks=ranks,
    )


def without_values(setup: Setup) -> Setup:
    """The same setup, its module without the initial values of its parameters: those of a round are in its state."""
    model = setup.task.model
    lean = replace(
        setup,
        task=replace(setup.task, model=replace(model, module=without_parameters(model.module))),
    )
    vars(lean)["uses"] = (
        setup.uses
    )  # what is cached: of some models it can only be counted with values
    return lean


def shard_engine(engine: Engine, ranks: ProcessGroup, uses: Mapping[str, int]) -> Engine:
    """An engine that trains this process's share; of all other updates it gives the shapes and what is said of them."""

    def train(
        task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float
    ) -> Iterator[Update]:
        prices = [training_cost(Assignment(task, state, *each), uses) for each in work]
        mine = [work[place] for place in shard_by_cost(prices, ranks.size)[ranks.rank]]
        own: list[Update] = []

        def answers() -> tuple[object, list[UpdateHeader]]:
            own.extend(engine(task, state, mine, lr))
            return _fingerprint(state, prices), [_header_of(update) for update in own]

        heard = ranks.all_gather(answers)
        if any(fingerprint != heard[0][0] for fingerprint, _ in heard):
            raise RunError(
                f"the processes disagree about round {state.round}: do all run the same fedcover and data?"
            )
        yield from own
        parts = {client.id: (client, reduction) for client, reduction in work}
        device = next(iter(state.params.values())).device
        for rank, (_, told) in enumerate(heard):
            if rank != ranks.rank:
                yield from (_update(*parts[each.client], each, device) for each in told)

    return train


def training_cost(assignment: Assignment, uses: Mapping[str, int]) -> int:
    """What a client's round costs to compute: multiply-adds of its part (masks save none) times steps."""
    sizes = without_masks(assignment.reduction).sizes(assignment.state.params)
    return assignment.steps * max(
        1, sum(sizes.get(name, 0) * times for name, times in uses.items())
    )


def _fingerprint(state: State, prices: Sequence[int]) -> object:
    """A few numbers that differ if two processes began a round from different weights or with other clients."""
    bits = [
        tensor.contiguous().view(_BITS[tensor.element_size()]) for tensor in state.params.values()
    ]
    return (
        state.round,
        tuple(prices),
        int(torch.stack([b.sum(dtype=torch.int64) for b in bits]).sum()),
    )


def _header_of(update: Update) -> UpdateHeader:
    trained = update.trained
    return UpdateHeader(
        client=update.client.id,
        bits=_to_device(trained.bits, "cpu") if isinstance(trained, TrainedSubset) else {},
        params=_to_device(update.params, "meta"),
        buffers=_to_device(update.buffers, "meta"),
        measured={kind: _to_device(values, "meta") for kind, values in update.measured.items()},
        private=_to_device(update.private, "cpu"),
        loss=update.loss,
    )


def _update(client: Client, sent: Reduction, told: UpdateHeader, device: torch.device) -> Update:
    trained = TrainedSubset(sent, _to_device(told.bits, device)) if told.bits else sent
    private = _to_device(told.private, device)
    return Update(
        client, sent, trained, told.params, told.buffers, told.measured, private, told.loss
    )


def shard_rule(rule: Rule, ranks: ProcessGroup) -> Rule:
    """The same rule over the updates of all processes."""
    bare, options = (rule.func, rule.keywords) if isinstance(rule, partial) else (rule, {})

    def summed(old: Params, parts: Iterable[WeightedUpdate]) -> Params:
        sums = weighted_sums(old, [part for part in parts if not is_remote(part[1])], **options)
        ranks.total([*sums.total.values(), *sums.weight.values(), sums.total_weight])
        return mean_from_sums(old, sums, **options)

    def gathered(old: Params, parts: Iterable[WeightedUpdate]) -> Params:
        listed = list(parts)
        here = {
            place: values for place, (_, values, _) in enumerate(listed) if not is_remote(values)
        }
        heard = ranks.all_gather(
            lambda: {place: _to_device(values, "cpu") for place, values in here.items()}
        )
        everywhere = ChainMap(here, *heard)
        device = next(iter(old.values())).device
        return rule(
            old,
            [
                (part, _to_device(everywhere[n], device), weight)
                for n, (part, _, weight) in enumerate(listed)
            ],
        )

    return summed if bare is coverage_mean else gathered


def _to_device(params: Mapping[str, torch.Tensor], device: torch.device | str) -> Params:
    if isinstance(
        params, FlatParams
    ):  # it travels as one tensor; each of its parts alone would take all of it along
        return params.like(params.flat.to(device))
    return {name: tensor.to(device) for name, tensor in params.items()}
