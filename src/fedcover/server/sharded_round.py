"""A round shared by several processes: each trains some of the clients, all end with the same state.

Rules that are made of sums add those up; any other rule is given what every client trained.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fedcover.errors import RunError
from fedcover.server.aggregation import Part, coverage_mean, mean_of, sums_of
from fedcover.server.collectives import Ranks, elsewhere, share
from fedcover.server.round import Setup
from fedcover.submodels.build import without_parameters
from fedcover.submodels.reductions import Within, dense
from fedcover.tensors import Slab
from fedcover.types import Assignment, Client, Engine, Params, Reduction, Rule, State, Task, Update

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Told:
    """What other processes are told of an update: all but the values that are only needed in sums."""

    client: int
    bits: Mapping[str, torch.Tensor]
    params: Params
    buffers: Params
    measured: dict[str, Params]
    private: Params
    loss: float


def shared(setup: Setup, ranks: Ranks) -> Setup:
    """The same setup, its clients and test samples shared by these processes."""
    if ranks.size == 1:
        return setup
    if setup.clip_updates is not None:  # privacy clips too
        raise RunError("clip_updates looks at each update as a whole, which needs all of them in one process: use 1")
    return replace(
        setup,
        engine=shared_engine(setup.engine, ranks, setup.uses),
        rule=shared_rule(setup.rule, ranks),
        mean=shared_rule(setup.mean, ranks),
        ranks=ranks,
    )


def without_values(setup: Setup) -> Setup:
    """The same setup, its module without the initial values of its parameters: those of a round are in its state."""
    model = setup.task.model
    lean = replace(setup, task=replace(setup.task, model=replace(model, module=without_parameters(model.module))))
    vars(lean)["uses"] = setup.uses  # what is cached: of some models it can only be counted with values
    return lean


def shared_engine(engine: Engine, ranks: Ranks, uses: Mapping[str, int]) -> Engine:
    """An engine that trains this process's share; of all other updates it gives the shapes and what is said of them."""

    def train(task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float) -> Iterator[Update]:
        prices = [price(Assignment(task, state, *each), uses) for each in work]
        mine = [work[place] for place in share(prices, ranks.size)[ranks.rank]]
        own: list[Update] = []

        def answers() -> tuple[object, list[Told]]:
            own.extend(engine(task, state, mine, lr))
            return _fingerprint(state, prices), [_told(update) for update in own]

        heard = ranks.gather(answers)
        if any(fingerprint != heard[0][0] for fingerprint, _ in heard):
            raise RunError(f"the processes disagree about round {state.round}: do all run the same fedcover and data?")
        yield from own
        parts = {client.id: (client, reduction) for client, reduction in work}
        device = next(iter(state.params.values())).device
        for rank, (_, told) in enumerate(heard):
            if rank != ranks.rank:
                yield from (_update(*parts[each.client], each, device) for each in told)

    return train


def price(assignment: Assignment, uses: Mapping[str, int]) -> int:
    """What a client's round costs to compute: multiply-adds of its part (masks save none) times steps."""
    sizes = dense(assignment.reduction).sizes(assignment.state.params)
    return assignment.steps * max(1, sum(sizes.get(name, 0) * times for name, times in uses.items()))


def _fingerprint(state: State, prices: Sequence[int]) -> object:
    """A few numbers that differ if two processes began a round from different weights or with other clients."""
    bits = [tensor.contiguous().view(_BITS[tensor.element_size()]) for tensor in state.params.values()]
    return state.round, tuple(prices), int(torch.stack([b.sum(dtype=torch.int64) for b in bits]).sum())


def _told(update: Update) -> Told:
    trained = update.trained
    return Told(
        client=update.client.id,
        bits=_on(trained.bits, "cpu") if isinstance(trained, Within) else {},
        params=_on(update.params, "meta"),
        buffers=_on(update.buffers, "meta"),
        measured={kind: _on(values, "meta") for kind, values in update.measured.items()},
        private=_on(update.private, "cpu"),
        loss=update.loss,
    )


def _update(client: Client, sent: Reduction, told: Told, device: torch.device) -> Update:
    trained = Within(sent, _on(told.bits, device)) if told.bits else sent
    private = _on(told.private, device)
    return Update(client, sent, trained, told.params, told.buffers, told.measured, private, told.loss)


def shared_rule(rule: Rule, ranks: Ranks) -> Rule:
    """The same rule over the updates of all processes."""
    bare, options = (rule.func, rule.keywords) if isinstance(rule, partial) else (rule, {})

    def summed(old: Params, parts: Iterable[Part]) -> Params:
        sums = sums_of(old, [part for part in parts if not elsewhere(part[1])], **options)
        ranks.total([*sums.total.values(), *sums.weight.values(), sums.everybody])
        return mean_of(old, sums, **options)

    def gathered(old: Params, parts: Iterable[Part]) -> Params:
        listed = list(parts)
        here = {place: values for place, (_, values, _) in enumerate(listed) if not elsewhere(values)}
        heard = ranks.gather(lambda: {place: _on(values, "cpu") for place, values in here.items()})
        everywhere = ChainMap(here, *heard)
        device = next(iter(old.values())).device
        return rule(old, [(part, _on(everywhere[n], device), weight) for n, (part, _, weight) in enumerate(listed)])

    return summed if bare is coverage_mean else gathered


def _on(params: Mapping[str, torch.Tensor], device: torch.device | str) -> Params:
    if isinstance(params, Slab):  # it travels as one tensor; each of its parts alone would take all of it along
        return params.like(params.flat.to(device))
    return {name: tensor.to(device) for name, tensor in params.items()}
