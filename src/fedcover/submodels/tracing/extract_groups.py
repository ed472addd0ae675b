"""From coupled indices to unit groups: which units there are and where they lie in each tensor."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain, count

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.submodels.tracing.tracer import TraceRecord
from fedcover.types import Count, Cut, UnitGroup

TensorAxis = tuple[str, int]
"""A tensor and one of its axes; for a number that counts units, its name and -1."""

NO_AXIS = -1


def extract_unit_groups(
    notes: TraceRecord, whole: Collection[str]
) -> tuple[tuple[UnitGroup, ...], dict[int, str]]:
    """The groups that may be cut, and the name of the group to which each class of atoms belongs.

    Units form one group if they appear the same number of times in the same places.
    """
    units: dict[int, dict[TensorAxis, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, atoms in _axes_and_sizes(notes).items():
        for index, root in enumerate(notes.labels.atoms.roots(atoms).tolist()):
            if root:
                units[root][place].append(index)
    alike: dict[tuple[tuple[TensorAxis, int], ...], list[int]] = defaultdict(list)
    for root, found in units.items():
        alike[tuple((place, len(indices)) for place, indices in found.items())].append(root)
    groups: list[UnitGroup] = []
    names: dict[int, str] = {}
    for roots in alike.values():
        tensors = [place for place in units[roots[0]] if place[1] != NO_AXIS]
        if len(roots) < 2 or not any(tensor in notes.parameters for tensor, _ in tensors):
            continue  # one unit cannot be cut, and buffers and numbers alone are no units
        roots.sort(key=lambda root: units[root][tensors[0]][0])
        name = _name(tensors[0][0], set(names.values()))
        names.update(dict.fromkeys(roots, name))
        if not is_kept_whole(name, whole):
            groups.append(_group(name, [units[root] for root in roots]))
    for path in whole:
        if not any(is_kept_whole(name, [path]) for name in names.values()):
            raise unknown("whole", path, dict.fromkeys(names.values()))
    return tuple(groups), names


def whole_hint(groups: Collection[str]) -> str:
    """How to say that the units of some groups are not to be cut.

    >>> whole_hint(["r"])
    "fc.Model(module, fc.trace(module, example, whole=('r',)))"
    """
    return f"fc.Model(module, fc.trace(module, example, whole={tuple(groups)!r}))"


def is_kept_whole(name: str, whole: Collection[str]) -> bool:
    """Whether a group is named, or lies in a part of the module that is named.

    >>> is_kept_whole("blocks.0.mlp", ["blocks.0"]), is_kept_whole("blocks.01", ["blocks.0"])
    (True, False)
    """
    return any(f"{name}.".startswith(f"{path}.") for path in whole)


def _axes_and_sizes(notes: TraceRecord) -> Mapping[TensorAxis, Tensor]:
    """All cuttable axes in the order in which the module uses them, then the numbers."""
    use_order = {name: i for i, name in enumerate(notes.labels.use_order)}
    axes = sorted(
        (place for place in notes.labels.axes if place[0] in use_order),
        key=lambda place: (use_order[place[0]], place[1]),
    )
    tracked_sizes = {
        (name, NO_AXIS): number.counted_atoms for name, number in notes.tracked_sizes.items()
    }
    return {place: notes.labels.axes[place] for place in axes} | tracked_sizes


def _name(tensor: str, taken: set[str]) -> str:
    """The path of the layer that makes a group's units."""
    path = tensor.rpartition(".")[0].partition(".parametrizations.")[0] or tensor
    return next(
        name for name in chain([path], (f"{path}.{i}" for i in count(2))) if name not in taken
    )


def _group(name: str, units: list[dict[TensorAxis, list[int]]]) -> UnitGroup:
    cuts: list[Cut] = []
    counts: list[Count] = []
    for place in units[0]:
        tensor, axis = place
        where = torch.tensor([unit[place] for unit in units])
        if axis == NO_AXIS:
            counts.append(Count(tensor, where.shape[1]))
        else:
            cuts += _cuts(name, tensor, axis, where)
    return UnitGroup(name, len(units), tuple(cuts), counts=tuple(counts))


def _cuts(group: str, tensor: str, axis: int, where: Tensor) -> list[Cut]:
    """The indices of units along an axis (unit by unit) as evenly laid runs.

    >>> [(cut.start, cut.per_unit) for cut in _cuts("qkv", "qkv.weight", 0, torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]))]
    [(0, 2), (4, 2)]
    """
    units, owned = where.shape
    for run in (run for run in range(owned, 0, -1) if owned % run == 0):
        blocks = where.view(units, -1, run)
        starts = blocks[0, :, 0]
        even = starts[None, :, None] + torch.arange(units)[:, None, None] * run + torch.arange(run)
        if torch.equal(blocks, even):
            return [Cut(tensor, axis, start, run) for start in starts.tolist()]
    raise InvalidValue(
        f"tracing: the units of group {group!r} lie in another order along axis {axis} of {tensor!r} than elsewhere, "
        f"so they cannot be cut evenly; keep them whole: {whole_hint([group])}"
    )
