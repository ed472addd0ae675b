"""What recipes share: what a client holds, and passes that leave no trace in its norm statistics."""

import torch

from fedcover.models.norms import statistics_key
from fedcover.submodels.reductions import Slices
from fedcover.types import Assignment, Params


def client_norm_statistics(assignment: Assignment) -> Params:
    """Copies of the client's running norm statistics, if those are tracked.

    A forward pass that is given them beside the parameters writes into the copies and not into the client's module.
    """
    key = statistics_key(assignment.task.norm, assignment.client.capacity)
    known = assignment.state.statistics.get(key or "", {})
    return {name: tensor.clone() for name, tensor in assignment.reduction.extract(known).items()}


def client_units(assignment: Assignment) -> Params:
    """The units of every group that the client holds: all of them where its part is not cut along units."""
    reduction, groups = assignment.reduction, assignment.task.model.groups
    if isinstance(reduction, Slices):
        return {group.name: reduction.kept[group.name] for group in groups}
    return {group.name: torch.arange(group.size) for group in groups}
