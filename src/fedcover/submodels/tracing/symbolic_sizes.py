"""Sizes that remember where they come from: a module's own numbers and the lengths of axes.

`view(B, T, self.num_heads, C // self.num_heads)` promises that an axis has as many entries as a number says. A number
that counts units must therefore shrink with them, and a number that cannot shrink keeps its axis whole.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fedcover.submodels.tracing.unit_labels import UnionFind

Arithmetic = Callable[["TrackedInt", int], Any]


def untracked(operation: Arithmetic) -> Arithmetic:
    """Let arithmetic with sizes go unnoticed by those who follow the module's operations."""

    @wraps(operation)
    def unnoticed(number: "TrackedInt", other: int) -> Any:
        with number.atoms.untracked():
            return operation(number, other)

    return unnoticed


class TrackedInt(int):
    """A size with one atom for each thing that it counts; plain arithmetic keeps track of them.

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
        """The number of things that these atoms stand for."""
        number = cls(len(counted_atoms))
        number.atoms, number.counted_atoms = atoms, counted_atoms
        return number

    @property
    def constant(self) -> bool:
        """Whether nothing that it counts can be cut."""
        return not bool(self.atoms.roots(self.counted_atoms).any())

    def fix(self) -> None:
        """Say that it stays what it is."""
        self.atoms.fix(self.counted_atoms)

    def _like(self, other: int) -> "TrackedInt":
        return (
            other
            if isinstance(other, TrackedInt)
            else TrackedInt.of(self.atoms, torch.zeros(int(other), dtype=torch.int64))
        )

    def _from_atoms(self, counted_atoms: Tensor) -> "TrackedInt":
        return TrackedInt.of(self.atoms, counted_atoms)

    @untracked
    def __add__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) + other
        return self._from_atoms(torch.cat([self.counted_atoms, self._like(other).counted_atoms]))

    @untracked
    def __radd__(self, other: int) -> Any:
        return (
            self._like(other) + self if isinstance(other, int) and other >= 0 else other + int(self)
        )

    @untracked
    def __sub__(self, other: int) -> Any:
        if not isinstance(other, int) or not 0 <= other <= self:
            return int(self) - other
        self.atoms.tie(self.counted_atoms[: int(other)], self._like(other).counted_atoms)
        return self._from_atoms(self.counted_atoms[int(other) :])

    @untracked
    def __mul__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) * other
        inner = self._like(other)
        if self.constant:
            return self._from_atoms(inner.counted_atoms.repeat(int(self)))
        inner.fix()  # products are written in the order of the axes: many times something whole
        return self._from_atoms(self.counted_atoms.repeat_interleave(int(inner)))

    @untracked
    def __rmul__(self, other: int) -> Any:
        return (
            self._like(other) * self if isinstance(other, int) and other >= 0 else other * int(self)
        )

    @untracked
    def __floordiv__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 1 or int(self) % int(other):
            return int(self) // other
        parts = self.counted_atoms.view(int(other), -1)
        if isinstance(other, TrackedInt) and not other.constant:
            self.atoms.tie(
                parts, other.counted_atoms[:, None]
            )  # so many wholes, each of a size that stays
            return self._from_atoms(torch.zeros(parts.shape[1], dtype=torch.int64))
        self.atoms.tie(parts, parts[:1])  # a fixed number of equal parts
        return self._from_atoms(parts[0])

    @untracked
    def __rfloordiv__(self, other: int) -> Any:
        return (
            self._like(other) // self
            if isinstance(other, int) and other >= 0
            else other // int(self)
        )

    def __deepcopy__(self, memo: object) -> "TrackedInt":
        return self

    __hash__ = int.__hash__


def to_plain_ints(value: Any) -> Any:
    """A value with every Number in it as an ordinary int."""
    if isinstance(value, TrackedInt):
        return int(value)
    if isinstance(value, torch.Size):
        return torch.Size([int(each) for each in value])
    if type(value) in (list, tuple):
        return type(value)(to_plain_ints(each) for each in value)
    if isinstance(value, slice):
        return slice(
            to_plain_ints(value.start), to_plain_ints(value.stop), to_plain_ints(value.step)
        )
    return (
        {key: to_plain_ints(each) for key, each in value.items()} if type(value) is dict else value
    )
