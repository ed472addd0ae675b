"""Pruning by the clients: each shrinks its own sub-network and keeps its mask between rounds.

Li, Sun, Li, Pu, Li, Chen: Hermes, An efficient federated learning framework for heterogeneous
mobile clients (MobiCom 2021). Structured: it prunes whole units of every group, those with the
smallest norm first.
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
    """Prune a share of the remaining units whenever the client's model is accurate enough.

    Use it with the policy `full`: the server sends the whole model, and the client trains the part
    that its own mask keeps. Only that part counts as trained.

    Args:
        step: The share of the remaining units to prune, down to the client's capacity.
        good_enough: The accuracy on its own rows from which a client prunes.
    """
    if not 0 < step < 1:
        raise InvalidValue(f"recipe hermes: step must be in (0, 1); got {step}")

    def start(assignment: Assignment, params: Params) -> Carry:
        global_params = assignment.state.params
        if any(p.shape != global_params[name].shape for name, p in params.items()):
            raise InvalidValue("recipe hermes prunes at the client, so it needs the policy 'full'")
        return _unit_mask(assignment.task.model.groups, _kept_units(assignment), params)

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        return cross_entropy(forward, _apply_mask(params, carry), batch, carry)

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        units = _kept_units(assignment)
        trained = _apply_mask(params, carry)
        if _accuracy(assignment, forward, trained) >= good_enough:
            width = _target_width(assignment)
            for group in assignment.task.model.groups:
                units[group.name] = _prune_units(group, units[group.name], width, step, trained)
        private = {f"units.{name}": unit_mask for name, unit_mask in units.items()}
        return Outcome(trained, bits=carry, private=private)

    return Recipe(loss, start, finish=finish, chooses=True)


def _kept_units(assignment: Assignment) -> dict[str, Tensor]:
    """Return the client's own mask over the units of each group; at first all are kept."""
    units = {}
    for group in assignment.task.model.groups:
        all_units = torch.ones(group.size, dtype=torch.bool)
        units[group.name] = assignment.private.get(f"units.{group.name}", all_units).cpu()
    return units


def _accuracy(assignment: Assignment, forward: Forward, params: Params) -> float:
    """Return the share of the client's own rows that it classifies correctly."""
    shard = assignment.task.source.shard(assignment.client.id)
    values = {**params, **client_norm_statistics(assignment)}
    with torch.no_grad():
        predictions = forward(values, shard.samples.x[shard.index]).argmax(1)
    return float((predictions == shard.samples.y[shard.index]).double().mean())


def _target_width(assignment: Assignment) -> float:
    """Return the share of each group's units that fits the client's capacity."""
    task, capacity = assignment.task, assignment.client.capacity
    if task.measure == "width":
        return capacity
    return width_for_budget(task.model.groups, assignment.state.params, capacity)


def _apply_mask(params: Params, bits: dict[str, Tensor]) -> Params:
    return {name: p * bits[name] if name in bits else p for name, p in params.items()}


def _unit_mask(
    groups: tuple[UnitGroup, ...], units: dict[str, Tensor], params: Params
) -> dict[str, Tensor]:
    """Return the client's own mask over the tensors that its groups cut."""
    indices = {name: unit_mask.nonzero().flatten() for name, unit_mask in units.items()}
    cut_tensors = {}
    for group in groups:
        for cut in group.cuts:
            if cut.tensor in params:
                cut_tensors[cut.tensor] = params[cut.tensor]
    return Slices(groups, indices).mask(cut_tensors)


def _prune_units(
    group: UnitGroup, unit_mask: Tensor, width: float, step: float, params: Params
) -> Tensor:
    """Prune the units with the smallest norm, but never below the target width."""
    if group.nested:  # its units depend on each other, so none can be pruned by its norm
        return unit_mask
    # a capacity that has grown (it may belong to the slot) brings no unit back
    num_before = int(unit_mask.sum())
    num_after_step = int(num_before * (1 - step) + 1e-9)
    num_left = min(num_before, max(num_units_kept(group.size, width), num_after_step))
    squares = _squared_norms(group, params)
    squares[~unit_mask] = -1
    order = squares.argsort(descending=True, stable=True)
    return torch.zeros(group.size, dtype=torch.bool).index_fill_(0, order[:num_left], True)


def _squared_norms(group: UnitGroup, params: Params) -> Tensor:
    """Return the squared norm of the weights of each unit."""
    totals = torch.zeros(group.size, dtype=torch.float64)
    for cut in group.cuts:
        if cut.tensor not in params or cut.axis is None:
            continue
        squares = params[cut.tensor].detach().double().cpu() ** 2
        other_axes = tuple(axis for axis in range(squares.ndim) if axis != cut.axis)
        along_axis = squares.sum(other_axes) if other_axes else squares
        positions = unit_positions(cut, torch.arange(group.size))
        totals += along_axis[positions].view(group.size, -1).sum(1)
    return totals
