"""Any module: the groups in which its units can be cut, found by running it once and proved on the spot."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.tracing.proof import prove
from fedcover.tracing.reading import as_whole, is_whole, read_groups
from fedcover.tracing.watch import Notes, watch
from fedcover.types import UnitGroup


def trace(
    module: nn.Module, example: Tensor | tuple[Any, ...], *, whole: Collection[str] = ()
) -> tuple[UnitGroup, ...]:
    """The groups in which a module's units can be cut, each proved: sliced equals masked, forward and backward.

    The module runs on `example` (what it takes: a tensor, or a tuple of arguments) and is left as it was. An operation
    that cannot be cut is refused by name; `whole` names groups (or parts of the module) that shall not be cut at all.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> for group in trace(net, torch.zeros(3, 1, 4, 4)):
    ...     print(group.name, group.size, [(cut.tensor, cut.axis, cut.per_unit) for cut in group.cuts])
    0 4 [('0.weight', 0, 1), ('0.bias', 0, 1), ('3.weight', 1, 4)]
    """
    listed = example if isinstance(example, tuple) else (example,)
    given = tuple(each.cpu() if isinstance(each, Tensor) else each for each in listed)
    try:
        module = copy.deepcopy(module).cpu()
    except Exception as error:
        raise InvalidValue(f"tracing: the model ({type(module).__name__}) cannot be copied: {error}") from error
    notes = watch(module, given)
    groups, owners = read_groups(notes, whole)
    _refuse_objections(notes, {root: name for root, name in owners.items() if not is_whole(name, whole)})
    prove(module, given, groups, notes)
    return groups


def _refuse_objections(notes: Notes, owners: Mapping[int, str]) -> None:
    """Refuse operations that have no cut version, if what they need whole can be cut."""
    refused: dict[str, list[str]] = {}
    for objection in notes.labels.objections:
        for root in notes.labels.atoms.roots(objection.atoms).tolist():
            known = refused.setdefault(objection.sentence, [])
            if root in owners and not is_whole(owners[root], known):
                known.append(owners[root])
    for sentence, found in refused.items():
        if found:
            raise InvalidValue(f"tracing: {sentence}; keep its units whole: {as_whole(found)}")
