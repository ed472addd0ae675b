"""Turn coupled indices into unit groups with their cuts along the axes of tensors."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain, count

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.submodels.tracing.tracer import TraceRecord
from fedcover.types import Count, Cut, UnitGroup

TensorAxis = tuple[str, int]
"""The name of a tensor and one of its axes. A number that counts units has the axis `NO_AXIS`."""

NO_AXIS = -1

UnitIndices = dict[TensorAxis, list[int]]
"""The indices along each axis that belong to one unit."""


def extract_unit_groups(
    record: TraceRecord, whole: Collection[str]
) -> tuple[tuple[UnitGroup, ...], dict[int, str]]:
    """Return the groups that may be cut, and the group name of each class of coupled indices.

    Units form one group if they have equally many indices along the same axes.
    """
    units: dict[int, UnitIndices] = defaultdict(lambda: defaultdict(list))
    for axis, atoms in _axes_and_sizes(record).items():
        for index, root in enumerate(record.labels.atoms.roots(atoms).tolist()):
            if root:
                units[root][axis].append(index)
    roots_by_shape: dict[tuple[tuple[TensorAxis, int], ...], list[int]] = defaultdict(list)
    for root, indices_by_axis in units.items():
        shape = tuple((axis, len(indices)) for axis, indices in indices_by_axis.items())
        roots_by_shape[shape].append(root)
    groups: list[UnitGroup] = []
    names: dict[int, str] = {}
    for roots in roots_by_shape.values():
        tensor_axes = [axis for axis in units[roots[0]] if axis[1] != NO_AXIS]
        has_parameter = any(tensor in record.parameters for tensor, _ in tensor_axes)
        if len(roots) < 2 or not has_parameter:
            continue  # a single unit cannot be cut; buffers and numbers alone have no units
        roots.sort(key=lambda root: units[root][tensor_axes[0]][0])
        name = _group_name(tensor_axes[0][0], set(names.values()))
        names.update(dict.fromkeys(roots, name))
        if not is_kept_whole(name, whole):
            groups.append(_group(name, [units[root] for root in roots]))
    for path in whole:
        if not any(is_kept_whole(name, [path]) for name in names.values()):
            raise unknown("whole", path, dict.fromkeys(names.values()))
    return tuple(groups), names


def whole_hint(groups: Collection[str]) -> str:
    """Return the code that keeps the units of some groups whole.

    >>> whole_hint(["r"])
    "fc.Model(module, fc.trace(module, example, whole=('r',)))"
    """
    return f"fc.Model(module, fc.trace(module, example, whole={tuple(groups)!r}))"


def is_kept_whole(name: str, whole: Collection[str]) -> bool:
    """Return whether a group, or a part of the module that contains it, is named in `whole`.

    >>> is_kept_whole("blocks.0.mlp", ["blocks.0"]), is_kept_whole("blocks.01", ["blocks.0"])
    (True, False)
    """
    return any(f"{name}.".startswith(f"{path}.") for path in whole)


def _axes_and_sizes(record: TraceRecord) -> Mapping[TensorAxis, Tensor]:
    """Return the atoms of all axes, in the order of their use, and then of the numbers."""
    labels = record.labels
    use_order = {name: i for i, name in enumerate(labels.use_order)}
    axes = [axis for axis in labels.axes if axis[0] in use_order]
    axes.sort(key=lambda axis: (use_order[axis[0]], axis[1]))
    atoms_by_axis = {axis: labels.axes[axis] for axis in axes}
    for name, size in record.tracked_sizes.items():
        atoms_by_axis[name, NO_AXIS] = size.counted_atoms
    return atoms_by_axis


def _group_name(tensor: str, used_names: set[str]) -> str:
    """Return the path of the layer that computes a group's units, numbered if already used."""
    path = tensor.rpartition(".")[0].partition(".parametrizations.")[0] or tensor
    candidates = chain([path], (f"{path}.{i}" for i in count(2)))
    return next(name for name in candidates if name not in used_names)


def _group(name: str, units: list[UnitIndices]) -> UnitGroup:
    cuts: list[Cut] = []
    counts: list[Count] = []
    for tensor, axis in units[0]:
        indices = torch.tensor([unit[tensor, axis] for unit in units])
        if axis == NO_AXIS:
            counts.append(Count(tensor, indices.shape[1]))
        else:
            cuts += _cuts(name, tensor, axis, indices)
    return UnitGroup(name, len(units), tuple(cuts), counts=tuple(counts))


def _cuts(group: str, tensor: str, axis: int, indices: Tensor) -> list[Cut]:
    """Describe the units' indices along an axis as runs of equal length, one unit after another.

    `indices` has a row for every unit.

    >>> indices = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]])
    >>> [(cut.start, cut.per_unit) for cut in _cuts("qkv", "qkv.weight", 0, indices)]
    [(0, 2), (4, 2)]
    """
    units, per_unit = indices.shape
    for run in range(per_unit, 0, -1):
        if per_unit % run:
            continue
        blocks = indices.view(units, -1, run)
        starts = blocks[0, :, 0]
        offsets = torch.arange(units)[:, None, None] * run + torch.arange(run)
        if torch.equal(blocks, starts[None, :, None] + offsets):
            return [Cut(tensor, axis, start, run) for start in starts.tolist()]
    raise InvalidValue(
        f"tracing: the units of group {group!r} lie in another order along axis {axis} of "
        f"{tensor!r} than elsewhere, so they cannot be cut evenly; "
        f"keep them whole: {whole_hint([group])}"
    )
