"""Which slices of which tensors are cut together, and where a group's kept units lie in each tensor."""

import json
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from math import floor
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.types import Count, Cut, UnitGroup


def num_units_kept(size: int, share: float) -> int:
    """How many of a group's units a width share holds: never more than the share, but at least one.

    >>> num_units_kept(200, 0.75), num_units_kept(100, 0.29), num_units_kept(10, 0.01)
    (150, 29, 1)
    """
    if not 0 <= share <= 1:
        raise InvalidValue(f"share must be in 0..1; got {share}")
    return max(1, floor(share * size + 1e-9))  # 0.29 * 100 is 28.999999999999996


def unit_positions(cut: Cut, units: Tensor) -> Tensor:
    """The places along the cut's axis that the given units own.

    >>> unit_positions(Cut("head.weight", axis=1, per_unit=4), torch.tensor([0, 2])).tolist()
    [0, 1, 2, 3, 8, 9, 10, 11]
    """
    first = cut.start + units * cut.per_unit
    return (first[:, None] + torch.arange(cut.per_unit, device=units.device)).flatten()


def cuts_by_tensor(groups: Sequence[UnitGroup]) -> dict[str, list[tuple[UnitGroup, Cut]]]:
    """For each tensor that any group cuts, the groups and cuts that meet in it."""
    meeting: dict[str, list[tuple[UnitGroup, Cut]]] = defaultdict(list)
    for group in groups:
        for cut in (*group.cuts, *group.buffers):
            meeting[cut.tensor].append((group, cut))
    return dict(meeting)


def separate_buffers(groups: Sequence[UnitGroup], params: Container[str]) -> tuple[UnitGroup, ...]:
    """The groups with the cuts of parameters in `cuts`, and those of what is none (norm statistics) in `buffers`.

    >>> whole = UnitGroup("conv", 2, (Cut("conv.weight", 0), Cut("norm.running_mean", 0)))
    >>> (group,) = separate_buffers([whole], ["conv.weight"])
    >>> [cut.tensor for cut in group.cuts], [cut.tensor for cut in group.buffers]
    (['conv.weight'], ['norm.running_mean'])
    """

    def apart(group: UnitGroup) -> UnitGroup:
        every = (*group.cuts, *group.buffers)
        cuts = tuple(cut for cut in every if cut.tensor in params)
        return replace(
            group, cuts=cuts, buffers=tuple(cut for cut in every if cut.tensor not in params)
        )

    return tuple(map(apart, groups))


def groups_to_json(groups: Sequence[UnitGroup]) -> str:
    """Groups as text, for a device that cannot find them itself.

    >>> groups = (UnitGroup("hidden", 4, (Cut("w", 0), Cut("v", 1)), counts=(Count("heads"),)),)
    >>> groups_from_json(groups_to_json(groups)) == groups
    True
    """
    return json.dumps([asdict(group) for group in groups], separators=(",", ":"))


def groups_from_json(text: str) -> tuple[UnitGroup, ...]:
    """The groups that `groups_to_json` wrote."""

    def group_of(fields: dict[str, Any]) -> UnitGroup:
        cuts, buffers = (tuple(Cut(**cut) for cut in fields[kind]) for kind in ("cuts", "buffers"))
        counts = tuple(Count(**count) for count in fields["counts"])
        return UnitGroup(fields["name"], fields["size"], cuts, fields["nested"], counts, buffers)

    return tuple(map(group_of, json.loads(text)))


def check_groups(groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]) -> None:
    """Refuse groups that do not fit the tensors they name, or that claim the same slice twice."""
    claimed: dict[tuple[str, int], Tensor] = {}
    names = [group.name for group in groups]
    for group in groups:
        if group.size < 1:
            raise InvalidValue(f"group {group.name!r}: size must be at least 1; got {group.size}")
        if names.count(group.name) > 1:
            raise InvalidValue(f"group {group.name!r}: another group has the same name")
        for cut in (*group.cuts, *group.buffers):
            where = f"group {group.name!r}, cut of {cut.tensor!r}"
            if cut.tensor not in tensors:
                raise InvalidValue(f"{where}: the model has no such tensor")
            shape = tensors[cut.tensor].shape
            if cut.axis is None:
                if cut.unit not in range(group.size):
                    raise InvalidValue(
                        f"{where}: unit must be in 0..{group.size - 1}; got {cut.unit}"
                    )
                continue
            if not 0 <= cut.axis < len(shape):
                raise InvalidValue(f"{where}: axis must be in 0..{len(shape) - 1}; got {cut.axis}")
            end = cut.start + group.size * cut.per_unit
            if cut.start < 0 or cut.per_unit < 1 or end > shape[cut.axis]:
                raise InvalidValue(
                    f"{where}: units end at {end} but axis {cut.axis} has length {shape[cut.axis]}"
                )
            taken = claimed.setdefault(
                (cut.tensor, cut.axis), torch.zeros(shape[cut.axis], dtype=torch.bool)
            )
            if taken[cut.start : end].any():
                raise InvalidValue(
                    f"{where}: part of axis {cut.axis} belongs to another group already"
                )
            taken[cut.start : end] = True
