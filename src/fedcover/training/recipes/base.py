"""Helpers that several recipes share."""

import torch

from fedcover.models.norms import statistics_key
from fedcover.submodels.reductions import Slices
from fedcover.tensors import clone
from fedcover.types import Assignment, Params


def client_norm_statistics(assignment: Assignment) -> Params:
    """Copy the client's running norm statistics, if they are tracked.

    Pass the copies to a forward pass together with the parameters. The pass then updates the
    copies, and leaves the statistics in the client's module alone.
    """
    key = statistics_key(assignment.task.norm, assignment.client.capacity)
    statistics = assignment.state.statistics.get(key or "", {})
    client_statistics = assignment.reduction.extract(statistics)
    return clone(client_statistics)


def client_units(assignment: Assignment) -> Params:
    """Return the units of each group that the client holds; all, if its part is a mask."""
    reduction, groups = assignment.reduction, assignment.task.model.groups
    if isinstance(reduction, Slices):
        return {group.name: reduction.kept[group.name] for group in groups}
    return {group.name: torch.arange(group.size) for group in groups}
