"""Any module: the groups in which its units can be cut, found by running it once and proved on the spot."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.submodels.tracing.extract_groups import as_whole, is_whole, read_groups
from fedcover.submodels.tracing.tracer import Notes, watch
from fedcover.submodels.tracing.verify import prove
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
    first, *others = _read(module, given, whole)
    for reading in others:
        try:
            prove(module, given, reading.groups, reading.notes)
        except InvalidValue:
            continue
        return reading.groups
    if first.error:
        raise first.error
    prove(module, given, first.groups, first.notes)
    return first.groups


@dataclass(frozen=True)
class Reading:
    """What was seen, the groups in it, why they are refused, and the numbers that count nothing that can be cut."""

    notes: Notes
    groups: tuple[UnitGroup, ...]
    error: InvalidValue | None
    constant: frozenset[str]

    @property
    def places(self) -> int:
        """How many places of tensors belong to units."""
        return sum(group.size * cut.per_unit for group in self.groups for cut in group.cuts)


def _read(module: nn.Module, given: tuple[Any, ...], whole: Collection[str]) -> list[Reading]:
    """Watch a module and read its groups; once more with numbers as constants that turned out to be, if that cuts more.

    So registers before an attention, or parts over which a softmax runs, stay whole, and what lies beside them is cut.
    """
    first = _reading(watch(module, given), whole)
    if first.constant:
        second = _reading(watch(module, given, first.constant), whole)
        if second.groups and second.error is None and (first.error or second.places > first.places):
            return [first, second]
    return [first]


def _reading(notes: Notes, whole: Collection[str]) -> Reading:
    constant = frozenset(name for name, number in notes.numbers.items() if number.constant)
    try:
        groups, owners = read_groups(notes, whole)
    except InvalidValue as error:
        return Reading(notes, (), error, constant)
    refused = _objections(notes, owners, whole)
    if not refused:
        return Reading(notes, groups, None, constant)
    sentence, roots = next(iter(refused.items()))
    names: list[str] = []
    for root in roots:
        if not is_whole(owners[root], names):
            names.append(owners[root])
    why = InvalidValue(f"tracing: {sentence}; keep its units whole: {as_whole(names)}")
    return Reading(notes, (), why, constant | _counting(notes, {root for each in refused.values() for root in each}))


def _objections(notes: Notes, owners: Mapping[int, str], whole: Collection[str]) -> dict[str, list[int]]:
    """What operations without a cut version need whole although it could be cut, by their sentences."""
    refused: dict[str, list[int]] = {}
    for objection in notes.labels.objections:
        for root in notes.labels.atoms.roots(objection.atoms).tolist():
            if root in owners and not is_whole(owners[root], whole):
                refused.setdefault(objection.sentence, []).append(root)
    return refused


def _counting(notes: Notes, roots: Collection[int]) -> frozenset[str]:
    """The module's own numbers that count some of these units."""
    counted = {name: notes.labels.atoms.roots(number.counted).tolist() for name, number in notes.numbers.items()}
    return frozenset(name for name, those in counted.items() if not set(roots).isdisjoint(those))
