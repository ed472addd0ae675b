"""Candidates for fleets in which no device holds the whole model: who trains what, and how a model
is changed midway.

Every group of units is seen as its four quarters; a device of half size holds two of them, of
quarter size one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcover.submodels.reductions import Slices
from fedcover.submodels.unit_groups import cuts_by_tensor, num_units_kept, unit_positions
from fedcover.types import Client, Params, State, UnitGroup, View


def star(view: View) -> list[Slices]:
    """Everybody the first quarter; half-size devices by turns the second or the third as well."""
    return [_quarters(view, client, (0, 1 + client.slot % 2)) for client in view.cohort]


def twins(view: View) -> list[Slices]:
    """The first half of the model for every other device, the second half for the rest."""
    return [
        _quarters(view, client, (0, 1) if client.slot % 2 == 0 else (2, 3))
        for client in view.cohort
    ]


def _quarters(view: View, client: Client, which: Sequence[int]) -> Slices:
    """As many of the named quarters, in their order, as a device holds."""

    def kept(group: UnitGroup) -> Tensor:
        order = torch.cat([_quarter(group, number) for number in which])
        return order[: num_units_kept(group.size, client.capacity)].sort().values

    return Slices(view.groups, {group.name: kept(group) for group in view.groups})


def _quarter(group: UnitGroup, number: int) -> Tensor:
    size = group.size // 4
    return torch.arange(number * size, (number + 1) * size)


def copy_first_half(groups: Sequence[UnitGroup], state: State) -> State:
    """The first half of a model copied into its second half; nothing leads from one to
    the other.
    """
    first, second = (
        Slices(
            groups, {g.name: torch.cat([_quarter(g, number) for number in half]) for g in groups}
        )
        for half in ((0, 1), (2, 3))
    )
    copy = first.extract(state.params)
    shared = {
        name: tensor for name, tensor in state.params.items() if copy[name].shape == tensor.shape
    }
    params: Params = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
    for half in (first, second):
        half.add_into(params, copy, 1.0)
    return replace(state, params={**params, **shared})


def open_third_quarter(groups: Sequence[UnitGroup], state: State) -> State:
    """A model in which nothing leads out of the third quarter, so that it may be trained without
    harm to the rest.
    """
    params = dict(state.params)
    for name, meeting in cuts_by_tensor(groups).items():
        for group, cut in meeting:
            if name in params and cut.axis == 1:
                columns = unit_positions(cut, _quarter(group, 2)).to(params[name].device)
                params[name] = params[name].index_fill(1, columns, 0.0)
    return replace(state, params=params)
