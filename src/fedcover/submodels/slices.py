"""Structured parts of a model: the kept units of each group, as really smaller tensors.

A removed unit disappears from every tensor in which it occurs. Tensors that no group cuts are held
by every client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fedcover.submodels.indexing import (
    FlatIndex,
    Index,
    Region,
    add_to_region,
    as_slice,
    flat_index,
    flatten_in_order,
    num_positions,
    take_region,
)
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.unit_groups import cuts_by_tensor, unit_positions
from fedcover.tensors import FlatParams, named_shapes, zeros
from fedcover.types import Cut, Params, UnitGroup


@dataclass(frozen=True, eq=False)
class Slices:
    """Select the units that a client keeps, and cut tensors down to them.

    Attributes:
        groups: The unit groups of the model.
        kept: For each group, the kept units in ascending order.
        draw: The (share, key) of a random draw, so that it can be sent as two numbers.
    """

    groups: tuple[UnitGroup, ...]
    kept: Mapping[str, Tensor]
    draw: tuple[float, int] | None = None

    @cached_property
    def _cuts(self) -> dict[str, list[tuple[UnitGroup, Cut]]]:
        return cuts_by_tensor(self.groups)

    @cached_property
    def _index_cache(self) -> dict[tuple[object, ...], Index]:
        """Map the cuts along an axis to the kept positions; many tensors share them."""
        return {}

    @cached_property
    def _region_cache(self) -> dict[tuple[object, ...], Region]:
        """Map (tensor, shape, device) to its region, so that it moves to a device only once."""
        return {}

    @cached_property
    def _flat_cache(self) -> dict[tuple[object, ...], FlatIndex]:
        return {}

    @cached_property
    def absent(self) -> frozenset[str]:
        """Return the names of the tensors that the client does not hold at all.

        These are tensors without an axis to cut whose unit was removed, such as those of a stage.
        """
        absent = set()
        for group in self.groups:
            units = self.kept[group.name].tolist()
            for cut in (*group.cuts, *group.buffers):
                if cut.axis is None and cut.unit not in units:
                    absent.add(cut.tensor)
        return frozenset(absent)

    def region(self, name: str, shape: Sequence[int], device: torch.device | None = None) -> Region:
        """Return the kept positions along each axis of a tensor.

        Args:
            name: The name of the tensor.
            shape: Its full shape.
            device: The device for index tensors; the CPU by default.

        Returns:
            For each axis a slice if the positions are contiguous, otherwise a tensor.
        """
        key = (name, tuple(shape), device)
        if key not in self._region_cache:
            if device is None:
                region = self._cpu_region(name, shape)
            else:
                region = tuple(
                    index.to(device) if isinstance(index, Tensor) else index
                    for index in self.region(name, shape)
                )
            self._region_cache[key] = region
        return self._region_cache[key]

    def _cpu_region(self, name: str, shape: Sequence[int]) -> Region:
        cuts = self._cuts.get(name, ())
        region = []
        for axis, axis_length in enumerate(shape):
            cuts_of_axis = [(group, cut) for group, cut in cuts if cut.axis == axis]
            region.append(self._kept_index(cuts_of_axis, axis_length))
        return tuple(region)

    def _kept_index(self, cuts: Sequence[tuple[UnitGroup, Cut]], axis_length: int) -> Index:
        if not cuts:
            return slice(0, axis_length)
        key = (axis_length, *((group.name, cut.start, cut.per_unit) for group, cut in cuts))
        if key not in self._index_cache:
            is_kept = torch.ones(axis_length, dtype=torch.bool)
            for group, cut in cuts:
                is_kept[cut.start : cut.start + group.size * cut.per_unit] = False
                is_kept[unit_positions(cut, self.kept[group.name])] = True
            self._index_cache[key] = as_slice(is_kept.nonzero().flatten())
        return self._index_cache[key]

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """Cut tensors down to the kept units.

        Args:
            params: Tensors in full shapes, by name.

        Returns:
            The kept part of each tensor, without the absent tensors.

        Raises:
            InvalidValue: If `params` holds only a device's part, cut by another reduction.
        """
        if isinstance(params, PartialParams):
            return params.extract_for(self)
        if isinstance(params, FlatParams):
            index = self._flat_index(params)
            if index.offsets is None:
                return params
            return FlatParams(params.flat[index.offsets], index.shapes)
        return {
            name: take_region(tensor, self.region(name, tensor.shape, tensor.device))
            for name, tensor in params.items()
            if name not in self.absent
        }

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add to the kept entries of tensors, in place.

        Args:
            target: Tensors in full shapes, by name.
            values: Tensors in the client's shapes; None adds `scale` to every kept entry.
            scale: The factor of the values.
        """
        present = target.keys() - self.absent
        adds_to_all = values is None or values.keys() == present
        if isinstance(target, FlatParams) and present and adds_to_all:
            self._add_into_flat(target, values, scale)
            return
        for name in target if values is None else values:
            if name in self.absent:
                continue
            whole = target[name]
            region = self.region(name, whole.shape, whole.device)
            add_to_region(whole, region, None if values is None else values[name], scale)

    def _add_into_flat(self, target: FlatParams, values: Params | None, scale: float) -> None:
        offsets = self._flat_index(target).offsets
        if values is None:
            summand = target.flat.new_ones(())
        else:
            summand = flatten_in_order(values, target)
        if offsets is None:
            target.flat.add_(summand, alpha=scale)
        else:
            summand = summand.to(target.flat.dtype).expand(len(offsets))
            target.flat.index_add_(0, offsets, summand, alpha=scale)

    def _flat_index(self, params: FlatParams) -> FlatIndex:
        """Return where this part is in flattened parameters."""
        key = (params.flat.device, *params)
        if key not in self._flat_cache:
            regions = {
                name: self.region(name, shape)
                for name, shape in named_shapes(params)
                if name not in self.absent
            }
            self._flat_cache[key] = flat_index(params, regions)
        return self._flat_cache[key]

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks in the full shapes, true at the kept entries.

        Args:
            params: Tensors in full shapes, by name; their values are not read.

        Returns:
            One boolean tensor per tensor.
        """
        counts = zeros(params, torch.uint8)
        self.add_into(counts, None, 1)
        return {name: tensor.bool() for name, tensor in counts.items()}

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Return no masks: removed units are not in the client's tensors."""
        return {}

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of kept entries of each tensor.

        Args:
            params: Tensors in full shapes, by name; their values are not read.

        Returns:
            One count per tensor; 0 for absent tensors.
        """
        sizes = dict.fromkeys(params, 0)
        for name, tensor in params.items():
            if name not in self.absent:
                region = self.region(name, tensor.shape)
                sizes[name] = prod(map(num_positions, region, tensor.shape))
        return sizes
