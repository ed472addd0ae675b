"""Random models to cut: tensors whose axes are laid out from pieces that groups own, and a slow
twin of cutting.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedcover.types import Cut, UnitGroup


@dataclass
class Layout:
    """Groups, tensors they cut, and for every tensor and axis the (group, unit) that owns each
    place, or None.
    """

    groups: tuple[UnitGroup, ...]
    params: dict[str, Tensor]
    owners: dict[str, list[list[tuple[str, int] | None]]]

    def mask(self, kept: dict[str, list[int]]) -> dict[str, Tensor]:
        """Place by place: an entry is held if every place it lies at is free or belongs to a kept
        unit.
        """
        masks = {}
        for name, tensor in self.params.items():
            mask = torch.zeros(tensor.shape, dtype=torch.bool)
            for place in (
                torch.cartesian_prod(*map(torch.arange, tensor.shape))
                .view(-1, tensor.ndim)
                .tolist()
            ):
                owners = [self.owners[name][axis][i] for axis, i in enumerate(place)]
                mask[tuple(place)] = all(
                    owner is None or owner[1] in kept[owner[0]] for owner in owners
                )
            masks[name] = mask
        return masks


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three groups on up to three tensors: concatenations, fused cuts, several places per
    unit, three axes.
    """
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts: list[list[Cut]] = [[] for _ in sizes]
    params, owners = {}, {}
    for number in range(draw(st.integers(1, 3))):
        name, shape = f"t{number}", []
        owners[name] = []
        for axis in range(draw(st.integers(1, 3))):
            place: list[tuple[str, int] | None] = []
            for piece in draw(st.lists(st.integers(-1, len(sizes) - 1), min_size=1, max_size=3)):
                if piece < 0:
                    place += [None] * draw(st.integers(1, 2))
                    continue
                per_unit = draw(st.integers(1, 2))
                cuts[piece].append(Cut(name, axis, len(place), per_unit))
                place += [
                    (f"g{piece}", unit) for unit in range(sizes[piece]) for _ in range(per_unit)
                ]
            owners[name].append(place)
            shape.append(len(place))
        params[name] = torch.randn(
            shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
        )
    groups = tuple(UnitGroup(f"g{i}", size, tuple(cuts[i])) for i, size in enumerate(sizes))
    return Layout(groups, params, owners)


@st.composite
def kept_units(draw: st.DrawFn, groups: tuple[UnitGroup, ...]) -> dict[str, list[int]]:
    """For every group a sorted set of units that is not empty."""
    return {
        group.name: sorted(
            draw(st.sets(st.integers(0, group.size - 1), min_size=1, max_size=group.size))
        )
        for group in groups
    }
