"""Integers that remember what they count: a module's own numbers and the lengths of axes.

`view(B, T, self.num_heads, C // self.num_heads)` promises that an axis has as many entries as a
number says. A number that counts units must therefore shrink with them, and a number that cannot
shrink keeps its axis whole.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fedcover.submodels.tracing.unit_labels import UnionFind

Arithmetic = Callable[["TrackedInt", int], Any]


def untracked(operation: Arithmetic) -> Arithmetic:
    """Run arithmetic with sizes without tracing the tensor operations that it uses itself."""

    @wraps(operation)
    def wrapper(number: "TrackedInt", other: int) -> Any:
        with number.atoms.untracked():
            return operation(number, other)

    return wrapper


class TrackedInt(int):
    """An integer with one atom for each thing that it counts; arithmetic keeps track of them.

    A module computes sizes in plain Python, so a subclass of `int` with overloaded operators is the
    only way to see where a size comes from. What cannot be tracked returns an ordinary int.

    >>> atoms = UnionFind()
    >>> heads = TrackedInt.of(atoms, atoms.new(4))
    >>> width = heads * 3
    >>> int(width), width.counted_atoms.tolist()
    (12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4])
    """

    atoms: UnionFind
    counted_atoms: Tensor

    @classmethod
    def of(cls, atoms: UnionFind, counted_atoms: Tensor) -> "TrackedInt":
        """Return the number of things that these atoms stand for."""
        number = cls(len(counted_atoms))
        number.atoms, number.counted_atoms = atoms, counted_atoms
        return number

    @property
    def constant(self) -> bool:
        """Return whether nothing that it counts can be cut."""
        return not bool(self.atoms.roots(self.counted_atoms).any())

    def fix(self) -> None:
        """Mark the number as constant: nothing that it counts may be cut."""
        self.atoms.fix(self.counted_atoms)

    def _tracked(self, other: int) -> "TrackedInt":
        """Return another number with atoms; an ordinary int is constant."""
        if isinstance(other, TrackedInt):
            return other
        return TrackedInt.of(self.atoms, torch.zeros(int(other), dtype=torch.int64))

    def _from_atoms(self, counted_atoms: Tensor) -> "TrackedInt":
        return TrackedInt.of(self.atoms, counted_atoms)

    @untracked
    def __add__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) + other
        return self._from_atoms(torch.cat([self.counted_atoms, self._tracked(other).counted_atoms]))

    @untracked
    def __radd__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return other + int(self)
        return self._tracked(other) + self

    @untracked
    def __sub__(self, other: int) -> Any:
        if not isinstance(other, int) or not 0 <= other <= self:
            return int(self) - other
        self.atoms.tie(self.counted_atoms[: int(other)], self._tracked(other).counted_atoms)
        return self._from_atoms(self.counted_atoms[int(other) :])

    @untracked
    def __mul__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) * other
        inner = self._tracked(other)
        if self.constant:
            return self._from_atoms(inner.counted_atoms.repeat(int(self)))
        inner.fix()  # a product follows the order of the axes: units first, then a constant
        return self._from_atoms(self.counted_atoms.repeat_interleave(int(inner)))

    @untracked
    def __rmul__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return other * int(self)
        return self._tracked(other) * self

    @untracked
    def __floordiv__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 1 or int(self) % int(other):
            return int(self) // other
        parts = self.counted_atoms.view(int(other), -1)
        if isinstance(other, TrackedInt) and not other.constant:
            # the divisor counts units, so each part keeps its size
            self.atoms.tie(parts, other.counted_atoms[:, None])
            return self._from_atoms(torch.zeros(parts.shape[1], dtype=torch.int64))
        self.atoms.tie(parts, parts[:1])  # a constant number of equal parts
        return self._from_atoms(parts[0])

    @untracked
    def __rfloordiv__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return other // int(self)
        return self._tracked(other) // self

    def __deepcopy__(self, memo: object) -> "TrackedInt":
        return self

    __hash__ = int.__hash__


def to_plain_ints(value: Any) -> Any:
    """Return a value with every `TrackedInt` in it replaced by an ordinary int."""
    if isinstance(value, TrackedInt):
        return int(value)
    if isinstance(value, torch.Size):
        return torch.Size([int(size) for size in value])
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return slice(*(to_plain_ints(bound) for bound in bounds))
    if type(value) in (list, tuple):
        return type(value)(to_plain_ints(element) for element in value)
    if type(value) is dict:
        return {key: to_plain_ints(element) for key, element in value.items()}
    return value
