"""Find the unit groups of any module by running it once, and check them by cutting it."""

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
    """Find the groups in which a module's units can be cut.

    The groups are verified numerically: the sliced module must equal the masked one, forward and
    backward. The module itself is not changed.

    Args:
        module: The module to trace.
        example: An input of the module: a tensor, or a tuple of arguments.
        whole: Names of groups, or of parts of the module, that must not be cut.

    Returns:
        The groups, in the order in which the module uses their tensors.

    Raises:
        InvalidValue: If the module cannot run on the example, or if an operation cannot be cut.
            The message names the operation.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> for group in trace(net, torch.zeros(3, 1, 4, 4)):
    ...     cuts = [(cut.tensor, cut.axis, cut.per_unit) for cut in group.cuts]
    ...     print(group.name, group.size, cuts)
    0 4 [('0.weight', 0, 1), ('0.bias', 0, 1), ('3.weight', 1, 4)]
    """
    arguments = example if isinstance(example, tuple) else (example,)
    inputs = tuple(value.cpu() if isinstance(value, Tensor) else value for value in arguments)
    try:
        module = copy.deepcopy(module).cpu()
    except Exception as error:
        raise InvalidValue(
            f"tracing: the model ({type(module).__name__}) cannot be copied: {error}"
        ) from error
    first, *others = _attempts(module, inputs, whole)
    for attempt in others:
        try:
            verify_groups(module, inputs, attempt.groups, attempt.record)
        except InvalidValue:
            continue
        return attempt.groups
    if first.error:
        raise first.error
    verify_groups(module, inputs, first.groups, first.record)
    return first.groups


@dataclass(frozen=True)
class TraceAttempt:
    """The result of one attempt to trace a module.

    `error` says why it has no groups. `constant` names the module's own numbers that cannot count
    units that are cut.
    """

    record: TraceRecord
    groups: tuple[UnitGroup, ...]
    error: InvalidValue | None
    constant: frozenset[str]

    @property
    def num_positions(self) -> int:
        """Return how many indices along axes of tensors belong to units."""
        return sum(group.size * cut.per_unit for group in self.groups for cut in group.cuts)


def _attempts(
    module: nn.Module, inputs: tuple[Any, ...], whole: Collection[str]
) -> list[TraceAttempt]:
    """Trace a module; trace it again with constant numbers if that cuts more.

    The second attempt treats the numbers as constants that cannot count units. So registers before
    an attention, or parts over which a softmax runs, stay whole, and the rest is cut.
    """
    first = _attempt(record_trace(module, inputs), whole)
    if not first.constant:
        return [first]
    second = _attempt(record_trace(module, inputs, first.constant), whole)
    if not second.groups or second.error is not None:
        return [first]
    if first.error or second.num_positions > first.num_positions:
        return [first, second]
    return [first]


def _attempt(record: TraceRecord, whole: Collection[str]) -> TraceAttempt:
    constant = frozenset(name for name, size in record.tracked_sizes.items() if size.constant)
    try:
        groups, group_of_root = extract_unit_groups(record, whole)
    except InvalidValue as error:
        return TraceAttempt(record, (), error, constant)
    blocked_roots = _blocking_ops(record, group_of_root, whole)
    if not blocked_roots:
        return TraceAttempt(record, groups, None, constant)
    message, roots = next(iter(blocked_roots.items()))
    names: list[str] = []
    for root in roots:
        if not is_kept_whole(group_of_root[root], names):
            names.append(group_of_root[root])
    refusal = InvalidValue(f"tracing: {message}; keep its units whole: {whole_hint(names)}")
    all_roots = {root for roots in blocked_roots.values() for root in roots}
    return TraceAttempt(record, (), refusal, constant | _sizes_counting(record, all_roots))


def _blocking_ops(
    record: TraceRecord, group_of_root: Mapping[int, str], whole: Collection[str]
) -> dict[str, list[int]]:
    """Return the units that cannot be cut because of an operation, by the operation's message."""
    blocked_roots: dict[str, list[int]] = {}
    for op in record.labels.uncuttable_ops:
        for root in record.labels.atoms.roots(op.atoms).tolist():
            if root in group_of_root and not is_kept_whole(group_of_root[root], whole):
                blocked_roots.setdefault(op.message, []).append(root)
    return blocked_roots


def _sizes_counting(record: TraceRecord, roots: set[int]) -> frozenset[str]:
    """Return the names of the module's own numbers that count any of these units."""
    names: set[str] = set()
    for name, size in record.tracked_sizes.items():
        counted_roots = record.labels.atoms.roots(size.counted_atoms).tolist()
        if not roots.isdisjoint(counted_roots):
            names.add(name)
    return frozenset(names)
