"""Any module: the groups in which its units can be cut, found by running it once and proved on the spot."""

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.tracing.proof import prove
from fedcover.tracing.reading import read_groups
from fedcover.tracing.watch import watch
from fedcover.types import UnitGroup


def trace(
    module: nn.Module, example: Tensor | tuple[Any, ...], *, whole: Collection[str] = ()
) -> tuple[UnitGroup, ...]:
    """The groups in which a module's units can be cut, each proved: sliced equals masked, forward and backward.

    The module runs on `example` (what it takes: a tensor, or a tuple of arguments) and is left as it was. An operation
    that cannot be cut is refused by name; `whole` names groups that shall not be cut at all.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> for group in trace(net, torch.zeros(3, 1, 4, 4)):
    ...     print(group.name, group.size, group.cuts[-1])
    0 4 Cut(tensor='3.weight', axis=1, start=0, per_unit=4)
    """
    given = tuple(x.cpu() if isinstance(x, Tensor) else x for x in (example if isinstance(example, tuple) else (example,)))
    module = copy.deepcopy(module).cpu()
    notes = watch(module, given)
    groups, owners = read_groups(notes, whole)
    for objection in notes.labels.objections:
        for root in notes.labels.atoms.roots(objection.atoms).tolist():
            if root in owners and owners[root] not in whole:
                raise InvalidValue(
                    f"tracing: {objection.sentence} (group {owners[root]!r}); "
                    f"keep these units whole with whole=({owners[root]!r},)"
                )
    prove(module, given, groups, notes)
    return groups
