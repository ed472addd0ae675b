"""Coverage and energy of given parts, computed for all parts at once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedcover.submodels.reductions import Slices
from fedcover.submodels.unit_groups import cuts_by_tensor
from fedcover.types import Params, Reduction, UnitGroup


def coverage_upper_bound(
    params: Mapping[str, Tensor], reductions: Sequence[Reduction]
) -> tuple[int, str]:
    """Return the coverage that no arrangement of parts of these sizes exceeds.

    The second value is the tensor that limits it.
    """
    sizes_by_reduction = [reduction.sizes(params) for reduction in reductions]
    bounds: dict[str, int] = {}
    for name, tensor in params.items():
        num_held = sum(sizes[name] for sizes in sizes_by_reduction)
        bounds[name] = num_held // max(1, tensor.numel())
    scarce = min(bounds, key=lambda name: bounds[name])
    return bounds[scarce], scarce


def count_and_energy(
    groups: Sequence[UnitGroup], squares: Params, parts: Sequence[Slices]
) -> tuple[Params, np.ndarray]:
    """Return how many parts hold each entry of each tensor, and the energy that every part keeps.

    `squares` come from `energy_on_cut_axes`. This is the fast alternative to counting part by part:
    a weight is held if both of its units are, so the counts are products.
    """
    membership = membership_by_axis(groups, squares, parts)
    counts: Params = {}
    kept_N = np.zeros(len(parts))
    for name, tensor in squares.items():
        present_N, by_axis = membership[name]
        letters = "abcdefgh"[: tensor.ndim]
        factors = [
            torch.ones(len(parts), tensor.shape[axis]) if held is None else held
            for axis, held in enumerate(by_axis)
        ]
        rule = ",".join(["n", *(f"n{letter}" for letter in letters)])
        counts[name] = torch.einsum(f"{rule}->{letters}", present_N, *factors).round().int()
        doubles = [factor.double() for factor in (present_N, *factors)]
        kept_N += torch.einsum(f"{rule},{letters}->n", *doubles, tensor).numpy()
    return counts, kept_N


def membership_by_axis(
    groups: Sequence[UnitGroup], params: Mapping[str, Tensor], parts: Sequence[Slices]
) -> dict[str, tuple[Tensor, list[Tensor | None]]]:
    """Return which parts hold each tensor, and for each cut axis which indices each part holds.

    Held is 1 and not held is 0; an axis that is not cut has None.
    """
    units_held = {group.name: torch.zeros(len(parts), group.size) for group in groups}
    for i, part in enumerate(parts):
        for group in groups:
            units_held[group.name][i, part.kept[group.name]] = 1
    membership: dict[str, tuple[Tensor, list[Tensor | None]]] = {}
    cuts_of = cuts_by_tensor(groups)
    for name, tensor in params.items():
        present_N = torch.ones(len(parts))
        by_axis: list[Tensor | None] = [None] * tensor.ndim
        for group, cut in cuts_of.get(name, ()):
            if cut.axis is None:
                present_N = present_N * units_held[group.name][:, cut.unit]
                continue
            indices_held = by_axis[cut.axis]
            if indices_held is None:
                indices_held = torch.ones(len(parts), tensor.shape[cut.axis])
            by_unit = units_held[group.name].repeat_interleave(cut.per_unit, 1)
            indices_held[:, cut.start : cut.start + by_unit.shape[1]] = by_unit
            by_axis[cut.axis] = indices_held
        membership[name] = (present_N, by_axis)
    return membership


def energy_on_cut_axes(groups: Sequence[UnitGroup], params: Mapping[str, Tensor]) -> Params:
    """Return the squares of the parameters, summed along the axes that no group cuts.

    They are sufficient for counting, and small.
    """
    cuts_of = cuts_by_tensor(groups)
    energies: Params = {}
    for name, tensor in params.items():
        cut_axes = {cut.axis for _, cut in cuts_of.get(name, ())}
        uncut_axes = [axis for axis in range(tensor.ndim) if axis not in cut_axes]
        squares = tensor.square()
        if uncut_axes:
            energies[name] = squares.sum(uncut_axes, keepdim=True, dtype=torch.float64)
        else:
            energies[name] = squares.double()
    return energies
