"""Locate the units of groups in tensors, and check that groups fit a model."""

import json
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from math import floor
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.types import Count, Cut, UnitGroup


def num_units_kept(size: int, share: float) -> int:
    """Return how many of a group's units fit a width share: at least one.

    >>> num_units_kept(200, 0.75), num_units_kept(100, 0.29), num_units_kept(10, 0.01)
    (150, 29, 1)
    """
    if not 0 <= share <= 1:
        raise InvalidValue(f"share must be in 0..1; got {share}")
    return max(1, floor(share * size + 1e-9))  # 0.29 * 100 is 28.999999999999996


def unit_positions(cut: Cut, units: Tensor) -> Tensor:
    """Return the positions along the axis of a cut that belong to the given units.

    >>> unit_positions(Cut("head.weight", axis=1, per_unit=4), torch.tensor([0, 2])).tolist()
    [0, 1, 2, 3, 8, 9, 10, 11]
    """
    first_positions = cut.start + units * cut.per_unit
    return (first_positions[:, None] + torch.arange(cut.per_unit, device=units.device)).flatten()


def cuts_by_tensor(groups: Sequence[UnitGroup]) -> dict[str, list[tuple[UnitGroup, Cut]]]:
    """Map the name of each tensor that is cut to the groups and cuts that cut it."""
    cuts: dict[str, list[tuple[UnitGroup, Cut]]] = defaultdict(list)
    for group in groups:
        for cut in (*group.cuts, *group.buffers):
            cuts[cut.tensor].append((group, cut))
    return dict(cuts)


def separate_buffers(groups: Sequence[UnitGroup], params: Container[str]) -> tuple[UnitGroup, ...]:
    """Sort the cuts of each group into `cuts` of parameters and `buffers` (norm statistics).

    >>> group = UnitGroup("conv", 2, (Cut("conv.weight", 0), Cut("norm.running_mean", 0)))
    >>> (group,) = separate_buffers([group], ["conv.weight"])
    >>> [cut.tensor for cut in group.cuts], [cut.tensor for cut in group.buffers]
    (['conv.weight'], ['norm.running_mean'])
    """
    separated = []
    for group in groups:
        all_cuts = (*group.cuts, *group.buffers)
        cuts = tuple(cut for cut in all_cuts if cut.tensor in params)
        buffers = tuple(cut for cut in all_cuts if cut.tensor not in params)
        separated.append(replace(group, cuts=cuts, buffers=buffers))
    return tuple(separated)


def groups_to_json(groups: Sequence[UnitGroup]) -> str:
    """Serialize groups for a device that cannot find them itself.

    >>> groups = (UnitGroup("hidden", 4, (Cut("w", 0), Cut("v", 1)), counts=(Count("heads"),)),)
    >>> groups_from_json(groups_to_json(groups)) == groups
    True
    """
    return json.dumps([asdict(group) for group in groups], separators=(",", ":"))


def groups_from_json(text: str) -> tuple[UnitGroup, ...]:
    """Read groups that `groups_to_json` wrote."""
    return tuple(_group_from_fields(fields) for fields in json.loads(text))


def _group_from_fields(fields: dict[str, Any]) -> UnitGroup:
    return UnitGroup(
        name=fields["name"],
        size=fields["size"],
        cuts=tuple(Cut(**cut) for cut in fields["cuts"]),
        nested=fields["nested"],
        counts=tuple(Count(**count) for count in fields["counts"]),
        buffers=tuple(Cut(**cut) for cut in fields["buffers"]),
    )


def check_groups(groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]) -> None:
    """Raise `InvalidValue` for groups that do not fit the tensors or claim a slice twice."""
    occurrences = Counter(group.name for group in groups)
    claims: dict[tuple[str, int], Tensor] = {}
    for group in groups:
        if group.size < 1:
            raise InvalidValue(f"group {group.name!r}: size must be at least 1; got {group.size}")
        if occurrences[group.name] > 1:
            raise InvalidValue(f"group {group.name!r}: another group has the same name")
        for cut in (*group.cuts, *group.buffers):
            _check_cut(group, cut, tensors, claims)


def _check_cut(
    group: UnitGroup,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    claims: dict[tuple[str, int], Tensor],
) -> None:
    """Check one cut, and mark its positions in `claims`, a mask per tensor and axis."""
    where = f"group {group.name!r}, cut of {cut.tensor!r}"
    if cut.tensor not in tensors:
        raise InvalidValue(f"{where}: the model has no such tensor")
    shape = tensors[cut.tensor].shape
    if cut.axis is None:
        if cut.unit not in range(group.size):
            raise InvalidValue(f"{where}: unit must be in 0..{group.size - 1}; got {cut.unit}")
        return
    if not 0 <= cut.axis < len(shape):
        raise InvalidValue(f"{where}: axis must be in 0..{len(shape) - 1}; got {cut.axis}")
    axis_length = shape[cut.axis]
    end = cut.start + group.size * cut.per_unit
    if cut.start < 0 or cut.per_unit < 1 or end > axis_length:
        raise InvalidValue(
            f"{where}: units end at {end} but axis {cut.axis} has length {axis_length}"
        )
    is_claimed = claims.setdefault(
        (cut.tensor, cut.axis), torch.zeros(axis_length, dtype=torch.bool)
    )
    if is_claimed[cut.start : end].any():
        raise InvalidValue(f"{where}: part of axis {cut.axis} belongs to another group already")
    is_claimed[cut.start : end] = True
