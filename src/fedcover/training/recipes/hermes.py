"""Pruning by the clients themselves: each shrinks its own sub-network and keeps its mask for life.

Li, Sun, Li, Pu, Li, Chen: Hermes, An efficient federated learning framework for heterogeneous mobile clients
(MobiCom 2021). Structured: whole units of every group, smallest length first.
"""

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.submodels.reductions import Slices, width_for_budget
from fedcover.submodels.unit_groups import num_units_kept, unit_positions
from fedcover.training.recipes.base import client_norm_statistics
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe, UnitGroup


def hermes(*, step: float = 0.2, good_enough: float = 0.5) -> Recipe:
    """Prune `step` of the units left, down to the client's capacity, whenever its model is good enough.

    Use it with the policy `full`: the server sends what it has, the client trains the part that its own mask keeps,
    and only that part counts as trained. `good_enough` is the accuracy on its own rows from which on a client prunes.
    """
    if not 0 < step < 1:
        raise InvalidValue(f"recipe hermes: step must be in (0, 1); got {step}")

    def start(assignment: Assignment, params: Params) -> Carry:
        groups = assignment.task.model.groups
        if any(p.shape != assignment.state.params[name].shape for name, p in params.items()):
            raise InvalidValue("recipe hermes prunes at the client, so it needs the policy 'full'")
        return _unit_mask(groups, _kept_units(assignment), params)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        return cross_entropy(forward, _apply_mask(params, carry), batch, carry)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        kept, trained = _kept_units(assignment), _apply_mask(params, carry)
        shard = assignment.task.source.shard(assignment.client.id)
        with torch.no_grad():
            answers = forward(
                {**trained, **client_norm_statistics(assignment)}, shard.samples.x[shard.index]
            ).argmax(1)
        if float((answers == shard.samples.y[shard.index]).double().mean()) >= good_enough:
            goal = _target_width(assignment)
            kept = {
                g.name: _prune_units(g, kept[g.name], goal, step, trained)
                for g in assignment.task.model.groups
            }
        return Outcome(
            trained, bits=carry, private={f"units.{name}": units for name, units in kept.items()}
        )

    return Recipe(loss, start, finish=finish, chooses=True)


def _kept_units(assignment: Assignment) -> dict[str, Tensor]:
    """The units that the client's own mask keeps: all of them at first."""
    everything = {
        g.name: torch.ones(g.size, dtype=torch.bool) for g in assignment.task.model.groups
    }
    return {
        name: assignment.private.get(f"units.{name}", units).cpu()
        for name, units in everything.items()
    }


def _target_width(assignment: Assignment) -> float:
    """The share of every group's units that fits the client's capacity."""
    task, capacity = assignment.task, assignment.client.capacity
    if task.measure == "width":
        return capacity
    return width_for_budget(task.model.groups, assignment.state.params, capacity)


def _apply_mask(params: Params, bits: dict[str, Tensor]) -> Params:
    return {name: p * bits[name] if name in bits else p for name, p in params.items()}


def _unit_mask(
    groups: tuple[UnitGroup, ...], kept: dict[str, Tensor], params: Params
) -> dict[str, Tensor]:
    """The client's own mask over the tensors that its groups cut."""
    units = {name: mask.nonzero().flatten() for name, mask in kept.items()}
    cut = {cut.tensor: params[cut.tensor] for g in groups for cut in g.cuts if cut.tensor in params}
    return Slices(groups, units).mask(cut)


def _prune_units(
    group: UnitGroup, kept: Tensor, goal: float, step: float, params: Params
) -> Tensor:
    """The group's units after one more pruning: the shortest of those left go, never below the goal."""
    if group.nested:  # its units come in order, so none can go by its length
        return kept
    # a capacity that has grown since (they may belong to slots) brings nothing back
    before = int(kept.sum())
    left = min(before, max(num_units_kept(group.size, goal), int(before * (1 - step) + 1e-9)))
    lengths = torch.zeros(group.size, dtype=torch.float64)
    for cut in group.cuts:
        if cut.tensor in params and cut.axis is not None:
            places = unit_positions(cut, torch.arange(group.size))
            squares = params[cut.tensor].detach().double().cpu() ** 2
            other = tuple(axis for axis in range(squares.ndim) if axis != cut.axis)
            along = squares.sum(other) if other else squares
            lengths += along[places].view(group.size, -1).sum(1)
    lengths[~kept] = -1
    order = lengths.argsort(descending=True, stable=True)
    return torch.zeros(group.size, dtype=torch.bool).index_fill_(0, order[:left], True)
