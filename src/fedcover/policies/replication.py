"""Copies: where no device holds the whole model, what the largest one holds is trained first and then copied.

Until some share of the rounds is over, everybody trains first units, as under `prefix`. Then the model of the largest
device is copied as often as it fits side by side, nothing leading from one copy to another: the classifier adds up
equal copies. From then on every copy is trained by its share of the devices: the whole becomes an ensemble.
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
from fedcover.types import Client, Params, UnitGroup, View

COPY_AFTER = 0.6
"""The share of the rounds after which copies are made."""


def num_copies(view: View) -> int:
    """How many copies of what the largest device holds fit into the model; 1 where copies make no sense.

    Only where groups meet: else sub-networks that share units add up, and the planner's own plans are exact. And only
    where copies meet nowhere but in the classifier: a sum of them in a stream that is never cut would be too large.
    """
    if view.rounds is None or is_exact(view.groups):
        return 1
    if any(group.nested or any(cut.axis is None for cut in group.cuts) for group in view.groups):
        return 1
    if _copies_interfere(view):
        return 1
    return min(group.size // _largest(view, group) for group in view.groups)


def copies_made(view: View) -> bool:
    """Whether copies have been made before this round."""
    return view.rounds is not None and view.round >= _copy_round(view.rounds)


def copy_reductions(view: View) -> list[Slices]:
    """What every device of a cohort trains: first units, and once copies are made those of its own copy."""
    if not copies_made(view):
        return [_part(view, client, 0) for client in view.cohort]
    devices = Counter(client.capacity for client in view.cohort)
    # devices of a capacity take turns, which go on in the next round: a copy must not miss them because they are few
    turns = {capacity: itertools.count(view.round * there) for capacity, there in devices.items()}
    copies = {
        capacity: num_copies(view) if capacity <= max(view.levels) else 1 for capacity in devices
    }
    return [_part(view, c, next(turns[c.capacity]) % copies[c.capacity]) for c in view.cohort]


def copy_transform(view: View) -> Callable[[Params], Params] | None:
    """How tensors change before the view's round: they are copied where that is due, else None."""
    if num_copies(view) < 2 or view.rounds is None or view.round != _copy_round(view.rounds):
        return None
    sizes = {group.name: _largest(view, group) for group in view.groups}
    rooms = [
        Slices(
            view.groups,
            {name: torch.arange(copy * size, (copy + 1) * size) for name, size in sizes.items()},
        )
        for copy in range(num_copies(view))
    ]

    def copied(tensors: Params) -> Params:
        first = rooms[0].extract(tensors)
        once = {name: torch.ones_like(tensor) for name, tensor in first.items()}
        whole, holders = (
            {name: torch.zeros_like(t) for name, t in tensors.items()} for _ in range(2)
        )
        for room in rooms:
            room.add_into(whole, first, 1)
            room.add_into(holders, once, 1)
        # what no group cuts, tensors or rows and columns of them, is there once, and shared
        return {name: whole[name] / holders[name].clamp(min=1) for name in tensors}

    return copied


def _copies_interfere(view: View) -> bool:
    """Whether copies would add up in a layer before the classifier: what follows would not be what one of them says."""
    axes = {
        name: {cut.axis for _, cut in meeting}
        for name, meeting in cuts_by_tensor(view.groups).items()
    }
    return any(
        0 not in axes[name] and name not in view.classifier
        for name in axes.keys() & view.uses.keys()
    )


def _copy_round(rounds: int) -> int:
    return ceil(COPY_AFTER * rounds - 1e-9)


def _largest(view: View, group: UnitGroup) -> int:
    return num_units_kept(group.size, width(view, max(view.levels)))


def _part(view: View, client: Client, copy: int) -> Slices:
    share = width(view, client.capacity)

    def kept(group: UnitGroup) -> Tensor:
        return copy * _largest(view, group) + torch.arange(num_units_kept(group.size, share))

    return Slices(view.groups, {group.name: kept(group) for group in view.groups})
