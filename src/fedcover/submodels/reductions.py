"""Choose a client's part of the model: structured `Slices` or unstructured `Masks`."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil, prod

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.rng import generator
from fedcover.submodels.masks import Masks, TrainedSubset
from fedcover.submodels.slices import Slices
from fedcover.submodels.unit_groups import num_units_kept
from fedcover.types import Reduction, UnitGroup

__all__ = [
    "Masks",
    "Slices",
    "TrainedSubset",
    "circular_range",
    "distinct",
    "drawn",
    "parameters_at_width",
    "random_slices",
    "width_for_budget",
    "window_slices",
    "windows",
    "without_masks",
]


def distinct(reductions: Iterable[Reduction]) -> list[tuple[Reduction, int]]:
    """Return each reduction object once, with its number of occurrences.

    Clients of one capacity often share one object.

    >>> whole = Masks({})
    >>> [number for _, number in distinct([whole, Masks({}), whole])]
    [2, 1]
    """
    reductions = list(reductions)
    occurrences = Counter(map(id, reductions))
    by_id = {id(reduction): reduction for reduction in reductions}
    return [(reduction, occurrences[key]) for key, reduction in by_id.items()]


def without_masks(reduction: Reduction) -> Reduction:
    """Return the part of the model for which a client has tensors, ignoring masks."""
    return reduction if isinstance(reduction, Slices) else Masks({})


def window_slices(
    groups: tuple[UnitGroup, ...], share: float, start: Mapping[str, int] | None = None
) -> Slices:
    """Keep a window of neighbouring units of each group.

    A window that reaches the last unit continues with the first one. Also available as `windows`.

    Args:
        groups: The unit groups of the model.
        share: The share of each group's units to keep, in 0..1; at least one unit is kept.
        start: The first unit of the window, by group; 0 by default. Nested groups start at 0.

    Returns:
        The kept units.

    Raises:
        InvalidValue: If `share` is not in 0..1.

    >>> g = (UnitGroup("hidden", 4, ()),)
    >>> window_slices(g, 0.5, {"hidden": 3}).kept["hidden"].tolist()
    [0, 3]
    """
    units_by_group = {}
    for group in groups:
        first = 0 if start is None or group.nested else start.get(group.name, 0)
        num_units = num_units_kept(group.size, share)
        units_by_group[group.name] = circular_range(first % group.size, num_units, group.size)
    return Slices(groups, units_by_group)


def circular_range(first: int, length: int, size: int) -> Tensor:
    """Return `length` consecutive units modulo `size`, in ascending order.

    >>> circular_range(3, 2, 4).tolist()
    [0, 3]
    """
    num_wrapped = first + length - size
    if num_wrapped <= 0:
        return torch.arange(first, first + length)
    return torch.cat([torch.arange(num_wrapped), torch.arange(first, size)])


def random_slices(groups: tuple[UnitGroup, ...], share: float, key: int) -> Slices:
    """Keep a uniformly random set of units of each group.

    Nested groups keep their leading units. Also available as `drawn`.

    Args:
        groups: The unit groups of the model.
        share: The share of each group's units to keep, in 0..1; at least one unit is kept.
        key: The seed of the draw; equal keys give equal units.

    Returns:
        The kept units.

    Raises:
        InvalidValue: If `share` is not in 0..1 or `key` not in 0..2**64 - 1.

    >>> g = (UnitGroup("hidden", 100, ()),)
    >>> first, second = (random_slices(g, 0.25, key=7).kept["hidden"] for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    if not 0 <= key < 2**64:
        raise InvalidValue(f"key must be in 0..2**64 - 1; got {key}")
    units_by_group = {}
    for group in groups:
        num_units = num_units_kept(group.size, share)
        if group.nested:
            units_by_group[group.name] = torch.arange(num_units)
        else:
            order = torch.randperm(group.size, generator=generator(key, "units", group.name))
            units_by_group[group.name] = order[:num_units].sort().values
    return Slices(groups, units_by_group, draw=(share, key))


windows = window_slices
drawn = random_slices


def parameters_at_width(
    groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], share: float
) -> int:
    """Count the parameters of a model in which every group keeps `share` of its units."""
    removed_lengths: Counter[tuple[str, int]] = Counter()
    for group in groups:
        num_removed = group.size - num_units_kept(group.size, share)
        for cut in group.cuts:
            if cut.axis is not None:
                removed_lengths[cut.tensor, cut.axis] += num_removed * cut.per_unit
    absent = window_slices(groups, share).absent
    return sum(
        prod(length - removed_lengths[name, axis] for axis, length in enumerate(tensor.shape))
        for name, tensor in params.items()
        if name not in absent
    )


def width_for_budget(
    groups: tuple[UnitGroup, ...], params: Mapping[str, Tensor], budget: float
) -> float:
    """Find the largest common width share whose sub-model fits a budget.

    Args:
        groups: The unit groups of the model.
        params: The parameters of the model; only their shapes are read.
        budget: The largest allowed share of the parameters.

    Returns:
        The share of the units that every group keeps.

    Raises:
        InvalidValue: If even one unit per group exceeds the budget.

    >>> from fedcover.types import Cut
    >>> g = (UnitGroup("hidden", 200, (Cut("w", 0), Cut("v", 1))),)
    >>> width_for_budget(g, {"w": torch.empty(200, 784), "v": torch.empty(10, 200)}, 0.5)
    0.5
    """
    num_parameters = parameters_at_width(groups, params, 1.0)
    shares = {1.0}
    for group in groups:
        shares.update(units / group.size for units in range(1, group.size + 1))
    ascending_shares = sorted(shares)
    num_fitting = bisect_right(
        ascending_shares,
        budget * num_parameters + 1e-6,
        key=lambda share: parameters_at_width(groups, params, share),
    )
    if num_fitting == 0:
        least = parameters_at_width(groups, params, 0) / num_parameters
        least = ceil(10_000 * least) / 10_000  # rounded up, so that following the advice works
        raise InvalidValue(
            f"capacity must be at least {least:.4f} for this model (one unit per group); "
            f"got {budget:g}"
        )
    return ascending_shares[num_fitting - 1]
