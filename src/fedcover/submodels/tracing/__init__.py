"""Any module: the groups in which its units can be cut, found by running it once and proved on the spot."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.submodels.tracing.extract_groups import extract_unit_groups, is_kept_whole, whole_hint
from fedcover.submodels.tracing.tracer import TraceRecord, record_trace
from fedcover.submodels.tracing.verify import verify_groups
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
    inputs = tuple(each.cpu() if isinstance(each, Tensor) else each for each in listed)
    try:
        module = copy.deepcopy(module).cpu()
    except Exception as error:
        raise InvalidValue(
            f"tracing: the model ({type(module).__name__}) cannot be copied: {error}"
        ) from error
    first, *others = _attempts(module, inputs, whole)
    for reading in others:
        try:
            verify_groups(module, inputs, reading.groups, reading.notes)
        except InvalidValue:
            continue
        return reading.groups
    if first.error:
        raise first.error
    verify_groups(module, inputs, first.groups, first.notes)
    return first.groups


@dataclass(frozen=True)
class TraceAttempt:
    """What was seen, the groups in it, why they are refused, and the numbers that count nothing that can be cut."""

    notes: TraceRecord
    groups: tuple[UnitGroup, ...]
    error: InvalidValue | None
    constant: frozenset[str]

    @property
    def num_positions(self) -> int:
        """How many places of tensors belong to units."""
        return sum(group.size * cut.per_unit for group in self.groups for cut in group.cuts)


def _attempts(
    module: nn.Module, inputs: tuple[Any, ...], whole: Collection[str]
) -> list[TraceAttempt]:
    """Watch a module and read its groups; once more with numbers as constants that turned out to be, if that cuts more.

    So registers before an attention, or parts over which a softmax runs, stay whole, and what lies beside them is cut.
    """
    first = _attempt(record_trace(module, inputs), whole)
    if first.constant:
        second = _attempt(record_trace(module, inputs, first.constant), whole)
        if (
            second.groups
            and second.error is None
            and (first.error or second.num_positions > first.num_positions)
        ):
            return [first, second]
    return [first]


def _attempt(notes: TraceRecord, whole: Collection[str]) -> TraceAttempt:
    constant = frozenset(name for name, number in notes.tracked_sizes.items() if number.constant)
    try:
        groups, owners = extract_unit_groups(notes, whole)
    except InvalidValue as error:
        return TraceAttempt(notes, (), error, constant)
    refused = _blocking_ops(notes, owners, whole)
    if not refused:
        return TraceAttempt(notes, groups, None, constant)
    message, roots = next(iter(refused.items()))
    names: list[str] = []
    for root in roots:
        if not is_kept_whole(owners[root], names):
            names.append(owners[root])
    why = InvalidValue(f"tracing: {message}; keep its units whole: {whole_hint(names)}")
    return TraceAttempt(
        notes,
        (),
        why,
        constant | _sizes_counting(notes, {root for each in refused.values() for root in each}),
    )


def _blocking_ops(
    notes: TraceRecord, owners: Mapping[int, str], whole: Collection[str]
) -> dict[str, list[int]]:
    """What operations without a cut version need whole although it could be cut, by their sentences."""
    refused: dict[str, list[int]] = {}
    for objection in notes.labels.uncuttable_ops:
        for root in notes.labels.atoms.roots(objection.atoms).tolist():
            if root in owners and not is_kept_whole(owners[root], whole):
                refused.setdefault(objection.message, []).append(root)
    return refused


def _sizes_counting(notes: TraceRecord, roots: Collection[int]) -> frozenset[str]:
    """The module's own numbers that count some of these units."""
    counted_atoms = {
        name: notes.labels.atoms.roots(number.counted_atoms).tolist()
        for name, number in notes.tracked_sizes.items()
    }
    return frozenset(
        name for name, those in counted_atoms.items() if not set(roots).isdisjoint(those)
    )
