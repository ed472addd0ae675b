"""Train a small model first and then copy it, where no device can hold the whole model.

For the first share of the rounds every client trains the first units, as under `prefix`. Then the
model of the largest device is copied as often as it fits into the whole one. No weight leads from
one copy to another, and the classifier adds up equal copies. In the remaining rounds every copy is
trained by its own share of the devices, so the whole model becomes an ensemble.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from fedcover.policies.base import width
from fedcover.policies.planner.multi_group import is_exact
from fedcover.submodels.reductions import Slices
from fedcover.submodels.unit_groups import cuts_by_tensor, num_units_kept
from fedcover.tensors import zeros_like
from fedcover.types import Client, Params, UnitGroup, View

COPY_AFTER = 0.6
"""The share of the rounds after which copies are made."""


def num_copies(view: View) -> int:
    """Return how often the largest device's model fits into the whole one; 1 for no copies.

    Copies are made only if tensors are cut along two axes: otherwise sub-networks that share units
    add up, and the planner's own plans are exact. The copies must also be independent up to the
    classifier, because their sum in a stream that is never cut would be too large.
    """
    if view.rounds is None or is_exact(view.groups):
        return 1
    for group in view.groups:
        if group.nested or any(cut.axis is None for cut in group.cuts):
            return 1
    if _copies_interfere(view):
        return 1
    return min(group.size // _copy_size(view, group) for group in view.groups)


def copies_made(view: View) -> bool:
    """Return whether copies were made before this round."""
    return view.rounds is not None and view.round >= _copy_round(view.rounds)


def copy_reductions(view: View) -> list[Slices]:
    """Return what every client trains: the first units, later the units of its copy."""
    if not copies_made(view):
        return [_units_of_copy(view, client, 0) for client in view.cohort]
    clients_by_capacity = Counter(client.capacity for client in view.cohort)
    # Clients of one capacity take the copies in turn, and the turns continue in the next round.
    # Otherwise a cohort with few of them would always miss the last copies.
    starts = {
        capacity: itertools.count(view.round * clients)
        for capacity, clients in clients_by_capacity.items()
    }
    copies = num_copies(view)
    reductions: list[Slices] = []
    for client in view.cohort:
        turn = next(starts[client.capacity])
        choices = copies if client.capacity <= max(view.levels) else 1
        reductions.append(_units_of_copy(view, client, turn % choices))
    return reductions


def copy_transform(view: View) -> Callable[[Params], Params] | None:
    """Return the function that copies the model before this round; None in most rounds."""
    copies = num_copies(view)
    if copies < 2 or view.rounds is None or view.round != _copy_round(view.rounds):
        return None
    sizes = {group.name: _copy_size(view, group) for group in view.groups}
    slices_by_copy = [
        Slices(view.groups, {name: _copy_range(copy, size) for name, size in sizes.items()})
        for copy in range(copies)
    ]

    def transform(tensors: Params) -> Params:
        first = slices_by_copy[0].extract(tensors)
        ones = {name: torch.ones_like(tensor) for name, tensor in first.items()}
        total, counts = zeros_like(tensors), zeros_like(tensors)
        for slices in slices_by_copy:
            slices.add_into(total, first, 1)
            slices.add_into(counts, ones, 1)
        # tensors, rows and columns that no group cuts belong to all copies: divide their sum
        return {name: total[name] / counts[name].clamp(min=1) for name in tensors}

    return transform


def _copy_range(copy: int, size: int) -> Tensor:
    return torch.arange(copy * size, (copy + 1) * size)


def _copies_interfere(view: View) -> bool:
    """Return whether copies would add up in a layer before the classifier.

    What follows such a layer would receive a sum of copies instead of one of them.
    """
    axes_by_tensor = {
        name: {cut.axis for _, cut in cuts} for name, cuts in cuts_by_tensor(view.groups).items()
    }
    return any(
        0 not in axes_by_tensor[name] and name not in view.classifier
        for name in axes_by_tensor.keys() & view.uses.keys()
    )


def _copy_round(rounds: int) -> int:
    return ceil(COPY_AFTER * rounds - 1e-9)


def _copy_size(view: View, group: UnitGroup) -> int:
    """Return how many units of a group the largest device can hold."""
    return num_units_kept(group.size, width(view, max(view.levels)))


def _units_of_copy(view: View, client: Client, copy: int) -> Slices:
    share = width(view, client.capacity)
    units_by_group: dict[str, Tensor] = {}
    for group in view.groups:
        start = copy * _copy_size(view, group)
        units_by_group[group.name] = start + torch.arange(num_units_kept(group.size, share))
    return Slices(view.groups, units_by_group)
